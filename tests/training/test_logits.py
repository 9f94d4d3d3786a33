"""Logits in chunks are the model's own, whatever it does to them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
)

from llmcomp.training.logits import Reading, head_of, hidden_states, logits_of, read
from tests.training.models import VOCABULARY, llama, rows

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def gemma() -> Any:
    return Gemma2ForCausalLM(Gemma2Config(**SIZES, num_key_value_heads=2, head_dim=8, final_logit_softcapping=0.5, pad_token_id=0))


def cohere() -> Any:
    return CohereForCausalLM(CohereConfig(**SIZES, logit_scale=0.0625, pad_token_id=0, bos_token_id=1, eos_token_id=2))


def granite() -> Any:
    return GraniteForCausalLM(GraniteConfig(**SIZES, logits_scaling=8.0))


def gpt2() -> Any:
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=64))


CASES = {
    "llama": (llama, Reading()),
    "tied": (lambda: llama(tie_word_embeddings=True), Reading()),
    "gemma": (gemma, Reading(1.0, 0.5)),
    "cohere": (cohere, Reading(0.0625)),
    "granite": (granite, Reading(0.125)),
    "gpt2": (gpt2, Reading()),
}


@pytest.mark.parametrize("name", CASES)
def test_logits_are_the_models_own(name: str) -> None:
    make, expected = CASES[name]
    torch.manual_seed(0)
    model = make().eval()
    reading = read(model)
    assert reading == expected
    ids = torch.from_numpy(rows(2))
    with torch.no_grad():
        own = model(input_ids=ids).logits.flatten(0, 1)
        found = logits_of(hidden_states(model, reading, ids).flatten(0, 1), *head_of(model, reading), reading)
    # The same operations, in f32.
    np.testing.assert_allclose(found, own, rtol=1e-4, atol=1e-5 * float(own.abs().max()))


class Own(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).flip(-1)


@pytest.mark.parametrize("how", ["forward", "hook", "class"])
def test_what_no_name_explains_is_left_to_the_model(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama()
    if how == "class":
        model.lm_head.__class__ = Own
    elif how == "hook":
        model.lm_head.register_forward_hook(lambda module, given, out: out)
    else:
        forward = type(model).forward

        def shifted(self: Any, **given: Any) -> Any:
            out = forward(self, **given)
            out.logits = out.logits + torch.arange(VOCABULARY)
            return out

        monkeypatch.setattr(type(model), "forward", shifted)
    reading = read(model)
    assert reading.whole
    ids = torch.from_numpy(rows(2))
    with torch.no_grad():
        found = logits_of(hidden_states(model, reading, ids).flatten(0, 1), *head_of(model, reading), reading)
        np.testing.assert_array_equal(found, model(input_ids=ids).logits.flatten(0, 1))


def test_a_parametrized_head_is_read_as_its_weight() -> None:
    class Half(torch.nn.Module):
        def forward(self, w: torch.Tensor) -> torch.Tensor:
            return 0.5 * w

    model = llama()
    torch.nn.utils.parametrize.register_parametrization(model.lm_head, "weight", Half())
    assert read(model) == Reading()


def test_training_mode_is_left_as_it_was() -> None:
    model = llama().train()
    read(model)
    assert model.training
