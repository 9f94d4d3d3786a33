from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from llmcomp import checkpoint
from llmcomp.checkpoint.gguf import GGUFCheckpoint
from llmcomp.checkpoint.gguf_tokenizer import build
from llmcomp.errors import CheckpointError, TokenizerError
from tests.checkpoint.gguf_file import MERGES, vocabulary, write_gguf
from tests.checkpoint.pieces import SENTENCES, pieces
from tests.reference import bpe

KINDS = [gguf.GGMLQuantizationType[n] for n in ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4")]


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.name)
def test_rows_are_the_decoded_tensors(tmp_path: Path, kind: gguf.GGMLQuantizationType) -> None:
    wanted = write_gguf(tmp_path / "m.gguf", kind)
    opened = checkpoint.open(tmp_path / "m.gguf")
    assert set(opened.tensors) == set(wanted)
    for name, w in wanted.items():
        assert opened.tensors[name].shape == w.shape
        assert np.array_equal(opened.read(name).astype(np.float32), w), name
        assert np.array_equal(opened.rows(name, 5, 11).astype(np.float32), w[5:11]), name
        assert np.array_equal(opened.picked(name, np.array([9, 2, 9, 4])).astype(np.float32), w[[9, 2, 9, 4]]), name


def test_the_suffix_may_be_in_capitals(tmp_path: Path) -> None:
    write_gguf(tmp_path / "M.GGUF")
    assert isinstance(checkpoint.open(tmp_path / "M.GGUF"), GGUFCheckpoint)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_only_llama_interleaves_its_rows(tmp_path: Path, architecture: str) -> None:
    wanted = write_gguf(tmp_path / "m.gguf", architecture=architecture, biases=True)
    opened = checkpoint.open(tmp_path / "m.gguf")
    assert set(opened.tensors) == set(wanted) and opened.config["model_type"] == architecture and opened.config["attention_bias"]
    for name, w in wanted.items():
        assert np.array_equal(opened.read(name), w) and np.array_equal(opened.rows(name, 3, 9), w[3:9]), name
        assert np.array_equal(opened.picked(name, np.array([7, 0])), w[[7, 0]]), name


def test_the_config_is_the_models(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf")
    config = checkpoint.open(tmp_path / "m.gguf").config
    wanted = {
        "model_type": "llama",
        "hidden_size": 96,
        "head_dim": 16,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    }
    assert wanted.items() <= config.items() and config["vocab_size"] == 320


@pytest.mark.parametrize("text", SENTENCES)
@pytest.mark.parametrize("pre", ["smollm", "gpt-2", "llama-bpe", "qwen2"])
def test_a_sentence_gives_the_tokens_that_the_merges_give(tmp_path: Path, text: str, pre: str) -> None:
    from transformers import AutoTokenizer

    write_gguf(tmp_path / "m.gguf", pre=pre, add_bos_token=False)
    out = tmp_path / "out"
    out.mkdir()
    opened = checkpoint.open(tmp_path / "m.gguf")
    opened.check_tokenizer()
    opened.save_tokenizer(out)
    tokenizer = AutoTokenizer.from_pretrained(out)
    tokens, _ = vocabulary()
    assert tokenizer(text).input_ids == bpe.encode(text, pieces(text, pre), tokens, MERGES)
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert tokenizer("<|user|>hi").input_ids[0] == 1
    assert tokenizer.eos_token_id == 1 and tokenizer.bos_token_id == 0 and tokenizer.chat_template


@pytest.mark.parametrize(
    ("pre", "said", "wanted"),
    [
        ("smollm", {}, [5]),
        ("smollm", {"add_bos_token": True}, [0, 5]),
        ("smollm", {"add_bos_token": True, "add_eos_token": True}, [0, 5, 1]),
        ("llama-bpe", {}, [0, 5]),
        ("llama-bpe", {"add_bos_token": False}, [5]),
    ],
)
def test_bos_and_eos_go_around_where_the_file_or_its_family_says_so(
    tmp_path: Path, pre: str, said: dict[str, bool], wanted: list[int]
) -> None:
    """llama.cpp puts the bos token before a llama-3 text unless told otherwise; so does that model's own tokenizer."""
    from transformers import AutoTokenizer

    write_gguf(tmp_path / "m.gguf", pre=pre, **said)
    out = tmp_path / "out"
    out.mkdir()
    checkpoint.open(tmp_path / "m.gguf").save_tokenizer(out)
    letter = vocabulary()[0][5]
    assert AutoTokenizer.from_pretrained(out)(letter).input_ids == wanted


def test_a_whole_word_of_the_vocabulary_needs_no_merges(tmp_path: Path) -> None:
    """Llama 3 takes it as it is; the others only what the merges reach."""
    tokens, _ = vocabulary()
    for pre, wanted in (("llama-bpe", ["whole"]), ("qwen2", list("whole"))):
        metadata = write_and_read(tmp_path / f"{pre}.gguf", pre)
        metadata["tokenizer.ggml.tokens"] = [*tokens, "whole"]
        metadata["tokenizer.ggml.token_type"] = [1] * (len(tokens) + 1)
        assert build(metadata, None, None).encode("whole").tokens == wanted


def write_and_read(path: Path, pre: str = "smollm") -> dict[str, Any]:
    write_gguf(path, pre=pre)
    opened = checkpoint.open(path)
    assert isinstance(opened, GGUFCheckpoint)
    return dict(opened.metadata)


def test_tokenizers_that_cannot_be_rebuilt_are_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "a.gguf", pre="deepseek-r1")
    with pytest.raises(TokenizerError, match="deepseek-r1"):
        checkpoint.open(tmp_path / "a.gguf").check_tokenizer()
    write_gguf(tmp_path / "b.gguf", tokenizer="llama")
    with pytest.raises(TokenizerError, match="'llama'"):
        checkpoint.open(tmp_path / "b.gguf").check_tokenizer()


def test_damage_is_called_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path)
    raw = path.read_bytes()

    def refused(data: bytes, words: str) -> None:
        path.write_bytes(data)
        with pytest.raises(CheckpointError, match=words) as caught:
            checkpoint.open(path)
        assert "m.gguf" in str(caught.value)

    refused(raw[:-100], "truncated")
    refused(raw[:200], "truncated")
    refused(raw[:3], "too few")
    refused(b"GGML" + raw[4:], "no GGUF file")
    refused(raw[:4] + (9).to_bytes(4, "little") + raw[8:], "version 9")
    refused(raw[:8] + (1 << 60).to_bytes(8, "little") + raw[16:], "claims")
    write_gguf(path, architecture="mamba")
    with pytest.raises(CheckpointError, match="mamba"):
        checkpoint.open(path)
