"""Text to token ids, by the tokenizer of a folder or hub id, and the whitespace words that begin in each token."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
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


def has_tokenizer(source: str) -> bool:
    """Whether it is a folder with a tokenizer."""
    return any((Path(source) / f).is_file() for f in FILES)


def tokenizer_source(folders: list[str], reference: str | None) -> str:
    """The first folder that holds a tokenizer, else the reference.

    Raises:
        JudgeError: none can have one.
    """
    known = [source for source in [*folders, reference] if source and has_tokenizer(source)]
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
    return tokenize_all(source, [text], trust_remote_code)[0]


def tokenize_all(source: str, texts: list[str], trust_remote_code: bool = False) -> list[Tokens]:
    """`tokenize` of each text, with the tokenizer loaded once."""
    path = Path(source) / "tokenizer.json"
    if not Path(source).exists():
        path = _from_hub(source) or path
    try:
        encode = _fast(path) if path.is_file() else _other(source, trust_remote_code)
        found = [encode(text) for text in texts]
    except Exception as error:  # both libraries raise many kinds; each means that there is no tokenizer
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise JudgeError(f"{source}: its tokenizer cannot be loaded ({reason}). Give another with --tokenizer.") from None
    return [Tokens(np.asarray(ids, np.int64), _words(text, len(ids), offsets)) for text, (ids, offsets) in zip(texts, found, strict=True)]


def stop_tokens(folders: list[str]) -> frozenset[int]:
    """The ids that end an answer, as the first of these folders has it that tells any; none if no one does."""
    for path in (Path(folder) / name for folder in folders for name in ("generation_config.json", "config.json")):
        try:
            told = json.loads(path.read_text(encoding="utf8")).get("eos_token_id")
        except (OSError, ValueError, AttributeError):
            continue  # a folder is judged for its model, whatever lies beside it
        if told is not None:
            return frozenset(told if isinstance(told, list) else [told])
    return frozenset()


def _fast(path: Path) -> Callable[[str], tuple[Any, Any]]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path))
    # Files may carry the limits of their training.
    tokenizer.no_truncation()
    tokenizer.no_padding()

    def encode(text: str) -> tuple[Any, Any]:
        encoding = tokenizer.encode(text, add_special_tokens=False)
        return encoding.ids, encoding.offsets

    return encode


def _other(source: str, trust: bool) -> Callable[[str], tuple[Any, Any]]:
    if Path(source).exists() and not has_tokenizer(source):
        raise FileNotFoundError("no tokenizer there")
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=trust)

    def encode(text: str) -> tuple[Any, Any]:
        found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=tokenizer.is_fast, verbose=False)
        return found["input_ids"], found.get("offset_mapping")

    return encode


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
