"""An OpenVINO model that gives logits, of a whole window or token by token."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import openvino as ov
from numpy.typing import NDArray

from llmcomp.judge.errors import JudgeError

PROPERTIES = {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0", "KV_CACHE_PRECISION": "f32"}
"""Pinned, so that two models with different runtime options are compared on their weights alone."""
KNOWN_INPUTS = {"input_ids", "attention_mask", "position_ids", "beam_idx", "token_type_ids"}
PAST = re.compile(r"past_key_values\.|past\.|cache_params\.past\.")
"""Inputs of a model without state; a window begins with none of it. The output that continues one is called present."""


class Model(Protocol):
    @property
    def bin_bytes(self) -> int | None:
        """Size of openvino_model.bin, where there is one."""

    def logits(self, ids: NDArray[np.int64]) -> NDArray[Any]:
        """[length] token ids -> [length, vocabulary], valid until the next call."""

    def greedy(self, ids: NDArray[np.int64], count: int, stop: Collection[int]) -> list[int]:
        """The likeliest `count` tokens after `ids`, one after the other; a stop token ends them and is the last."""


def require_ir(folder: Path) -> Path:
    """The folder's openvino_model.xml; raises JudgeError if it or its .bin is missing."""
    xml = folder / "openvino_model.xml"
    for file in (xml, xml.with_suffix(".bin")):
        if not file.is_file():
            raise JudgeError(f"{folder}: it holds no {file.name}. Give a folder that an export has written.")
    return xml


def vocabulary_size(folder: Path) -> int | None:
    """Logits per position, read from the IR without compiling it; None where the IR leaves it open.

    Raises:
        JudgeError: no IR, or one that is no causal language model.
    """
    xml = require_ir(folder)
    try:
        model = ov.Core().read_model(xml)
    except RuntimeError as error:
        raise _unreadable(xml, error) from None
    _require_language_model(xml, {name for port in model.inputs for name in port.get_names()})
    last = _logits(model.outputs).get_partial_shape()[-1]
    return int(last.get_length()) if last.is_static else None


def device_name() -> str:
    """What the runtime calls the device that models run on."""
    return str(ov.Core().get_property("CPU", "FULL_DEVICE_NAME"))


class IRModel:
    """`FOLDER/openvino_model.xml` on CPU; with state, with past keys and values as inputs, or with neither.

    Raises:
        JudgeError: no IR, or one that is no causal language model.
    """

    def __init__(self, folder: Path, properties: Mapping[str, str] = PROPERTIES) -> None:
        self.xml = require_ir(folder)
        try:
            compiled = ov.Core().compile_model(self.xml, "CPU", dict(properties))
        except RuntimeError as error:
            raise _unreadable(self.xml, error) from None
        self._inputs = {name: port for port in compiled.inputs for name in port.get_names()}
        _require_language_model(self.xml, self._inputs)
        self._past = {name: port for name, port in self._inputs.items() if PAST.match(name)}
        outputs = {name: port for port in compiled.outputs for name in port.get_names()}
        presents = {name: re.sub("past_key_values|past", "present", name, count=1) for name in self._past}
        self._present = {past: outputs[name] for past, name in presents.items()} if outputs.keys() >= set(presents.values()) else {}
        self._output = _logits(compiled.outputs)
        self._request = compiled.create_infer_request()
        self._remembers = bool(self._request.query_state() or self._present)
        self.begin()

    @property
    def bin_bytes(self) -> int:
        return self.xml.with_suffix(".bin").stat().st_size

    def logits(self, ids: NDArray[np.int64]) -> NDArray[Any]:
        self.begin()
        out = self.extend(ids)
        if len(out) != len(ids):
            raise JudgeError(f"{self.xml}: it gives logits of {len(out)} positions for {len(ids)} tokens. Export it again.")
        return out

    def greedy(self, ids: NDArray[np.int64], count: int, stop: Collection[int]) -> list[int]:
        self.begin()
        answer: list[int] = []
        while len(answer) < count and not (answer and answer[-1] in stop):
            answer.append(int(self.extend(ids if not answer else np.array(answer[-1:]))[-1].argmax()))
        return answer

    def begin(self) -> None:
        """Forget all tokens."""
        self._request.reset_state()
        # New ones, as the runtime writes later keys and values into the tensors that it was given.
        self._seen, self._cache = np.zeros(0, np.int64), {name: _empty(port) for name, port in self._past.items()}

    def extend(self, ids: NDArray[np.int64]) -> NDArray[Any]:
        """Token ids behind those since `begin` -> logits [positions, vocabulary], the newest last, valid until the next call."""
        self._seen = np.concatenate([self._seen, ids])
        # A model that remembers nothing is shown everything again.
        x = (ids if self._remembers else self._seen)[None].astype(np.int64)
        total = len(self._seen)
        feed: dict[str, Any] = {
            "input_ids": x,
            "attention_mask": np.ones((1, total), np.int64),
            "position_ids": np.arange(total - x.shape[1], total, dtype=np.int64)[None],
            "beam_idx": np.zeros(1, np.int32),
            "token_type_ids": np.zeros_like(x),
            **self._cache,
        }
        try:
            result = self._request.infer({name: feed[name] for name in self._inputs}, share_outputs=True)
        except RuntimeError as error:
            raise JudgeError(f"{self.xml}: it does not run on {total} tokens ({_last_line(error)}). Try a smaller --window.") from None
        # The next call writes where these lie.
        self._cache |= {past: result[port].copy() for past, port in self._present.items()}
        out = result[self._output]
        if out.ndim != 3:
            raise JudgeError(f"{self.xml}: its output has shape {list(out.shape)}, not logits of every position. Export it again.")
        return out[0]


def _logits(outputs: list[Any]) -> Any:
    return next((port for port in outputs if "logits" in port.get_names()), outputs[0])


def _require_language_model(xml: Path, inputs: Collection[str]) -> None:
    strange = [name for name in inputs if name not in KNOWN_INPUTS and not PAST.match(name)]
    if "input_ids" not in inputs or strange:
        raise JudgeError(f"{xml}: its inputs ({', '.join(sorted(inputs))}) are not those of a causal language model.")


def _unreadable(xml: Path, error: RuntimeError) -> JudgeError:
    return JudgeError(f"{xml}: the runtime cannot load it ({_last_line(error)}). Export it again.")


def _empty(port: Any) -> ov.Tensor:
    """No past: batch 1, every other free dimension 0."""
    shape = [int(d.get_length()) if d.is_static else int(i == 0) for i, d in enumerate(port.get_partial_shape())]
    return ov.Tensor(port.get_element_type(), ov.Shape(shape))


def _last_line(error: Exception) -> str:
    """What went wrong; the runtime begins with where in its own source it did."""
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]
