"""A Hugging Face model in float32 in a child process, so that torch never enters the judge's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Collection
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcomp.judge.errors import JudgeError
from llmcomp.judge.hub import require_cached, trouble


class HFModel:
    """One window at a time goes through a mapped temporary file of length * vocabulary * 4 bytes. Close it, or use it in a `with`.

    Raises:
        JudgeError: the model cannot be loaded or run, the hub cannot be reached, the temporary disk is too small.
    """

    bin_bytes = None

    def __init__(self, source: str, length: int, trust_remote_code: bool = False) -> None:
        self._source = source
        environment = {**os.environ, "PYTHONUTF8": "1"}
        if not Path(source).exists():
            reason = trouble()
            if reason:
                require_cached(source, "config.json", reason, "reference")
                environment["HF_HUB_OFFLINE"] = "1"
        # Windows refuses to delete a file that the child, killed a moment ago, still has open.
        self._folder = tempfile.TemporaryDirectory(prefix="llmcomp-judge-", ignore_cleanup_errors=True)
        path = Path(self._folder.name, "window.f32")
        command = [sys.executable, "-m", "llmcomp.judge.hf_reference", source, str(path), str(length), str(int(trust_remote_code))]
        self._child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="utf8", env=environment)
        try:
            vocabulary = int(self._answer())
            self.file_bytes = 4 * length * vocabulary
            self._window = np.memmap(path, np.float32, "r", shape=(length, vocabulary))
        except BaseException:
            self.close()
            raise

    def _answer(self) -> str:
        assert self._child.stdout is not None
        for line in self._child.stdout:
            # Model code may print, too.
            if line.startswith("llmcomp:"):
                kind, _, rest = line[len("llmcomp:") :].strip().partition(" ")
                if kind == "error":
                    raise JudgeError(f"reference {self._source}: {rest}")
                return rest
        raise self._died()

    def _died(self) -> JudgeError:
        code = self._child.wait()
        memory = " (killed; was memory short?)" if code in (-9, 137) else ""
        return JudgeError(f"reference {self._source}: the process that runs it ended with code {code}{memory}. Its last words are above.")

    def logits(self, ids: NDArray[np.int64]) -> NDArray[Any]:
        self._ask(ids=ids.tolist())
        return self._window[: len(ids)]

    def greedy(self, ids: NDArray[np.int64], count: int, stop: Collection[int]) -> list[int]:
        """As Model.greedy, without the penalties and sampling that a checkpoint's generation config may ask for."""
        return [int(token) for token in self._ask(ids=ids.tolist(), greedy=count, stop=sorted(stop)).split()]

    def _ask(self, **request: Any) -> str:
        assert self._child.stdin is not None
        try:
            self._child.stdin.write(json.dumps(request) + "\n")
            self._child.stdin.flush()
        except OSError:
            raise self._died() from None
        return self._answer()

    def close(self) -> None:
        """End the child and delete the file."""
        self._child.kill()
        self._child.wait()
        for stream in (self._child.stdin, self._child.stdout):
            if stream is not None:
                try:
                    stream.close()
                except OSError:
                    continue  # a pipe whose reader is gone, with bytes still in it
        self.__dict__.pop("_window", None)
        self._folder.cleanup()

    def __enter__(self) -> HFModel:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
