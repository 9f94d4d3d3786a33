"""Models that give logits for a window: an IR in this process, a Hugging Face model in a child."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import numpy as np
import openvino as ov
from numpy.typing import NDArray

from llmcomp.judge.errors import JudgeError

PROPERTIES = {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0", "KV_CACHE_PRECISION": "f32"}
"""Pinned, so that two models with different runtime options are compared on their weights alone."""
KNOWN_INPUTS = {"input_ids", "attention_mask", "position_ids", "beam_idx", "token_type_ids"}


class Model(Protocol):
    def logits(self, ids: NDArray[np.int64]) -> NDArray[Any]:
        """[length] token ids -> [length, vocabulary]."""


def require_ir(folder: Path) -> Path:
    """The folder's openvino_model.xml; raises JudgeError if there is none."""
    xml = folder / "openvino_model.xml"
    if not xml.is_file():
        raise JudgeError(f"{folder}: it holds no openvino_model.xml. Give a folder that an export has written.")
    return xml


class IRModel:
    """`FOLDER/openvino_model.xml` on CPU, stateful or not.

    Raises:
        JudgeError: no IR, or one that is no causal language model.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.xml = require_ir(folder)
        try:
            self._compiled = ov.Core().compile_model(self.xml, "CPU", PROPERTIES)
        except RuntimeError as error:
            raise JudgeError(f"{self.xml}: the runtime cannot load it ({error}). Export it again.") from None
        self._inputs = {name: port for port in self._compiled.inputs for name in port.get_names()}
        strange = [p.get_any_name() for p in self._compiled.inputs if not p.get_names() & KNOWN_INPUTS]
        if "input_ids" not in self._inputs or strange:
            raise JudgeError(
                f"{self.xml}: its inputs ({', '.join(sorted(self._inputs))}) are not those of a causal language model with state."
            )
        self._request = self._compiled.create_infer_request()

    @property
    def bin_bytes(self) -> int:
        return self.xml.with_suffix(".bin").stat().st_size

    def logits(self, ids: NDArray[np.int64]) -> NDArray[Any]:
        x = ids[None].astype(np.int64)
        feed: dict[str, NDArray[Any]] = {
            "input_ids": x,
            "attention_mask": np.ones_like(x),
            "position_ids": np.arange(len(ids), dtype=np.int64)[None],
            "beam_idx": np.zeros(1, np.int32),
            "token_type_ids": np.zeros_like(x),
        }
        self._request.reset_state()
        out = self._request.infer({name: value for name, value in feed.items() if name in self._inputs})[0]
        if out.ndim != 3 or out.shape[1] != len(ids):
            raise JudgeError(f"{self.xml}: its first output has shape {list(out.shape)}, not logits of every position.")
        return out[0]


class HFModel:
    """A float32 transformers model in a child process; one window at a time goes through a mapped temporary file."""

    def __init__(self, source: str, length: int, trust_remote_code: bool = False) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="llmcomp-judge-")
        self._path = Path(self._folder.name, "window.f32")
        command = [sys.executable, "-m", "llmcomp.judge.hf_reference", source, str(self._path), str(length), str(int(trust_remote_code))]
        self._child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        answer = self._answer()
        self.vocabulary = int(answer)
        self._window = np.memmap(self._path, np.float32, "r", shape=(length, self.vocabulary))

    def _answer(self) -> str:
        assert self._child.stdout is not None
        while True:
            line = self._child.stdout.readline()
            if line.startswith("llmcomp:"):
                kind, _, rest = line[len("llmcomp:") :].strip().partition(" ")
                if kind == "error":
                    raise JudgeError(f"reference: {rest}")
                return rest
            if not line:
                raise JudgeError(f"reference: the process that runs it ended with code {self._child.wait()}.")

    def logits(self, ids: NDArray[np.int64]) -> NDArray[Any]:
        assert self._child.stdin is not None
        self._child.stdin.write(" ".join(map(str, ids.tolist())) + "\n")
        self._child.stdin.flush()
        self._answer()
        return np.array(self._window[: len(ids)])

    def __enter__(self) -> HFModel:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self._child.kill()
        self._child.wait()
        del self._window
        self._folder.cleanup()
