"""The built-in prompts: short, of several kinds, and written for this purpose."""

from __future__ import annotations

from pathlib import Path

from llmcomp.judge.errors import JudgeError

PROMPTS = (
    "The capital of France is",
    "Water boils at a lower temperature in the mountains because",
    "The three largest oceans of the world are",
    "Question: How many days are in a leap year?\nAnswer:",
    "In 1969, the first people to walk on the Moon",
    "A recipe for pancakes needs flour, eggs and",
    'def fibonacci(n):\n    """Return the n-th Fibonacci number."""\n',
    "To sort a list of numbers in Python,",
    "The difference between a virus and a bacterium is that",
    "Once upon a time, in a village by the sea,",
    "Dear Sir or Madam,\n\nI am writing to you because",
    "The advantages of trains over cars are:\n1.",
)


def load_prompts(file: str) -> tuple[str, ...]:
    """The lines of a UTF-8 file that are not empty.

    Raises:
        JudgeError: no such file, not UTF-8, no lines.
    """
    try:
        lines = Path(file).read_text(encoding="utf8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise JudgeError(f"prompts {file}: it cannot be read ({error}). Give a UTF-8 text file with a prompt on each line.") from None
    prompts = tuple(line.strip() for line in lines if line.strip())
    if not prompts:
        raise JudgeError(f"prompts {file}: it holds none. Give a UTF-8 text file with a prompt on each line.")
    return prompts
