"""The tokenizer of a .gguf file: byte-level BPE from its own vocabulary and merges, with the pre-tokenizer that its metadata names.

transformers (5.5) reads the merges of SmolLM2's file in a way that splits text into single characters; here a sentence gives the tokens that
the merges give, which a test holds against a textbook BPE.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from llmcomp.errors import TokenizerError

CONTROL, USER_DEFINED = 3, 4
"""Token types of the GGUF specification."""

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True)
class Pre:
    """How text is cut before the merges, as the tokenizer.json of that model family says it."""

    split: str | None = None
    """A regular expression of whole pre-tokens; None for GPT-2's."""
    digits: bool = False
    """Each digit by itself first."""
    nfc: bool = False
    whole_words: bool = False
    """A pre-token that is in the vocabulary is taken as it is, whatever the merges say."""
    add_bos: bool = False
    """What holds where the file does not say (llama.cpp's default)."""


LLAMA3 = Pre(rf"{CONTRACTIONS}|{WORDS}|\p{{N}}{{1,3}}|{REST}", whole_words=True, add_bos=True)
PRE = {
    "gpt-2": Pre(),
    "smollm": Pre(digits=True),
    "llama-bpe": LLAMA3,
    "llama3": LLAMA3,
    "llama-v3": LLAMA3,
    "qwen2": Pre(rf"{CONTRACTIONS}|{WORDS}|\p{{N}}|{REST}", nfc=True),
}
"""By `tokenizer.ggml.pre`. "default" and its absence are no pre-tokenizer of any model: llama.cpp warns, and we refuse."""
REMEDY = "Give --no-tokenizer and add a tokenizer yourself, or export the safetensors checkpoint"


def check_gguf_tokenizer(metadata: Mapping[str, Any], source: str) -> None:
    """Raises TokenizerError if there is no tokenizer, or none that can be rebuilt."""

    def wrong(reason: str) -> TokenizerError:
        return TokenizerError(source, reason, REMEDY)

    kind, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    if kind is None:
        raise wrong("the file has no tokenizer")
    if kind != "gpt2":
        raise wrong(f"its tokenizer is of kind {str(kind)[:80]!r}; only byte-level BPE ('gpt2') is rebuilt")
    if not isinstance(pre, str) or pre not in PRE:
        raise wrong(f"its pre-tokenizer {str(pre)[:80]!r} is not known, only {', '.join(PRE)}")
    tokens, merges, kinds = (metadata.get(f"tokenizer.ggml.{n}") for n in ("tokens", "merges", "token_type"))
    if not _texts(tokens) or not _texts(merges) or not isinstance(kinds, list) or len(kinds) != len(tokens):
        raise wrong("its vocabulary, merges or token types are missing or disagree")
    vocabulary = set(tokens)
    if len(vocabulary) != len(tokens):
        raise wrong(f"{len(tokens) - len(vocabulary)} entries of its vocabulary stand in it twice")
    for merge in merges:
        a, b = _pair(merge)
        if not {a, b, a + b} <= vocabulary:
            raise wrong(f"its merge {merge[:80]!r} is not of its vocabulary")
    for key in ("bos", "eos", "unknown", "padding"):
        number = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if number is not None and (type(number) is not int or not 0 <= number < len(tokens)):
            raise wrong(f"its {key} token {str(number)[:80]} is not of its vocabulary of {len(tokens)}")
    if not isinstance(metadata.get("tokenizer.chat_template", ""), str):
        raise wrong("its chat template is not a text")


def save_gguf_tokenizer(metadata: Mapping[str, Any], source: str, folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja into `folder`."""
    check_gguf_tokenizer(metadata, source)

    def token(key: str) -> str | None:
        number = metadata.get(f"tokenizer.ggml.{key}_token_id")
        return None if number is None else metadata["tokenizer.ggml.tokens"][number]

    names = {
        "bos_token": token("bos"),
        "eos_token": token("eos"),
        "unk_token": token("unknown"),
        "pad_token": token("padding") or token("eos"),
    }
    build(metadata, names["bos_token"], names["eos_token"]).save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata.get(f"{metadata.get('general.architecture')}.context_length", 1 << 20),
        **{k: v for k, v in names.items() if v is not None},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf8")
    template = metadata.get("tokenizer.chat_template")
    if template:
        (folder / "chat_template.jinja").write_text(template, encoding="utf8")


def build(metadata: Mapping[str, Any], bos: str | None, eos: str | None) -> Any:
    """The `tokenizers.Tokenizer` of metadata that `check_gguf_tokenizer` has passed."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    tokens, pre = metadata["tokenizer.ggml.tokens"], PRE[metadata["tokenizer.ggml.pre"]]
    merges = [_pair(merge) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges, ignore_merges=pre.whole_words))
    if pre.nfc:
        tokenizer.normalizer = normalizers.NFC()
    cuts = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre.split is None)]
    if pre.digits:
        cuts.insert(0, pre_tokenizers.Digits(individual_digits=True))
    if pre.split is not None:
        cuts.insert(0, pre_tokenizers.Split(Regex(pre.split), "isolated"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(cuts) if len(cuts) > 1 else cuts[0]
    tokenizer.decoder = decoders.ByteLevel()
    first = bos if metadata.get("tokenizer.ggml.add_bos_token", pre.add_bos) else None
    last = eos if metadata.get("tokenizer.ggml.add_eos_token") else None
    if first is not None or last is not None:
        tokenizer.post_processor = _around(first, last, tokens)
    kinds = metadata["tokenizer.ggml.token_type"]
    tokenizer.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t, k in zip(tokens, kinds, strict=True) if k == CONTROL]
    )
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t, k in zip(tokens, kinds, strict=True) if k == USER_DEFINED])
    return tokenizer


def _around(first: str | None, last: str | None, tokens: list[str]) -> Any:
    """Puts `first` before and `last` behind each text."""
    from tokenizers import processors

    def pieces(text: str) -> list[str]:
        return [p for p in (first, text, last) if p is not None]

    special = [(t, tokens.index(t)) for t in {first, last} - {None} if t is not None]
    template = processors.TemplateProcessing(single=pieces("$A"), pair=[*pieces("$A"), *pieces("$B")], special_tokens=special)
    return processors.Sequence([processors.ByteLevel(trim_offsets=False), template])


def _texts(value: Any) -> TypeGuard[list[str]]:
    return isinstance(value, list) and all(isinstance(v, str) for v in value)


def _pair(merge: str) -> tuple[str, str]:
    a, _, b = merge.partition(" ")
    return a, b
