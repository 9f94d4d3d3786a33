"""Calibration text that the model writes itself: sampled from its own data-free result, when there is no other data (`--dataset auto`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcomp.calibration.samples import Samples
from llmcomp.calibration.tokenizer import Tokenizer
from llmcomp.errors import CalibrationError

BATCH = 16
"""Rows that are written together: enough to keep the arithmetic busy, few enough for their keys and values to stay small."""
RANDOM_START = 3
"""Random tokens in front where no token begins a text: one alone would be continued in the same way too often."""
KNOWN_INPUTS = {"input_ids", "attention_mask", "position_ids", "beam_idx"}


@dataclass(frozen=True, eq=False)
class Starts:
    """How a text begins and how it ends."""

    bos: int | None
    eos: frozenset[int]
    ordinary: NDArray[np.int64]
    """[tokens] to begin with where there is no `bos`."""

    def draw(self, rng: np.random.Generator) -> list[int]:
        return [self.bos] if self.bos is not None else rng.choice(self.ordinary, RANDOM_START).tolist()


def starts_of(config: Mapping[str, Any], generation_config: Mapping[str, Any] | None, folder: Path | None) -> Starts:
    """Of a model's configs and its tokenizer's folder, without which every token but the model's special ones is ordinary.

    Raises:
        CalibrationError: there is no token to begin with.
        TokenizerError: the tokenizer cannot be loaded.
    """
    places = [generation_config or {}, config]
    bos = next((ids[0] for place in places if (ids := _ids(place.get("bos_token_id")))), None)
    eos = frozenset(token for place in places for token in _ids(place.get("eos_token_id")))
    if bos is not None:
        return Starts(bos, eos, np.zeros(0, np.int64))
    size = int(config.get("vocab_size") or 0)
    ordinary = Tokenizer(folder).ordinary() if folder is not None else np.arange(size)
    special = [*eos, *_ids(config.get("pad_token_id"))]
    ordinary = np.setdiff1d(ordinary[ordinary < size], np.array(special, np.int64))
    if not len(ordinary):
        raise CalibrationError("--dataset auto", "the model has no token to begin a text with", "Give a file as --dataset")
    return Starts(None, eos, ordinary)


def self_text(
    folder: Path,
    starts: Starts,
    num_samples: int,
    sequence_length: int,
    seed: int,
    batch: int = BATCH,
    advance: Callable[[int], None] | None = None,
) -> Samples:
    """`num_samples` rows of exactly `sequence_length` tokens, sampled at temperature 1 by `folder`/openvino_model.xml, which has a state.

    A row begins with the model's beginning of text, or random ordinary tokens; where the model ends a text, the next one begins in the same way.
    Each row has its own random numbers, made of `seed` and its number. The same seed gives the same rows as far as the runtime gives the same
    logits: on one machine, and with one `batch`. `advance` is told how many tokens were made.

    Raises:
        CalibrationError: the model cannot be loaded or run, is not one with a state, or gives NaN or Inf.
    """
    rows: list[NDArray[np.int64]] = []
    for first in range(0, num_samples, batch):
        numbers = range(first, min(first + batch, num_samples))
        # Compiled anew: in 2026.4 a state with an initial value reads stale values after reset_state, and in another request of the same model.
        rngs = [np.random.default_rng([seed, n]) for n in numbers]
        rows += _write(_Writer(folder / "openvino_model.xml"), starts, rngs, sequence_length, advance)
    return Samples("auto", f"text that the model wrote itself, seed {seed}", tuple(rows))


def _write(
    writer: _Writer, starts: Starts, rngs: list[np.random.Generator], length: int, advance: Callable[[int], None] | None
) -> list[NDArray[np.int64]]:
    tokens = np.empty((len(rngs), length), np.int64)
    # Tokens that are not sampled, for each row.
    given = [starts.draw(rng) for rng in rngs]
    for t in range(length):
        sampled = sample(writer.step(tokens[:, t - 1], t - 1), np.array([rng.random() for rng in rngs])) if t else None
        for i, rng in enumerate(rngs):
            if given[i]:
                tokens[i, t] = given[i].pop(0)
                continue
            assert sampled is not None
            tokens[i, t] = sampled[i]
            # The same token may end one text and begin the next.
            if sampled[i] in starts.eos and sampled[i] != starts.bos:
                given[i] = starts.draw(rng)
        if advance is not None:
            advance(len(rngs))
    return list(tokens)


def sample(logits: NDArray[Any], uniform: NDArray[np.float64]) -> NDArray[np.int64]:
    """Tokens [rows] of logits [rows, vocabulary] at temperature 1, by a number in [0, 1) for each row."""
    p = np.exp(logits - logits.max(-1, keepdims=True))
    total = np.cumsum(p, -1, dtype=np.float64)
    found = [np.searchsorted(row, u * row[-1], "right") for row, u in zip(total, uniform, strict=True)]
    return np.minimum(np.array(found, np.int64), logits.shape[-1] - 1)


class _Writer:
    """The compiled model, one token of each row at a time."""

    def __init__(self, xml: Path) -> None:
        import openvino as ov

        self._xml = xml
        try:
            compiled = ov.Core().compile_model(xml, "CPU")
        except RuntimeError as error:
            raise self._trouble(f"the runtime cannot load it ({_last_line(error)})") from None
        self._inputs = {name for port in compiled.inputs for name in port.get_names()}
        self._request = compiled.create_infer_request()
        if "input_ids" not in self._inputs or not self._inputs <= KNOWN_INPUTS or not self._request.query_state():
            raise self._trouble(f"its inputs ({', '.join(sorted(self._inputs))}) are not those of a language model with a state")
        self._output = next((o for o in compiled.outputs if "logits" in o.get_names()), compiled.outputs[0])

    def step(self, tokens: NDArray[np.int64], position: int) -> NDArray[Any]:
        """Logits [rows, vocabulary] behind the tokens [rows] at this position, which follow those of the last step."""
        rows = len(tokens)
        feed = {
            "input_ids": tokens[:, None],
            "attention_mask": np.ones((rows, position + 1), np.int64),
            "position_ids": np.full((rows, 1), position, np.int64),
            "beam_idx": np.arange(rows, dtype=np.int32),
        }
        try:
            logits = self._request.infer({name: feed[name] for name in self._inputs}, share_outputs=True)[self._output][:, -1]
        except RuntimeError as error:
            raise self._trouble(f"it does not run ({_last_line(error)})") from None
        # A token that a model rules out has -Inf.
        if not np.isfinite(logits.max(-1)).all():
            raise self._trouble("its logits are NaN or Inf")
        return logits

    def _trouble(self, reason: str) -> CalibrationError:
        return CalibrationError(str(self._xml), reason, "Give a file as --dataset instead of auto")


def _ids(value: Any) -> list[int]:
    return [v for v in (value if isinstance(value, list) else [value]) if isinstance(v, int)]


def _last_line(error: Exception) -> str:
    """What went wrong; the runtime begins with where in its own source it did."""
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]
