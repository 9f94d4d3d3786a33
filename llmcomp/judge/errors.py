"""The judge's only error."""


class JudgeError(Exception):
    """Something cannot be judged; the message names it and what to do."""
