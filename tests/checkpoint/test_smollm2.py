"""The real file: weights as transformers decodes them, and a tokenizer that is right where transformers' is not."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from llmcomp import checkpoint
from tests.checkpoint.pieces import SENTENCES, pieces
from tests.reference import bpe

pytestmark = [pytest.mark.slow, pytest.mark.fetch]


def test_weights_and_config_are_those_of_transformers(smollm2_gguf: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    opened = checkpoint.open(smollm2_gguf)
    model = AutoModelForCausalLM.from_pretrained(smollm2_gguf.parent, gguf_file=smollm2_gguf.name, dtype=torch.float32)
    wanted = {n: p.numpy() for n, p in model.state_dict().items() if n != "lm_head.weight"}
    assert set(opened.tensors) == set(wanted) and opened.config["tie_word_embeddings"]
    for name, w in wanted.items():
        assert np.array_equal(opened.read(name).astype(np.float32), w), name
        assert np.array_equal(opened.rows(name, 8, 72).astype(np.float32), w[8:72]), name
    for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"):
        assert opened.config[key] == getattr(model.config, key), key
    # transformers keeps the float32 that the file stores; the model's own config.json says 1e-05.
    assert opened.config["rms_norm_eps"] == 1e-5 == pytest.approx(model.config.rms_norm_eps, rel=1e-6)
    assert opened.config["rope_theta"] == model.config.rope_parameters["rope_theta"]


def test_it_opens_in_a_moment(smollm2_gguf: Path) -> None:
    checkpoint.open(smollm2_gguf)
    begin = time.perf_counter()
    checkpoint.open(smollm2_gguf).check_tokenizer()
    # 0.2 s on two slow cores; gguf-py's reader takes seconds.
    assert time.perf_counter() - begin < 2


@pytest.mark.parametrize("text", SENTENCES)
def test_a_sentence_gives_the_tokens_that_the_merges_give(smollm2_gguf: Path, tmp_path: Path, text: str) -> None:
    from tokenizers import Tokenizer

    opened = checkpoint.open(smollm2_gguf)
    opened.save_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokens = opened.metadata["tokenizer.ggml.tokens"]
    merges = [tuple(m.split(" ")) for m in opened.metadata["tokenizer.ggml.merges"]]
    ids = tokenizer.encode(text).ids
    assert ids == bpe.encode(text, pieces(text, "smollm"), tokens, merges)
    assert tokenizer.decode(ids) == text
    assert len(ids) < len(text)


def test_chat_and_special_tokens(smollm2_gguf: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    checkpoint.open(smollm2_gguf).save_tokenizer(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], add_generation_prompt=True, return_dict=False)
    begin, end = (tokenizer.convert_tokens_to_ids(t) for t in ("<|im_start|>", "<|im_end|>"))
    assert (begin, end) == (1, 2) and ids.count(begin) == 3 and ids.count(end) == 2
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (2, 2)
