"""The tokenizer and detokenizer IRs, converted in a child process (`python -m llmcomp.writing.tokenizer FOLDER TASK`): transformers stays out of ours.

Unlike the exporter, which logs a failed conversion at debug level and goes on, a failure here is an error.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from types import TracebackType

import platformdirs

from llmcomp.errors import TokenizerError
from llmcomp.imports import TELEMETRY, hide
from llmcomp.writing.full import is_full, told_of

NAMES = ("openvino_tokenizer", "openvino_detokenizer")
VERSIONED = ("llmcomp", "openvino", "openvino-tokenizers", "transformers")
SECONDS = 900
"""What a conversion may take; that of a vocabulary of 256 k takes half a minute."""
MARK = "llmcomp-tokenizer-result:"
SHOWN = 500
"""Characters of what a library says about a tokenizer, which may quote all of a file."""


class Conversion:
    """A running conversion. `finish` waits for it; leaving the `with` block without that ends it."""

    def __init__(self, folder: Path, task: str, trust_remote_code: bool) -> None:
        self.folder = folder
        self._cached = None if trust_remote_code else cache_root() / _key(folder, task)
        self._child: subprocess.Popen[str] | None = None
        if self._cached is not None and self._cached.is_dir():
            return
        command = [sys.executable, "-m", "llmcomp.writing.tokenizer", str(folder), task, str(int(trust_remote_code))]
        env = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": ""}
        self._child = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def __enter__(self) -> Conversion:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        if self._child is not None and self._child.poll() is None:
            self._child.kill()
            self._child.wait()

    def finish(self) -> None:
        """openvino_tokenizer and openvino_detokenizer (.xml, .bin) are in the folder.

        Raises:
            TokenizerError: it cannot be loaded or converted, or the converted one disagrees with it.
        """
        if self._child is None:
            assert self._cached is not None
            for path in self._cached.iterdir():
                shutil.copyfile(path, self.folder / path.name)
            return
        try:
            output, _ = self._child.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            raise TokenizerError("the tokenizer", f"its conversion took more than {SECONDS} s", "Use --no-tokenizer") from None
        answers = [line[len(MARK) :] for line in output.splitlines() if line.startswith(MARK)]
        answer = json.loads(answers[-1]) if answers else {"reason": output[-2000:] or f"exit code {self._child.returncode}"}
        if self._child.returncode or "reason" in answer:
            full = told_of(output)
            if full is not None:
                raise full
            raise TokenizerError(
                "the tokenizer",
                answer.get("reason", output[-2000:]),
                "Use --no-tokenizer to export the model without it, or report the tokenizer",
            )
        if self._cached is not None:
            self._keep(self._cached)

    def _keep(self, home: Path) -> None:
        try:
            self._copy(home)
        except OSError as error:
            # The folder has its tokenizer; the cache may be on another disk, and is to spare time alone.
            if not is_full(error):
                raise

    def _copy(self, home: Path) -> None:
        home.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".tokenizer-", dir=home.parent) as scratch:
            made = Path(scratch, "made")
            made.mkdir()
            for name in NAMES:
                for path in self.folder.glob(f"{name}.*"):
                    shutil.copyfile(path, made / path.name)
            # Another process may have been faster; then its files stay.
            with contextlib.suppress(OSError):
                made.rename(home)


def cache_root() -> Path:
    """Converted tokenizers, beside the skeletons: `LLMCOMP_CACHE`, else the user's cache folder of this platform."""
    return Path(os.environ.get("LLMCOMP_CACHE") or platformdirs.user_cache_dir("llmcomp")) / "tokenizers"


def _key(folder: Path, task: str) -> str:
    digest = hashlib.sha256(json.dumps([task, *(version(p) for p in VERSIONED)]).encode())
    for path in sorted(p for p in folder.iterdir() if p.is_file() and not p.name.startswith(".")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:24]


def _main(folder: Path, task: str, trust: bool) -> dict[str, str]:
    # transformers' tokenizers need no torch, which takes 6 s and 440 MB to import (measured); code of the tokenizer's own may.
    hide(TELEMETRY, "sklearn", *(() if trust else ("torch", "torchvision")))
    import openvino as ov
    from openvino_tokenizers import convert_tokenizer as convert
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust)
    except Exception as error:
        return {"reason": f"transformers cannot load it: {type(error).__name__}: {str(error)[:SHOWN]}"}
    if task.startswith(("auto", "text-generation", "image-text-to-text")):
        # A batch of prompts is padded on the left, so that generation goes on where each one ends.
        tokenizer.padding_side = tokenizer.truncation_side = "left"
    try:
        parts = convert(tokenizer, with_detokenizer=True)
    except Exception as error:
        return {"reason": f"openvino_tokenizers cannot convert it: {type(error).__name__}: {str(error)[:SHOWN]}"}
    for model, name in zip(parts, NAMES, strict=True):
        ov.save_model(model, folder / f"{name}.xml", compress_to_fp16=False)
    text = "Hello, world! 12 + 30 = 42."
    wanted = tokenizer(text).input_ids
    got = ov.compile_model(parts[0], "CPU")([text])["input_ids"][0].tolist()
    if got != wanted:
        return {"reason": f"the converted one splits {text!r} into {got}, the original into {wanted}"}
    return {}


if __name__ == "__main__":
    print(MARK + json.dumps(_main(Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "1")))
