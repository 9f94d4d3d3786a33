"""KL(teacher || student) from the teacher's k likeliest tokens and the mass of all others, without all logits in memory at once.

With p the teacher's probabilities of the kept tokens, P = 1 - sum p its tail, y the student's logits, r = log sum of e^y over the tokens not kept and
Z = log sum e^y: KL = sum p (log p - y + Z) + P (log P - r + Z). Q = 1 - sum q is never formed: r is a sum over the tail itself, so that a tail of
1e-30 has its relative precision. The gradient is q - p at a kept token and (Q - P) e^(y - r) at another.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from llmcomp.training.logits import Reading, chunk_tokens, logits_of


class Targets(NamedTuple):
    """What is kept of the teacher, of n tokens."""

    log_p: torch.Tensor
    """[n, k] log-probabilities."""
    ids: torch.Tensor
    """[n, k] int64 token ids."""
    log_tail: torch.Tensor
    """[n]: log of the mass of all other tokens, -inf where there are none."""


def normalized(targets: Targets) -> Targets:
    """In f32 and of sum one, which rounding to f16 had moved by 1e-4: the loss would otherwise have its minimum beside the teacher."""
    log_p, log_tail = targets.log_p.float(), targets.log_tail.float()
    total = torch.logaddexp(torch.logsumexp(log_p, -1), log_tail)
    return Targets(log_p - total[:, None], targets.ids, log_tail - total)


def divergence(logits: torch.Tensor, targets: Targets) -> tuple[torch.Tensor, torch.Tensor]:
    """KL of each token in nats [n], and its gradient for the logits [n, vocabulary], both f32; targets as of `normalized`."""
    log_p, ids, log_tail = targets
    kept = logits.gather(1, ids)
    rest = logits.scatter(1, ids, -torch.inf)
    log_rest = torch.logsumexp(rest, -1)
    log_z = torch.logaddexp(torch.logsumexp(kept, -1), log_rest)
    p, tail = log_p.exp(), log_tail.exp()
    log_q = kept - log_z[:, None]
    # A mass of zero adds nothing, whatever its logarithm.
    ours = torch.where(p > 0, p * (log_p - log_q), 0.0).sum(-1)
    theirs = torch.where(tail > 0, tail * (log_tail - (log_rest - log_z)), 0.0)
    # In place, as logits are large. Nothing is left where every token is kept: log_rest is -inf, and e^(y - 0) of what is masked is 0.
    gradient = rest.sub_(torch.where(torch.isneginf(log_rest), 0.0, log_rest)[:, None]).exp_()
    gradient.mul_((torch.exp(log_rest - log_z) - tail)[:, None])
    return ours + theirs, gradient.scatter_(1, ids, log_q.exp() - p)


class _Chunked(torch.autograd.Function):  # type: ignore[misc]
    """The sum of the divergences; gradients are made in the forward pass, so that logits are computed once and live for one chunk."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        targets: Targets,
        reading: Reading,
        chunk: int,
        train: bool,
    ) -> torch.Tensor:
        wanted = [train and x is not None and x.requires_grad for x in (hidden, weight, bias)]
        for_hidden = torch.zeros_like(hidden) if wanted[0] else None
        # In f32: a sum over thousands of tokens.
        for_weight = torch.zeros_like(weight, dtype=torch.float32) if wanted[1] else None
        for_bias = torch.zeros_like(bias, dtype=torch.float32) if wanted[2] else None
        total = torch.zeros((), dtype=torch.float64, device=hidden.device)
        for start in range(0, len(hidden), chunk):
            part = slice(start, start + chunk)
            logits = logits_of(hidden[part], weight, bias, reading)
            nats, gradient = divergence(logits, Targets(*(t[part] for t in targets)))
            total += nats.double().sum()
            if not any(wanted):
                continue
            if weight is None:
                if for_hidden is not None:
                    for_hidden[part] = gradient.to(hidden.dtype)
                continue
            if reading != Reading():
                gradient.mul_(reading.slope(logits))
            gradient = gradient.to(weight.dtype)
            if for_hidden is not None:
                for_hidden[part] = (gradient @ weight).to(hidden.dtype)
            if for_weight is not None:
                for_weight += gradient.T @ hidden[part].to(weight.dtype)
            if for_bias is not None:
                for_bias += gradient.float().sum(0)
        ctx.gradients = (
            for_hidden,
            None if for_weight is None or weight is None else for_weight.to(weight.dtype),
            None if for_bias is None or bias is None else for_bias.to(bias.dtype),
        )
        return total.float()

    @staticmethod
    def backward(ctx: Any, *outer: torch.Tensor) -> Any:
        gradients = [None if g is None else g * outer[0].to(g.dtype) for g in ctx.gradients]
        # They would lie beside those of the next step for as long as the loss has a name.
        ctx.gradients = None
        return (*gradients, None, None, None, None)


def summed_divergence(
    hidden: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    targets: Targets,
    reading: Reading,
    chunk: int | None = None,
) -> torch.Tensor:
    """Sum over n tokens of KL(teacher || student) in nats, f32 scalar with gradients for hidden states [n, width], matrix and bias as they ask for them.

    `chunk` is how many tokens have their logits in memory at once; CHUNK_BYTES of them unless said. Under autocast the product is in its type.
    """
    device = hidden.device.type
    if weight is not None and torch.is_autocast_enabled(device):
        weight = weight.to(torch.get_autocast_dtype(device))
        bias = None if bias is None else bias.to(weight.dtype)
    columns = hidden.shape[-1] if weight is None else weight.shape[0]
    with torch.autocast(device, enabled=False):
        return _Chunked.apply(hidden, weight, bias, normalized(targets), reading, chunk or chunk_tokens(columns), torch.is_grad_enabled())


def mean_divergence(logits: torch.Tensor, targets: Targets) -> torch.Tensor:
    """Mean KL over the tokens of logits [n, vocabulary], in nats."""
    return summed_divergence(logits, None, None, targets, Reading(whole=True)) / len(logits)
