"""Text to token ids, by the tokenizer of a folder or hub id."""

from __future__ import annotations

from pathlib import Path

from llmcomp.judge.errors import JudgeError


def tokenize(source: str, text: str, trust_remote_code: bool = False) -> list[int]:
    """Token ids without special tokens. A folder's own tokenizer.json is read by `tokenizers`; anything else goes through transformers.

    Raises:
        JudgeError: there is no tokenizer.
    """
    path = Path(source) / "tokenizer.json"
    if path.is_file():
        from tokenizers import Tokenizer

        return Tokenizer.from_file(str(path)).encode(text, add_special_tokens=False).ids
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code)
    except Exception as error:  # many kinds; each means that there is no tokenizer
        raise JudgeError(f"{source}: no tokenizer can be loaded ({type(error).__name__}). Give one with --tokenizer.") from None
    return tokenizer(text, add_special_tokens=False).input_ids
