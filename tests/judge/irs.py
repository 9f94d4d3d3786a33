"""Small IRs written by hand: the logits of a token are a row of a table."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import openvino as ov
from openvino import opset13 as ops
from openvino.op.util import Variable, VariableInfo

from llmcomp.judge import Text
from tests.tiny import tiny_tokenizer

VOCABULARY = 320
TEXT = Text("text", "the rain in the land then rose on another hill. " * 12)


def table(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(VOCABULARY, VOCABULARY)).astype(np.float32)


def bigram(folder: Path, logits: np.ndarray) -> str:
    """Stateless, token ids as the only input; with a tokenizer."""
    ids = _input("input_ids", [-1, -1])
    return _save(folder, ov.Model([ops.result(_rows(logits, ids))], [ids]))


def counting(folder: Path, logits: np.ndarray) -> str:
    """With every input of a stateful export, and a state: the logits are times the number of calls since the last reset."""
    ids, mask, positions = (_input(name, [-1, -1]) for name in ("input_ids", "attention_mask", "position_ids"))
    beams = _input("beam_idx", [-1], ov.Type.i32)
    info = VariableInfo()
    info.data_shape, info.data_type, info.variable_id = ov.PartialShape([1]), ov.Type.f32, "calls"
    variable = Variable(info)
    calls = ops.read_value(ops.constant(np.ones(1, np.float32)), variable)
    store = ops.assign(ops.add(calls, ops.constant(np.ones(1, np.float32))), variable)
    # Mask 1, positions from 0 and beam 0 leave the logits as they are.
    first = ops.add(ops.reduce_min(positions, ops.constant([0, 1])), ops.convert(ops.reduce_max(beams, ops.constant([0])), "i64"))
    factor = ops.subtract(ops.reduce_min(mask, ops.constant([0, 1])), first)
    out = ops.multiply(ops.multiply(_rows(logits, ids), calls), ops.convert(factor, "f32"))
    return _save(folder, ov.Model([ops.result(out)], [store], [ids, mask, positions, beams]))


def with_past(folder: Path, logits: np.ndarray) -> str:
    """Keys as an input; the logits, which are not the first output, are times one more than their length."""
    ids, past = _input("input_ids", [-1, -1]), _input("past_key_values.0.key", [-1, 2, -1, 8], ov.Type.f32)
    length = ops.gather(ops.shape_of(past, "i32"), ops.constant(2), ops.constant(0))
    out = ops.multiply(_rows(logits, ids), ops.convert(ops.add(length, ops.constant(np.int32(1))), "f32"))
    out.output(0).set_names({"logits"})
    present = ops.relu(past)
    present.output(0).set_names({"present.0.key"})
    return _save(folder, ov.Model([ops.result(present), ops.result(out)], [ids, past]))


def summing(folder: Path, logits: np.ndarray, kind: str) -> str:
    """The logits behind a token are the row of the sum of all tokens so far; that sum is remembered as a state, in past keys or not at all."""
    ids = _input("input_ids", [-1, -1])
    sums = ops.cum_sum(ids, ops.constant(1))
    if kind == "nothing":
        return _save(folder, ov.Model([ops.result(_sum_rows(logits, sums))], [ids]))
    if kind == "past":
        past = _input("past_key_values.0.key", [-1, 2, -1, 8], ov.Type.f32)
        before = ops.convert(ops.reduce_sum(past, ops.constant([2, 3])), "i64")
        sums = ops.add(sums, ops.gather(before, ops.constant([0]), ops.constant(1)))
        keys = ops.unsqueeze(ops.unsqueeze(ops.convert(ids, "f32"), ops.constant(1)), ops.constant(3))
        present = ops.concat([past, ops.multiply(keys, ops.constant(np.full((1, 2, 1, 8), 1 / 8, np.float32)))], 2)
        present.output(0).set_names({"present.0.key"})
        out = _sum_rows(logits, sums)
        out.output(0).set_names({"logits"})
        return _save(folder, ov.Model([ops.result(present), ops.result(out)], [ids, past]))
    mask, positions = (_input(name, [-1, -1]) for name in ("attention_mask", "position_ids"))
    info = VariableInfo()
    info.data_shape, info.data_type, info.variable_id = ov.PartialShape([1, 1]), ov.Type.f32, "sum"
    variable = Variable(info)
    before = ops.read_value(ops.constant(np.zeros((1, 1), np.float32)), variable)
    sums = ops.add(sums, ops.convert(before, "i64"))
    last = ops.gather(sums, ops.constant([-1]), ops.constant(1))
    store = ops.assign(ops.convert(last, "f32"), variable)
    # Nothing, if the mask covers all tokens and the positions go on.
    off = ops.subtract(
        ops.reduce_sum(mask, ops.constant([1]), True),
        ops.add(ops.gather(positions, ops.constant([-1]), ops.constant(1)), ops.constant([[1]])),
    )
    return _save(folder, ov.Model([ops.result(_sum_rows(logits, ops.add(sums, off)))], [store], [ids, mask, positions]))


def vision(folder: Path) -> str:
    """No language model."""
    pixels = _input("pixels", [1, 3], ov.Type.f32)
    return _save(folder, ov.Model([ops.result(ops.relu(pixels))], [pixels]))


def _input(name: str, shape: list[int], kind: ov.Type = ov.Type.i64) -> ov.Node:
    node = ops.parameter(shape, kind, name=name)
    node.output(0).set_names({name})
    return node


def _rows(logits: np.ndarray, ids: ov.Node) -> ov.Node:
    return ops.gather(ops.constant(logits), ids, ops.constant(0))


def _sum_rows(logits: np.ndarray, sums: ov.Node) -> ov.Node:
    return _rows(logits, ops.mod(sums, ops.constant(np.int64(len(logits)))))


def _save(folder: Path, model: ov.Model) -> str:
    folder.mkdir(parents=True)
    ov.save_model(model, folder / "openvino_model.xml", compress_to_fp16=False)
    tiny_tokenizer(folder, VOCABULARY)
    return str(folder)
