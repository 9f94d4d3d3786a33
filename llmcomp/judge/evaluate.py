"""Reference and candidate in lock-step, window by window: exact f32 log-probabilities are compared and nothing large is kept.

Both are held in memory at once. Perplexity is of tokens in disjoint windows unless a stride says otherwise, no BOS; KL is averaged over all
positions (of the new tokens, with a stride), its standard error taken over windows.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcomp.judge.errors import JudgeError
from llmcomp.judge.metrics import Window, log_softmax, token_kl, token_nll, windows
from llmcomp.judge.models import HFModel, IRModel, Model, require_ir
from llmcomp.judge.text import Text


@dataclass(frozen=True)
class Scores:
    """What one model got. KL and agreement are None without a reference."""

    name: str
    perplexity: float
    word_perplexity: float
    kl: float | None
    kl_standard_error: float | None
    kl_percentiles: dict[str, float] | None
    """Median, 90th and 99th percentile over tokens."""
    top1: float | None
    bin_bytes: int | None
    windows: int
    window: int
    stride: int
    seconds: float


def evaluate(
    folders: list[str],
    text: Text,
    reference: str | None = None,
    tokenizer: str | None = None,
    window: int = 512,
    stride: int | None = None,
    limit: int | None = None,
    trust_remote_code: bool = False,
    tell: Callable[[str], None] = lambda _: None,
) -> list[Scores]:
    """Scores of the reference (if any) and of each folder, on the same windows.

    `reference` is an IR folder, a Hugging Face folder or a hub id. `stride` defaults to `window`.

    Raises:
        JudgeError: nothing to judge, too little text, vocabularies that differ, logits that are not finite.
    """
    stride = stride or window
    if window < 2 or not 0 < stride <= window:
        raise JudgeError(f"window {window}, stride {stride}: a window has at least 2 tokens, and a stride lies between 1 and the window.")
    for folder in folders:
        require_ir(Path(folder))
    ids, words_per_token = _tokens(tokenizer or folders[0], text, trust_remote_code)
    spans = list(windows(len(ids), window, stride, limit))
    if not spans or (limit is not None and len(spans) < limit):
        raise JudgeError(
            f"{text.name}: it has {len(ids)} tokens, {len(list(windows(len(ids), window, stride)))} windows of {window}. Give more text, or ask for less."
        )
    results: list[Scores] = []
    with ExitStack() as stack:
        base = _reference(reference, window, trust_remote_code, stack) if reference else None
        for index, folder in enumerate(folders):
            tell(f"{folder}: {len(spans)} windows of {window} tokens")
            candidate = IRModel(Path(folder))
            started = time.perf_counter()
            mine, theirs = _Tally(), _Tally()
            for span in spans:
                x = ids[span.start : span.stop]
                logp = _log_probabilities(candidate, x, folder)
                expected = _log_probabilities(base, x, str(reference)) if base is not None else None
                mine.add(logp, x, span, expected)
                if expected is not None:
                    theirs.add(expected, x, span, None)
            seconds = time.perf_counter() - started
            shape = (len(spans), window, stride)
            if index == 0 and base is not None:
                nbytes = base.bin_bytes if isinstance(base, IRModel) else None
                results.append(theirs.scores(str(reference), words_per_token, nbytes, shape, 0.0))
            results.append(mine.scores(folder, words_per_token, candidate.bin_bytes, shape, seconds))
    return results


def _reference(source: str, window: int, trust: bool, stack: ExitStack) -> Model:
    if (Path(source) / "openvino_model.xml").is_file():
        return IRModel(Path(source))
    if Path(source).exists() and not (Path(source) / "config.json").is_file():
        raise JudgeError(f"reference {source}: neither an OpenVINO nor a Hugging Face folder. Give one of these, or a hub id.")
    return stack.enter_context(HFModel(source, window, trust))


def _tokens(source: str, text: Text, trust: bool) -> tuple[NDArray[np.int64], float]:
    """(token ids, whitespace words per token of the whole text)."""
    from llmcomp.judge.tokens import tokenize

    ids = np.asarray(tokenize(source, text.content, trust), np.int64)
    if not len(ids):
        raise JudgeError(f"{text.name}: it has no tokens. Give more text.")
    return ids, len(text.content.split()) / len(ids)


def _log_probabilities(model: Model, ids: NDArray[np.int64], name: str) -> NDArray[np.float32]:
    logits = model.logits(ids)
    if ids.max() >= logits.shape[-1]:
        raise JudgeError(f"{name}: token {ids.max()} is beyond its vocabulary of {logits.shape[-1]}. Give the right --tokenizer.")
    if not np.isfinite(logits).all():
        raise JudgeError(f"{name}: {int((~np.isfinite(logits)).sum())} of its logits are NaN or Inf. The model is broken.")
    return log_softmax(logits)


class _Tally:
    """Sums over windows."""

    def __init__(self) -> None:
        self.nll, self.tokens, self.agreed, self.compared = 0.0, 0, 0, 0
        self.kl: list[NDArray[Any]] = []

    def add(self, logp: NDArray[np.float32], ids: NDArray[np.int64], span: Window, expected: NDArray[np.float32] | None) -> None:
        nll = token_nll(logp, ids, span)
        self.nll += float(nll.sum(dtype=np.float64))
        self.tokens += len(nll)
        if expected is None:
            return
        if expected.shape != logp.shape:
            raise JudgeError(f"the vocabularies differ: {expected.shape[-1]} in the reference, {logp.shape[-1]} in the model.")
        new = slice(span.first, None)
        self.kl.append(token_kl(expected[new], logp[new]))
        self.agreed += int((expected[new].argmax(-1) == logp[new].argmax(-1)).sum())
        self.compared += len(self.kl[-1])

    def scores(self, name: str, words_per_token: float, nbytes: int | None, shape: tuple[int, int, int], seconds: float) -> Scores:
        mean = self.nll / self.tokens
        kl = se = top1 = percentiles = None
        if self.kl:
            means = np.array([k.mean(dtype=np.float64) for k in self.kl])
            every = np.concatenate(self.kl)
            kl = float(means.mean())
            se = float(means.std(ddof=1) / math.sqrt(len(means))) if len(means) > 1 else math.nan
            percentiles = {str(p): float(np.percentile(every, p)) for p in (50, 90, 99)}
            top1 = self.agreed / self.compared
        return Scores(name, math.exp(mean), math.exp(mean / words_per_token), kl, se, percentiles, top1, nbytes, *shape, seconds)
