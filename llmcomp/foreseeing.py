"""Foreseeing, what a distillation will need in memory and on disk, and whether this machine has it.

comes in: a checkpoint, what its start rounds, what training is told
goes out: TrainingForecast; warnings in words
may import: checkpoint, forecasting, formats, graph, options, planning, training, writing
read first: foresee
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from llmcomp import formats, planning
from llmcomp.checkpoint import Checkpoint
from llmcomp.forecasting import shortages
from llmcomp.formats import CompressedWeight
from llmcomp.graph.model import ModelGraph
from llmcomp.options.train_options import TrainOptions
from llmcomp.planning import Plan
from llmcomp.training.forecast import F32, Model, Trained, TrainingForecast, Work, memory_parts, trainable
from llmcomp.writing.forecast import Forecast

STATES = 2
"""States of a run that lie on disk while the newer one is written."""
STATE_COPIES = 3
"""Tensors of a state for each one that is trained: itself and its two moments."""
TRAINING_PRODUCTS, CHECKPOINTED_PRODUCTS = 3, 4
"""Of the size of a forward pass: it, the gradients of values and those of weights; with checkpointing the forward pass comes twice."""


def trained_by_plan(graphs: Sequence[ModelGraph], plan: Plan) -> tuple[list[Trained], int]:
    """What would be trained of a plan, and the bytes of all that is kept of its start."""
    found: dict[str, tuple[int, Trained]] = {}
    for graph in graphs:
        for layer, scheme in planning.stored(graph.layers, plan.of(graph.layers).schemes):
            if scheme.is_float or not formats.exists(scheme.format) or len(layer.shape) != 2:
                continue
            fmt, shape = formats.get(scheme.format), (layer.shape[0], layer.shape[1])
            groups = formats.grouped_shape(shape, scheme.group_size)[1] if scheme.group_size > 0 else 1
            found[layer.tensor] = (fmt.bits, Trained(*shape, groups, fmt.zero_point_type is not None))
    return _low(found)


def trained_by_start(weights: Mapping[str, CompressedWeight]) -> tuple[list[Trained], int]:
    """The same of a start that is made."""
    found = {}
    for name, weight in weights.items():
        groups = weight.scale.size // weight.shape[0]
        found[name] = (weight.format.bits, Trained(weight.shape[0], weight.shape[1], groups, weight.zero_point is not None))
    return _low(found)


def _low(found: Mapping[str, tuple[int, Trained]]) -> tuple[list[Trained], int]:
    from llmcomp.training.start import trained_of

    low = trained_of({name: bits for name, (bits, _) in found.items()})
    # A byte for each code and zero point, f16 scales.
    kept = sum(one.size + one.rows * one.groups * (2 + one.zeros) for _, one in found.values())
    return [found[name][1] for name in low], kept


def foresee(
    checkpoint: Checkpoint,
    trained: Sequence[Trained],
    kept_bytes: int,
    training: TrainOptions,
    counts: tuple[int, int],
    trust_remote_code: bool = False,
    export: Forecast | None = None,
) -> TrainingForecast:
    """`trained` and `kept_bytes` as of `trained_by_plan`; `counts` are rows to train on and held out; `export` is the forecast of the start, None where it is made."""
    from llmcomp.training.activations import look
    from llmcomp.training.batches import share_out
    from llmcomp.training.logits import chunk_tokens
    from llmcomp.training.teacher import cache_bytes

    (rows, held_out), length = counts, training.train_length
    shares = share_out(rows, 1, training.batch_rows, training.microbatch_rows)
    at_once = -(-shares.each // shares.accumulated)
    seen = look(checkpoint, at_once, length, training.dtype == "bf16", training.gradient_checkpointing, trust_remote_code)
    model = Model(seen.parameters, seen.vectors, trained, seen.widest)
    tokens = at_once * length
    work = Work(
        training.largest_rank,
        training.train == "weights",
        training.scale_lr != 0,
        training.norm_lr != 0,
        tokens,
        shares.accumulated,
        seen.kept_bytes,
        F32 * seen.vocabulary * min(tokens, chunk_tokens(seen.vocabulary)),
    )
    answers = training.loss == "kl"
    cache = cache_bytes(rows + held_out, length, training.top_k, seen.vocabulary) if answers else 0
    states = F32 * trainable(model, work) * (1 + STATES * STATE_COPIES * (training.save_every is not None))
    start = 0 if export is None else export.bin_bytes + export.more_disk_bytes
    steps = None if training.minutes else -(-max(1, round(rows * length * training.passes)) // (shares.each * length))
    operations = None
    if steps is not None:
        products = CHECKPOINTED_PRODUCTS if training.gradient_checkpointing else TRAINING_PRODUCTS
        looks = 2 + steps // training.eval_every
        passed = length * ((rows + held_out) * answers + products * steps * shares.each + looks * held_out)
        operations = 2.0 * seen.parameters * passed
    return TrainingForecast(
        memory_parts(model, work),
        0 if export is None else export.memory_bytes,
        cache,
        start + 2 * kept_bytes + cache + states,
        rows,
        held_out,
        length,
        steps,
        operations,
    )


def lacks(found: TrainingForecast, output: Path) -> list[str]:
    """What this machine lacks for it, in words."""
    return shortages(Forecast(found.disk_bytes, found.memory_bytes, 0.0), output, "training")
