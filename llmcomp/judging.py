"""The short judgement of a fresh export (`--eval`, `--max-loss`): a few windows of text, against the checkpoint in float32."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from llmcomp.checkpoint import Checkpoint
from llmcomp.errors import OptionError
from llmcomp.judge import JudgeError, evaluate, load_text
from llmcomp.judge.text import Text
from llmcomp.progress import Progress

WINDOW, WINDOWS = 512, 4
"""Tokens, and how many times that: half a minute for a model of 0.1 B parameters, a standard error of some 5 % of the KL."""
BUDGET_WINDOWS, T95 = 12, 1.796
"""Windows by which a loss is held, and Student's t that 95 % lie below with one degree of freedom less. Twice the time of 6 makes the bound a third
narrower."""


def check_judgeable(checkpoint: Checkpoint, file: Path | None, why: str) -> Text:
    """The text to judge on, `file` or what Python ships; `why` is the option that asks for it.

    Raises:
        OptionError: the text cannot be read, or the checkpoint cannot be run in float.
    """
    if checkpoint.folder is None or not checkpoint.plain:
        held = "a .gguf file" if checkpoint.folder is None else "stored quantized, or gets an adapter"
        raise OptionError(
            why,
            f"{checkpoint.source} is {held}, and cannot be run in float to compare with",
            "Export it with --weight-format fp32 too, and use `llmcomp eval OUT --reference FP32`",
        )
    try:
        return load_text(None if file is None else str(file))
    except JudgeError as error:
        raise OptionError("--eval-dataset", str(error), "Give a UTF-8 text file") from None


def judge(
    folder: Path, checkpoint: Checkpoint, trust_remote_code: bool, progress: Progress, text: Text, windows: int = WINDOWS
) -> dict[str, Any]:
    """The figures for the report.

    Raises:
        JudgeError: the float model does not fit, or does not run.
    """

    def advance(done: int, total: int) -> None:
        if done == 0:
            progress.start(total, "windows")
        else:
            progress.advance(1)

    window = min(WINDOW, checkpoint.config.get("max_position_embeddings") or WINDOW)
    base, scores = evaluate(
        [str(folder)],
        text,
        str(checkpoint.folder),
        window=window,
        limit=windows,
        trust_remote_code=trust_remote_code,
        tell=progress.note,
        progress=advance,
    )
    return {
        "text": text.name,
        "windows": scores.windows,
        "window": window,
        "kl": scores.kl,
        "kl_standard_error": scores.kl_standard_error,
        "top1": scores.top1,
        "perplexity": _finite(scores.perplexity),
        "reference_perplexity": _finite(base.perplexity),
    }


def _finite(value: float) -> float | None:
    """JSON has no infinity."""
    return value if math.isfinite(value) else None
