"""The source's tokenizer without transformers: its tokenizer.json, or one that a child process makes of older files."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcomp.calibration.chat import Template
from llmcomp.errors import TokenizerError

NAME = "tokenizer.json"


class Tokenizer:
    """Texts and chats to token ids.

    Raises:
        TokenizerError: there is none, or none that becomes a tokenizer.json.
    """

    def __init__(self, folder: Path, trust_remote_code: bool = False) -> None:
        self._folder = folder
        if (folder / NAME).is_file():
            self._tokenizer = _read(folder / NAME)
            return
        with tempfile.TemporaryDirectory(prefix="llmcomp-tokenizer-") as scratch:
            made = Path(scratch, NAME)
            _convert(folder, made, trust_remote_code)
            self._tokenizer = _read(made)

    def encode(self, text: str) -> NDArray[np.int64]:
        """[tokens], no special ones added."""
        return np.asarray(self._tokenizer.encode(text, add_special_tokens=False).ids, np.int64)

    def beginning(self) -> NDArray[np.int64]:
        """[tokens] that the tokenizer puts before every text, as the token of the beginning."""
        marked = self._tokenizer.encode("a", add_special_tokens=True)
        return np.asarray(marked.ids[: next(i for i, special in enumerate(marked.special_tokens_mask) if not special)], np.int64)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], where: str) -> NDArray[np.int64]:
        """[tokens] of a conversation as the model's chat template writes it.

        Raises:
            CalibrationError: there is no template, or it refuses the conversation.
        """
        return self.encode(self.chat_text(messages, where))

    def chat_text(self, messages: Sequence[Mapping[str, Any]], where: str, asks: bool = False) -> str:
        """A conversation as the model's chat template writes it; with `asks` the beginning of an answer comes last.

        Raises:
            CalibrationError: as `encode_chat`.
        """
        return self._template.render(messages, where, asks)

    def ordinary(self) -> NDArray[np.int64]:
        """[tokens], ascending: the vocabulary without special tokens."""
        special = {i for i, token in self._tokenizer.get_added_tokens_decoder().items() if token.special}
        return np.array(sorted(set(self._tokenizer.get_vocab().values()) - special), np.int64)

    @cached_property
    def _template(self) -> Template:
        return Template(self._folder)


def _read(path: Path) -> Any:
    from tokenizers import Tokenizer as FastTokenizer

    try:
        tokenizer = FastTokenizer.from_file(str(path))
    except Exception as error:  # the library knows no other class
        raise TokenizerError(str(path), f"it cannot be read ({error})", "Download or copy the file again") from None
    # Files may carry the limits of their training.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _convert(folder: Path, path: Path, trust_remote_code: bool) -> None:
    command = [sys.executable, "-m", "llmcomp.calibration.convert", str(folder), str(path), str(int(trust_remote_code))]
    env = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": "", "PYTHONUTF8": "1"}
    child = subprocess.run(command, env=env, capture_output=True, encoding="utf8", errors="replace")
    if child.returncode or not path.is_file():
        reason = (child.stderr.strip().splitlines() or [f"exit code {child.returncode}"])[-1]
        raise TokenizerError(str(folder), f"its tokenizer cannot be loaded ({reason})", f"Add its {NAME}, or calibrate on --dataset auto")
