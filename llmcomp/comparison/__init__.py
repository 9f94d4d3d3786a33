"""Folders side by side as one table and one page.

comes in: what the judge found, what the folders hold
goes out: a record; compare.json, compare.md and compare.html of it
may import: judge, inspect, pages, errors
read first: record.py
"""

from llmcomp.comparison.columns import COLUMNS, Column, used
from llmcomp.comparison.record import make_record
from llmcomp.comparison.write import check_output, write_comparison

__all__ = ["COLUMNS", "Column", "check_output", "make_record", "used", "write_comparison"]
