"""An OpenVINO model that gives logits for a window."""

from __future__ import annotations

import re
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
"""Inputs of a model without state; a window begins with none of it."""


class Model(Protocol):
    @property
    def bin_bytes(self) -> int | None:
        """Size of openvino_model.bin, where there is one."""

    def logits(self, ids: NDArray[np.int64]) -> NDArray[Any]:
        """[length] token ids -> [length, vocabulary], valid until the next call."""


def require_ir(folder: Path) -> Path:
    """The folder's openvino_model.xml; raises JudgeError if it or its .bin is missing."""
    xml = folder / "openvino_model.xml"
    for file in (xml, xml.with_suffix(".bin")):
        if not file.is_file():
            raise JudgeError(f"{folder}: it holds no {file.name}. Give a folder that an export has written.")
    return xml


class IRModel:
    """`FOLDER/openvino_model.xml` on CPU; with state, with past keys and values as inputs, or with neither.

    Raises:
        JudgeError: no IR, or one that is no causal language model.
    """

    def __init__(self, folder: Path) -> None:
        self.xml = require_ir(folder)
        try:
            self._compiled = ov.Core().compile_model(self.xml, "CPU", PROPERTIES)
        except RuntimeError as error:
            raise JudgeError(f"{self.xml}: the runtime cannot load it ({_last_line(error)}). Export it again.") from None
        self._inputs = {name: port for port in self._compiled.inputs for name in port.get_names()}
        self._past = {name: _empty(port) for name, port in self._inputs.items() if PAST.match(name)}
        strange = [name for name in self._inputs if name not in KNOWN_INPUTS and name not in self._past]
        if "input_ids" not in self._inputs or strange:
            raise JudgeError(f"{self.xml}: its inputs ({', '.join(sorted(self._inputs))}) are not those of a causal language model.")
        outputs = self._compiled.outputs
        self._output = next((o for o in outputs if "logits" in o.get_names()), outputs[0])
        self._request = self._compiled.create_infer_request()

    @property
    def bin_bytes(self) -> int:
        return self.xml.with_suffix(".bin").stat().st_size

    def logits(self, ids: NDArray[np.int64]) -> NDArray[Any]:
        x = ids[None].astype(np.int64)
        feed: dict[str, Any] = {
            "input_ids": x,
            "attention_mask": np.ones_like(x),
            "position_ids": np.arange(len(ids), dtype=np.int64)[None],
            "beam_idx": np.zeros(1, np.int32),
            "token_type_ids": np.zeros_like(x),
            **self._past,
        }
        self._request.reset_state()
        try:
            out = self._request.infer({name: feed[name] for name in self._inputs}, share_outputs=True)[self._output]
        except RuntimeError as error:
            raise JudgeError(f"{self.xml}: it does not run on {len(ids)} tokens ({_last_line(error)}). Try a smaller --window.") from None
        if out.ndim != 3 or out.shape[1] != len(ids):
            raise JudgeError(f"{self.xml}: its output has shape {list(out.shape)}, not logits of every position. Export it again.")
        return out[0]


def _empty(port: Any) -> ov.Tensor:
    """No past: batch 1, every other free dimension 0."""
    shape = [int(d.get_length()) if d.is_static else int(i == 0) for i, d in enumerate(port.get_partial_shape())]
    return ov.Tensor(port.get_element_type(), ov.Shape(shape))


def _last_line(error: Exception) -> str:
    """What went wrong; the runtime begins with where in its own source it did."""
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]
