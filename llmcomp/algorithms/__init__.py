"""Algorithms: pure functions over arrays that know no model and no file.

comes in: weights, statistics, a format
goes out: codes, scales, scores
may import: formats, errors
read first: sensitivity.py
"""
