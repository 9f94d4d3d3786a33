"""All models in lock-step, window by window: exact f32 log-probabilities are compared and nothing large is kept.

The reference and every candidate are compiled and held in memory at once; judge many large folders one at a time. Perplexity is of the
tokens in disjoint windows unless a stride says otherwise, no BOS; the first token of a window has no context and is not scored. KL and
agreement are taken at every position (of the new tokens, with a stride).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from llmcomp.judge.errors import JudgeError
from llmcomp.judge.hf_model import HFModel
from llmcomp.judge.hub import is_hub_id
from llmcomp.judge.metrics import Window, log_softmax, windows
from llmcomp.judge.models import IRModel, Model, require_ir
from llmcomp.judge.tally import Scores, Tally
from llmcomp.judge.text import Text
from llmcomp.judge.tokens import Tokens, tokenize, tokenizer_source


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
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Scores]:
    """Scores of the reference (if any) and of each folder, on the same windows.

    `reference` is an IR folder, a Hugging Face folder or a hub id (float32 in a process of its own). `stride` defaults to `window`, `limit`
    (windows) to all that the text gives. The tokenizer is that of the first folder that has one, else the reference's. `tell` gets lines
    about what is being loaded, `progress` how many windows are done of how many.

    Raises:
        JudgeError: nothing to judge, too little text, vocabularies that differ, logits that are not finite, a hub that cannot be reached.
    """
    stride = window if stride is None else stride
    check_windows(window, stride, limit)
    for folder in folders:
        require_ir(Path(folder))
    if reference:
        check_reference(reference)
    tokens = tokenize(tokenizer or tokenizer_source(folders, reference), text.content, trust_remote_code)
    spans = make_spans(tokens, text, window, stride, limit)
    with ExitStack() as stack:
        base = open_reference(reference, window, trust_remote_code, stack, tell) if reference else None
        models = []
        for folder in folders:
            tell(f"{folder}: loading")
            model = IRModel(Path(folder))
            models.append((model, Tally(folder, model.bin_bytes)))
        theirs = Tally(str(reference), base.bin_bytes) if base is not None else None
        for done, span in enumerate(spans):
            progress(done, len(spans))
            ids, words = tokens.ids[span.start : span.stop], tokens.words[span.start : span.stop]
            expected = None
            if base is not None and theirs is not None:
                expected = log_probabilities(base, ids, theirs)
                theirs.add(expected, ids, words, span)
            for model, tally in models:
                logp = log_probabilities(model, ids, tally)
                tally.add(logp, ids, words, span)
                if expected is not None:
                    tally.compare(expected, logp, span)
        progress(len(spans), len(spans))
    tallies = [theirs] if theirs is not None else []
    return [tally.scores(len(spans), window, stride) for tally in [*tallies, *(t for _, t in models)]]


def check_windows(window: int, stride: int, limit: int | None) -> None:
    """Raises JudgeError for sizes that make no sense."""
    if window < 2 or not 0 < stride <= window:
        raise JudgeError(f"window {window}, stride {stride}: a window has at least 2 tokens, and a stride lies between 1 and the window.")
    if limit is not None and limit < 1:
        raise JudgeError(f"{limit} windows: there is nothing to judge on. Ask for at least one.")


def make_spans(tokens: Tokens, text: Text, window: int, stride: int, limit: int | None) -> list[Window]:
    """The windows to judge on; a JudgeError if the text gives none, or fewer than asked for."""
    count = len(tokens.ids)
    spans = list(windows(count, window, stride, limit))
    if not spans:
        raise JudgeError(f"{text.name}: it has {count} tokens, and a window takes {window}. Give more text, or a smaller --window.")
    if limit is not None and len(spans) < limit:
        raise JudgeError(
            f"{text.name}: it has {count} tokens, {len(spans)} windows of {window}, and {limit} are asked for. Give more text, or ask for fewer."
        )
    return spans


def check_reference(source: str) -> None:
    """Raises JudgeError if it can be no reference, as far as a look at its files tells."""
    if not Path(source).exists():
        if not is_hub_id(source):
            raise JudgeError(f"reference {source}: no such folder, and not a hub id. Check the name.")
    elif not any((Path(source) / name).is_file() for name in ("openvino_model.xml", "config.json")):
        raise JudgeError(f"reference {source}: neither an OpenVINO nor a Hugging Face folder. Give one of these, or a hub id.")


def open_reference(source: str, window: int, trust: bool, stack: ExitStack, tell: Callable[[str], None]) -> Model:
    """The model of an IR folder, a Hugging Face folder or a hub id; the stack closes it."""
    tell(f"{source}: loading the reference")
    if (Path(source) / "openvino_model.xml").is_file():
        return IRModel(Path(source))
    model = stack.enter_context(HFModel(source, window, trust))
    tell(f"{source}: float32 in a process of its own, which hands logits over in a temporary file of {model.file_bytes / 2**20:.0f} MiB")
    return model


def log_probabilities(model: Model, ids: NDArray[np.int64], tally: Tally) -> NDArray[np.float32]:
    """Of a window, [length, vocabulary]; the time in the model goes to the tally. A JudgeError for logits that are not finite."""
    started = time.perf_counter()
    logits = model.logits(ids)
    tally.seconds += time.perf_counter() - started
    if ids.max() >= logits.shape[-1]:
        raise JudgeError(f"{tally.name}: token {ids.max()} is beyond its vocabulary of {logits.shape[-1]}. Give the right --tokenizer.")
    if not np.isfinite(logits).all():
        raise JudgeError(f"{tally.name}: {int((~np.isfinite(logits)).sum())} of its logits are NaN or Inf. The model is broken.")
    return log_softmax(logits)
