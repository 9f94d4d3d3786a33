"""The tokenizer of a .gguf file: byte-level BPE from its own vocabulary and merges, with the pre-tokenizer that its metadata names.

transformers (5.5) reads the merges of SmolLM2's file in a way that splits text into single characters; here a sentence gives the tokens that
the merges give, which a test holds against a textbook BPE.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from llmcomp.errors import TokenizerError

CONTROL, USER_DEFINED = 3, 4
"""Token types of the GGUF specification."""

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLITS = {
    "llama-bpe": rf"{CONTRACTIONS}|{WORDS}|\p{{N}}{{1,3}}|{REST}",
    "qwen2": rf"{CONTRACTIONS}|{WORDS}|\p{{N}}|{REST}",
}
"""`tokenizer.ggml.pre` -> the regular expression of that tokenizer; gpt-2 and smollm use the byte-level default (smollm digit by digit)."""
PRE = ("gpt-2", "smollm", *SPLITS)
REMEDY = "Give --no-tokenizer and add a tokenizer yourself, or export the safetensors checkpoint"


def check_gguf_tokenizer(metadata: dict[str, Any], source: str) -> None:
    """Raises TokenizerError if there is no tokenizer, or none that can be rebuilt."""
    kind, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    if kind is None:
        raise TokenizerError(source, "the file has no tokenizer", REMEDY)
    if kind != "gpt2":
        raise TokenizerError(source, f"its tokenizer is of kind {kind!r}; only byte-level BPE ('gpt2') is rebuilt", REMEDY)
    if pre not in PRE:
        raise TokenizerError(source, f"its pre-tokenizer {pre!r} is not known, only {', '.join(PRE)}", REMEDY)
    tokens, merges, kinds = (metadata.get(f"tokenizer.ggml.{n}") for n in ("tokens", "merges", "token_type"))
    if not isinstance(tokens, list) or not isinstance(merges, list) or not isinstance(kinds, list) or len(kinds) != len(tokens):
        raise TokenizerError(source, "its vocabulary, merges or token types are missing or disagree", REMEDY)


def save_gguf_tokenizer(metadata: dict[str, Any], source: str, folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja into `folder`."""
    check_gguf_tokenizer(metadata, source)
    tokens = metadata["tokenizer.ggml.tokens"]

    def token(key: str) -> str | None:
        number = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if number is None:
            return None
        if not 0 <= number < len(tokens):
            raise TokenizerError(source, f"its {key} token {number} is beyond its vocabulary of {len(tokens)}", REMEDY)
        return str(tokens[number])

    names = {
        "bos_token": token("bos"),
        "eos_token": token("eos"),
        "unk_token": token("unknown"),
        "pad_token": token("padding") or token("eos"),
    }
    build(metadata, names["bos_token"]).save(str(folder / "tokenizer.json"))
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


def build(metadata: dict[str, Any], bos: str | None) -> Any:
    """The `tokenizers.Tokenizer`."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    tokens, pre = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.pre"]
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    model = models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges, ignore_merges=pre == "llama-bpe")
    tokenizer = Tokenizer(model)
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre not in SPLITS)
    if pre in SPLITS:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(SPLITS[pre]), "isolated"), byte_level])
    elif pre == "smollm":
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    else:
        tokenizer.pre_tokenizer = byte_level
    tokenizer.decoder = decoders.ByteLevel()
    if metadata.get("tokenizer.ggml.add_bos_token") and bos is not None:
        template = processors.TemplateProcessing(single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tokens.index(bos))])
        tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    kinds = metadata["tokenizer.ggml.token_type"]
    tokenizer.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t, k in zip(tokens, kinds, strict=True) if k == CONTROL]
    )
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t, k in zip(tokens, kinds, strict=True) if k == USER_DEFINED])
    return tokenizer
