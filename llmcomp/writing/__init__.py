"""From a plan to a folder that works: layout, streaming, IR, bundle, report.

comes in: a ModelGraph, a Plan, a quantizer
goes out: a verified output folder with its report
may import: formats, graph, planning, pages
read first: layout.py
"""
