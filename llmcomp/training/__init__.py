"""Training of what compression has lost: weights that are rounded in every forward pass, with adapters that vanish into their codes.

comes in: torch weights, formats, scales and zero points of a compressed model
goes out: torch modules whose weights are rounded as they will be stored, and these weights
may import: formats, errors
read first: fake_quantize.py
"""
