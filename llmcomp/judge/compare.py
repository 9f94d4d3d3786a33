"""Several folders side by side: what each lost, how fast it is, how long its answers stay those of the reference.

All are judged on the same tokens, one after the other: the reference's log-probabilities wait in a temporary file of windows * window *
vocabulary * 4 bytes, so that there is never more than one model in memory. Accuracy and answers are taken under PROPERTIES, speed under the
runtime's defaults.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from llmcomp.judge.agreement import Agreement, agreement
from llmcomp.judge.errors import JudgeError
from llmcomp.judge.evaluate import check_reference, check_windows, log_probabilities, make_spans, open_reference
from llmcomp.judge.metrics import Window, paired_difference
from llmcomp.judge.models import IRModel, Model, device_name, require_ir, vocabulary_size
from llmcomp.judge.prompts import PROMPTS
from llmcomp.judge.speed import Speed, measure
from llmcomp.judge.tally import Scores, Tally
from llmcomp.judge.text import Text
from llmcomp.judge.tokens import Tokens, has_tokenizer, stop_tokens, tokenize_all, tokenizer_source

Answers = tuple[tuple[int, ...], ...]
"""Token ids, one answer for each prompt."""


@dataclass(frozen=True)
class Settings:
    """On how much to judge, in tokens unless it says otherwise."""

    window: int = 512
    windows: int = 24
    """How many of them; they do not overlap."""
    prompts: tuple[str, ...] = PROMPTS
    answer_tokens: int = 64
    """At most, for each prompt; 0 leaves the answers out."""
    prompt_tokens: int = 128
    """The beginning of the text, as a prompt to measure the speed with."""
    speed_tokens: int = 32
    """Decoded behind it; the first is told apart."""
    repeats: int = 5
    """Of the speed measurement; 0 leaves it out."""


@dataclass(frozen=True)
class Judged:
    """One model. What needs a reference is None without one and for itself."""

    scores: Scores
    speed: Speed | None
    """None for a Hugging Face reference, and if it was left out."""
    agreement: Agreement | None = None
    kl_difference: float | None = None
    """KL less that of the first folder, nats, mean over windows; None for the first."""
    kl_difference_standard_error: float | None = None
    """Over windows, in pairs, so that what is hard about the text does not count; None with a single window."""


@dataclass(frozen=True)
class Comparison:
    settings: Settings
    tokenizer: str
    reference: Judged | None
    models: tuple[Judged, ...]
    """In the order of the folders."""
    device: str
    """What ran them."""


@dataclass(frozen=True)
class _Task:
    """What every model is given."""

    settings: Settings
    tokens: Tokens
    spans: list[Window]
    prompts: list[NDArray[np.int64]]
    stop: frozenset[int]
    tell: Callable[[str], None]
    advance: Callable[[], None]
    """Called after each window of each model."""


def compare(
    folders: list[str],
    text: Text,
    reference: str | None = None,
    tokenizer: str | None = None,
    settings: Settings | None = None,
    trust_remote_code: bool = False,
    tell: Callable[[str], None] = lambda _: None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Comparison:
    """Judge each IR folder, and the reference (an IR folder, a Hugging Face folder or a hub id), if there is one.

    The tokenizer is that of the first folder that has one, else the reference's. `tell` gets lines about what is being done, `progress` how
    many windows are done of how many, over all models.

    Raises:
        JudgeError: a folder without IR, vocabularies that differ, no such reference, too little text or disk: all before a model is compiled
            (of a reference that is no IR the vocabulary is known, and the disk that it takes, once it is loaded, which is before the first
            window). Later only a model that does not run.
    """
    settings = settings or Settings()
    _check_settings(settings)
    for folder in folders:
        require_ir(Path(folder))
    if reference:
        check_reference(reference)
    sizes = {source: vocabulary_size(Path(source)) for source in [*folders, reference] if source and _is_ir(source)}
    source = tokenizer or tokenizer_source(folders, reference)
    tokens, *prompts = tokenize_all(source, [text.content, *settings.prompts], trust_remote_code)
    spans = make_spans(tokens, text, settings.window, settings.window, settings.windows)
    if settings.repeats and len(tokens.ids) < settings.prompt_tokens:
        raise JudgeError(
            f"{text.name}: it has {len(tokens.ids)} tokens, and the speed prompt takes {settings.prompt_tokens}. Give more text."
        )
    for prompt, found in zip(settings.prompts, prompts, strict=True):
        if not len(found.ids):
            raise JudgeError(f"prompt {prompt!r}: the tokenizer of {source} makes no tokens of it. Give another with --prompts.")
    if tokenizer is None:
        _check_tokenizers(
            [s for s in [*folders, reference] if s and s != source and has_tokenizer(s)], source, text, tokens, trust_remote_code
        )
    _check_vocabularies(sizes, source, max(int(t.ids.max()) for t in (tokens, *prompts)))
    total = len(spans) * (len(folders) + bool(reference))
    counted = iter(range(1, total + 1))
    stop = stop_tokens([source, *folders, *([reference] if reference else [])])
    task = _Task(settings, tokens, spans, [p.ids for p in prompts], stop, tell, lambda: progress(next(counted), total))
    progress(0, total)
    with ExitStack() as stack:
        base = stored = None
        theirs: Answers = ()
        if reference:
            scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="llmcomp-judge-", ignore_cleanup_errors=True)))
            scores, theirs, stored = _judge_reference(reference, task, scratch, sizes, trust_remote_code)
            base = Judged(scores, _speed(reference, task) if _is_ir(reference) else None)
        models: list[Judged] = []
        for folder in folders:
            scores, answers = _judge(folder, task, stored)
            difference = paired_difference(scores.window_kl, models[0].scores.window_kl) if models and stored is not None else (None, None)
            agreed = agreement(theirs, answers) if theirs else None
            models.append(Judged(scores, _speed(folder, task), agreed, *difference))
        del stored  # unmaps the file, which is deleted now
    return Comparison(settings, source, base, tuple(models), device_name())


def _is_ir(source: str) -> bool:
    return (Path(source) / "openvino_model.xml").is_file()


def _check_settings(settings: Settings) -> None:
    check_windows(settings.window, settings.window, settings.windows)
    if settings.answer_tokens < 0 or settings.repeats < 0:
        raise JudgeError(f"{settings.answer_tokens} answer tokens, {settings.repeats} repeats: give 0 to leave them out, or more.")
    if settings.prompt_tokens < 1 or settings.speed_tokens < 2:
        raise JudgeError(
            f"a prompt of {settings.prompt_tokens} tokens, {settings.speed_tokens} decoded: speed takes at least 1 and 2. Ask for more."
        )


def _check_tokenizers(others: list[str], source: str, text: Text, tokens: Tokens, trust: bool) -> None:
    for other in others:
        if not np.array_equal(tokenize_all(other, [text.content], trust)[0].ids, tokens.ids):
            raise JudgeError(
                f"{other}: the vocabularies differ: its tokenizer makes other tokens of the text than that of {source}. "
                "Compare models of one checkpoint, or name the tokenizer for all with --tokenizer."
            )


def _check_vocabularies(sizes: dict[str, int | None], tokenizer: str, largest: int) -> None:
    known = {source: size for source, size in sizes.items() if size is not None}
    for source, size in known.items():
        first = next(iter(known))
        if size != known[first]:
            raise JudgeError(
                f"{source}: the vocabularies differ: {size} tokens, and {known[first]} in {first}. Compare models of one checkpoint."
            )
        if largest >= size:
            raise JudgeError(
                f"{source}: the vocabularies differ: token {largest} of the tokenizer of {tokenizer} is beyond its {size}. "
                "Give the right --tokenizer."
            )


def _judge_reference(
    source: str, task: _Task, scratch: Path, sizes: dict[str, int | None], trust: bool
) -> tuple[Scores, Answers, NDArray[np.float32]]:
    """Its scores, its answers and its log-probabilities [windows, length, vocabulary], mapped from a file in `scratch`."""
    window = task.settings.window
    known = next((size for size in sizes.values() if size is not None), None)
    if known is not None:
        _check_disk(scratch, len(task.spans) * window * known * 4)
    with ExitStack() as stack:
        model = open_reference(source, window, trust, stack, task.tell)
        vocabulary = model.logits(task.tokens.ids[:1]).shape[-1]
        _check_vocabularies({source: vocabulary, **sizes}, source, 0)
        shape = (len(task.spans), window, vocabulary)
        _check_disk(scratch, 4 * int(np.prod(shape)))
        stored = np.memmap(scratch / "reference.f32", np.float32, "w+", shape=shape)
        tally = Tally(source, model.bin_bytes)
        for place, span in zip(stored, task.spans, strict=True):
            ids, words = task.tokens.ids[span.start : span.stop], task.tokens.words[span.start : span.stop]
            place[:] = log_probabilities(model, ids, tally)
            tally.add(place, ids, words, span)
            task.advance()
        answers = _answers(source, model, task)
    return tally.scores(len(task.spans), window, window), answers, stored


def _judge(folder: str, task: _Task, stored: NDArray[np.float32] | None) -> tuple[Scores, Answers]:
    task.tell(f"{folder}: loading")
    model = IRModel(Path(folder))
    tally = Tally(folder, model.bin_bytes)
    for i, span in enumerate(task.spans):
        ids, words = task.tokens.ids[span.start : span.stop], task.tokens.words[span.start : span.stop]
        logp = log_probabilities(model, ids, tally)
        tally.add(logp, ids, words, span)
        if stored is not None:
            tally.compare(stored[i], logp, span)
        task.advance()
    # Without a reference there is nothing to hold them against.
    answers = _answers(folder, model, task) if stored is not None else ()
    return tally.scores(len(task.spans), task.settings.window, task.settings.window), answers


def _answers(name: str, model: Model, task: _Task) -> Answers:
    if not task.settings.answer_tokens:
        return ()
    task.tell(f"{name}: answering {len(task.prompts)} prompts")
    return tuple(tuple(model.greedy(prompt, task.settings.answer_tokens, task.stop)) for prompt in task.prompts)


def _speed(folder: str, task: _Task) -> Speed | None:
    settings = task.settings
    if not settings.repeats:
        return None
    task.tell(f"{folder}: measuring its speed")
    return measure(Path(folder), task.tokens.ids[: settings.prompt_tokens], settings.speed_tokens, settings.repeats)


def _check_disk(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise JudgeError(
            f"the reference's log-probabilities take {needed >> 20} MiB in {folder.parent}, {free >> 20} MiB are free. "
            "Ask for fewer --windows, or set TMPDIR."
        )
