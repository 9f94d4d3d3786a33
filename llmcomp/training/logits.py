"""How a causal model of transformers makes logits of its hidden states, so that they can be made a chunk of tokens at a time.

Nearly all do `logits = head(hidden)`, some scale them (Cohere, Granite, Falcon-H1) or cap them (Gemma). What a model does is not guessed: the few
ways its config names are tried on a probe, and one whose logits are none of these keeps its own forward pass, whose logits lie in memory whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

CHUNK_BYTES = 1 << 26
"""Of one f32 matrix of logits; the loss has four such at once: these, their gradient, what a logarithm of sums needs, and those of the chunk before."""
PROBE = 8
"""Tokens of the probe."""
CLOSE = {torch.float32: 1e-3, torch.float64: 1e-6}
"""Of the largest logit of the probe: the same operations in another order. Half types: HALF_CLOSE; a forgotten scale or cap is far beyond either."""
HALF_CLOSE = 2e-2


@dataclass(frozen=True)
class Reading:
    """logits = cap tanh(scale (hidden W' + b) / cap), without the cap where it is None; `whole`: only the model's own forward pass knows."""

    scale: float = 1.0
    cap: float | None = None
    whole: bool = False

    def shape(self, raw: torch.Tensor) -> torch.Tensor:
        """Logits of what the matrix gives, [tokens, vocabulary] f32."""
        raw = raw.float()
        if self.scale != 1.0:
            raw = raw * self.scale
        return raw if self.cap is None else self.cap * torch.tanh(raw / self.cap)

    def slope(self, logits: torch.Tensor) -> torch.Tensor | float:
        """d logits / d raw, from the logits."""
        return self.scale if self.cap is None else self.scale * (1 - (logits / self.cap) ** 2)


def chunk_tokens(vocabulary: int) -> int:
    """Tokens whose f32 logits take at most CHUNK_BYTES."""
    return max(1, CHUNK_BYTES // (4 * vocabulary))


def vocabulary_of(model: Any) -> int:
    """Columns of the model's logits."""
    head = model.get_output_embeddings()
    return int(model.config.get_text_config().vocab_size if head is None else head.weight.shape[0])


@torch.no_grad()  # type: ignore[untyped-decorator]
def read(model: Any) -> Reading:
    """The way that reproduces the logits of `model` (evaluated without dropout) on a probe of tokens."""
    head, was = model.get_output_embeddings(), model.training
    # A head that is more than its weight and bias (an adapter beside it, a hook) is left to the model: at the start an adapter may add nothing yet.
    if head is None or type(head).forward is not torch.nn.Linear.forward or head._forward_hooks or head._forward_pre_hooks:
        return Reading(whole=True)
    decoder = model.get_decoder()
    if decoder is None or decoder is model:
        return Reading(whole=True)
    model.eval()
    try:
        device = head.weight.device
        ids = torch.arange(PROBE, device=device)[None] % vocabulary_of(model)
        expected = model(input_ids=ids, use_cache=False).logits[0].float()
        hidden = decoder(input_ids=ids, use_cache=False).last_hidden_state[0]
        if hidden.shape[-1] != head.weight.shape[1]:
            return Reading(whole=True)
        raw = functional.linear(hidden.to(head.weight.dtype), head.weight, head.bias)
        bound = CLOSE.get(head.weight.dtype, HALF_CLOSE) * float(expected.abs().max())
        for reading in _candidates(model):
            if float((reading.shape(raw) - expected).abs().max()) <= bound:
                return reading
        return Reading(whole=True)
    finally:
        model.train(was)


def _candidates(model: Any) -> list[Reading]:
    config = model.config.get_text_config()

    def given(name: str) -> float | None:
        value = getattr(config, name, None)
        return float(value) if isinstance(value, int | float) and value else None

    scales = [1.0]
    scales += [v for v in (given("logit_scale"), given("lm_head_multiplier")) if v]
    scales += [1 / v for v in (given("logits_scaling"),) if v]
    cap = given("final_logit_softcapping")
    # What the config says comes before what it leaves out: a cap does next to nothing to the small logits of a probe.
    return [Reading(scale, c) for scale in reversed(scales) for c in ([cap, None] if cap else [None])]


def hidden_states(model: Any, reading: Reading, ids: torch.Tensor) -> torch.Tensor:
    """[rows, length, width] of token ids [rows, length], what `head_of` takes; the logits themselves where only the model can make them."""
    if reading.whole:
        return model(input_ids=ids, use_cache=False).logits
    return model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state


def head_of(model: Any, reading: Reading) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The matrix [vocabulary, width] and bias, read once: a parametrized one is computed by reading it. (None, None) where the model keeps it to itself."""
    if reading.whole:
        return None, None
    head = model.get_output_embeddings()
    return head.weight, head.bias


def logits_of(hidden: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, reading: Reading) -> torch.Tensor:
    """f32 logits [tokens, vocabulary] of hidden states [tokens, width]."""
    if weight is None:
        return hidden.float()
    return reading.shape(functional.linear(hidden.to(weight.dtype), weight, bias))
