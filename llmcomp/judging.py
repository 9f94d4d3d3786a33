"""The short judgement of a fresh export (`--eval`): a few windows of text that Python ships, against the checkpoint in float32."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from llmcomp.checkpoint import Checkpoint
from llmcomp.errors import OptionError
from llmcomp.judge import evaluate, load_text
from llmcomp.progress import Progress

WINDOW, WINDOWS = 512, 4
"""Tokens, and how many times that: half a minute for a model of 0.1 B parameters, a standard error of some 5 % of the KL."""


def check_judgeable(checkpoint: Checkpoint) -> None:
    """Raises OptionError if the checkpoint cannot be run in float."""
    if checkpoint.folder is None:
        raise OptionError(
            "--eval",
            f"{checkpoint.source} is a .gguf file, which cannot be run in float to compare with",
            "Export it with --weight-format fp32 too, and use `llmcomp eval OUT --reference FP32`",
        )


def judge(folder: Path, checkpoint: Checkpoint, trust_remote_code: bool, progress: Progress) -> dict[str, Any]:
    """The figures for the report.

    Raises:
        JudgeError: the float model does not fit, or does not run.
    """

    def advance(done: int, total: int) -> None:
        if done == 0:
            progress.start(total, "windows")
        else:
            progress.advance(1)

    text = load_text()
    window = min(WINDOW, checkpoint.config.get("max_position_embeddings") or WINDOW)
    base, scores = evaluate(
        [str(folder)],
        text,
        str(checkpoint.folder),
        window=window,
        limit=WINDOWS,
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
