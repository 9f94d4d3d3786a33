"""The command line: argparse from one option table, one file per command, no logic.

comes in: arguments
goes out: an exit code
may import: options, entry paths
read first: main.py
"""

from llmcomp.cli.main import main

__all__ = ["main"]
