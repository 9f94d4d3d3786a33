"""Text to token ids, by the tokenizer of a folder or hub id, and the whitespace words that begin in each token."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcomp.judge.errors import JudgeError
from llmcomp.judge.hub import is_hub_id, require_cached, trouble

FILES = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt", "tokenizer_config.json")


@dataclass(frozen=True)
class Tokens:
    ids: NDArray[np.int64]
    words: NDArray[np.float64]
    """How many whitespace words begin in each token; a tokenizer that does not say where its tokens lie gives each the average."""


def tokenizer_source(folders: list[str], reference: str | None) -> str:
    """The first folder that holds a tokenizer, else the reference.

    Raises:
        JudgeError: none can have one.
    """
    known = [source for source in [*folders, reference] if source and any((Path(source) / f).is_file() for f in FILES)]
    if known:
        return known[0]
    if reference and not Path(reference).exists():
        return reference
    raise JudgeError(f"{', '.join(folders)}: no tokenizer there. Give the folder of the original model with --tokenizer.")


def tokenize(source: str, text: str, trust_remote_code: bool = False) -> Tokens:
    """Tokens without special ones. A tokenizer.json is read by `tokenizers`; anything else goes through transformers.

    Raises:
        JudgeError: there is no tokenizer, or it cannot be read.
    """
    path = Path(source) / "tokenizer.json"
    if not Path(source).exists():
        path = _from_hub(source) or path
    try:
        ids, offsets = _fast(path, text) if path.is_file() else _other(source, text, trust_remote_code)
    except Exception as error:  # both libraries raise many kinds; each means that there is no tokenizer
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise JudgeError(f"{source}: its tokenizer cannot be loaded ({reason}). Give another with --tokenizer.") from None
    return Tokens(np.asarray(ids, np.int64), _words(text, len(ids), offsets))


def _fast(path: Path, text: str) -> tuple[Any, Any]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path))
    # Files may carry the limits of their training.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    encoding = tokenizer.encode(text, add_special_tokens=False)
    return encoding.ids, encoding.offsets


def _other(source: str, text: str, trust: bool) -> tuple[Any, Any]:
    if Path(source).exists() and not any((Path(source) / f).is_file() for f in FILES):
        raise FileNotFoundError("no tokenizer there")
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=trust)
    found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=tokenizer.is_fast, verbose=False)
    return found["input_ids"], found.get("offset_mapping")


def _from_hub(repo: str) -> Path | None:
    """The repository's tokenizer.json in the cache; None if it has none."""
    import huggingface_hub
    from huggingface_hub import errors

    if not is_hub_id(repo):
        raise JudgeError(f"tokenizer {repo}: no such folder, and not a hub id. Check the name.")
    reason = trouble()
    if reason:
        require_cached(repo, "tokenizer.json", reason, "tokenizer")
    try:
        return Path(huggingface_hub.hf_hub_download(repo, "tokenizer.json", local_files_only=reason is not None))
    except errors.RemoteEntryNotFoundError:
        return None
    except Exception as error:  # network, disk and refusals, each of many kinds
        told = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise JudgeError(f"tokenizer {repo}: the hub does not give it ({told}). Check the name.") from None


def _words(text: str, count: int, offsets: Any) -> NDArray[np.float64]:
    starts = np.array([m.start() for m in re.finditer(r"\S+", text)], np.int64)
    if offsets is None:
        return np.full(count, len(starts) / max(count, 1))
    # The token of a word is the first that ends after the word's first character; pieces of one character share their ends.
    ends = np.maximum.accumulate(np.array([end for _, end in offsets], np.int64)) if count else np.zeros(0, np.int64)
    return np.bincount(np.searchsorted(ends, starts, "right"), minlength=count + 1)[:count].astype(np.float64)
