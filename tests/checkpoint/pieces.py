"""Pre-tokens from Python's own regular expressions, for texts where they say it as simply."""

from __future__ import annotations

import re

SENTENCES = [
    "the thin other then",
    "In 1912, the 12 men ran.",
    "  spaces   and\n\nlines\t",
    "naïve café, ok",
    "it's (she'll) 3.14 don't-you?",
    "日本語 text 1234567",
]
LETTERS, SIGN = r"[^\W\d_]", r"(?:[^\s\w]|_)"
GPT2 = rf"'(?:s|t|re|ve|m|ll|d)| ?{LETTERS}+| ?\d+| ?{SIGN}+|\s+(?!\S)|\s+"
NEW = rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|(?:[^\r\n\w]|_)?{LETTERS}+|DIGITS| ?{SIGN}+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def pieces(text: str, pre: str) -> list[str]:
    """The pre-tokens of `text`."""
    if pre == "smollm":
        return [piece for part in re.split(r"(\d)", text) for piece in re.findall(GPT2, part)]
    if pre == "gpt-2":
        return re.findall(GPT2, text)
    return re.findall(NEW.replace("DIGITS", r"\d" if pre == "qwen2" else r"\d{1,3}"), text)
