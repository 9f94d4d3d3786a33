"""The weights of a written model, by numpy: each decompression chain of the XML over the bytes of the .bin."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from llmcomp import formats
from llmcomp.formats.e2m1 import decode as e2m1
from llmcomp.formats.nf4 import LEVELS
from llmcomp.graph.ir import IR

CHAIN = {"Const", "Convert", "Subtract", "Multiply", "Reshape", "Gather"}


def written_weights(folder: Path) -> list[np.ndarray]:
    """What the MatMuls and Gathers of the model read as weights, in float32, whatever type a chain is said to compute in."""
    ir, raw = IR.read(folder / "openvino_model.xml"), np.fromfile(folder / "openvino_model.bin", np.uint8)
    found = {}
    for source, (number, port) in _weights(ir).items():
        found[source] = _value(ir, raw, source)
        before = ir.inputs[number][0][0]
        if port == 1 and ir.kind(before) == "Gather" and not _is_chain(ir, before) and ir.output_type(ir.inputs[before][1][0]) == "I32":
            # Inputs are looked up in the order of the columns.
            order, axis = (_value(ir, raw, ir.inputs[before][port][0]) for port in (1, 2))
            assert axis == -1 and sorted(order) == list(range(found[source].shape[1]))
            found[source][:, order] = found[source].copy()
    return list(found.values())


def _weights(ir: IR) -> dict[int, tuple[int, int]]:
    """The end of each weight's chain, and the last of the nodes and their inputs that read it."""
    found = {}
    for number in ir.layers:
        port = {"MatMul": 1, "Gather": 0}.get(ir.kind(number))
        if port is None or (ir.kind(number) == "Gather" and _is_chain(ir, number)):
            continue
        source = ir.inputs[number][port][0]
        if _is_chain(ir, source) and len(ir.output_shape(source)) > 1:
            found[source] = (number, port)
    return found


def written_codes(folder: Path) -> list[np.ndarray]:
    """The numbers at the head of each of these chains, in the same order: codes (out, in), of floats of eight bits as bytes."""
    ir, raw = IR.read(folder / "openvino_model.xml"), np.fromfile(folder / "openvino_model.bin", np.uint8)
    found = []
    for source in _weights(ir):
        head = max(_constants(ir, source), key=lambda number: math.prod(ir.output_shape(number)))
        data, shape = ir.data(head), ir.output_shape(source)
        begin = int(data["offset"])
        stored = np.ascontiguousarray(raw[begin : begin + int(data["size"])])
        kind = data["element_type"]
        found.append((_constant(ir, raw, head) if kind == "bf16" else formats.unpack(stored, kind, ir.output_shape(head))).reshape(shape))
    return found


def _constants(ir: IR, number: int) -> list[int]:
    return [number] if ir.kind(number) == "Const" else [one for source, _ in ir.inputs[number].values() for one in _constants(ir, source)]


def _is_chain(ir: IR, number: int) -> bool:
    return ir.kind(number) in CHAIN and all(_is_chain(ir, source) for source, _ in ir.inputs[number].values())


def _value(ir: IR, raw: np.ndarray, number: int) -> np.ndarray:
    kind = ir.kind(number)
    inputs = [_value(ir, raw, ir.inputs[number][port][0]) for port in sorted(ir.inputs[number])]
    if kind == "Const":
        return _constant(ir, raw, number)
    if kind == "Convert":
        return inputs[0]
    if kind == "Gather":
        return inputs[0][inputs[1].astype(int)]
    if kind == "Reshape":
        return inputs[0].reshape(ir.output_shape(number))
    return inputs[0] - inputs[1] if kind == "Subtract" else inputs[0] * inputs[1]


def _constant(ir: IR, raw: np.ndarray, number: int) -> np.ndarray:
    data, shape = ir.data(number), ir.output_shape(number)
    kind, begin = data["element_type"], int(data["offset"])
    stored = np.ascontiguousarray(raw[begin : begin + int(data["size"])])
    if kind == "i64":
        return stored.view("<i8").reshape(shape)
    if kind == "bf16":
        return (stored.view("<u2").astype(np.uint32) << 16).view(np.float32).reshape(shape)
    if kind == "i32":
        return stored.view("<i4").reshape(shape)
    codes = formats.unpack(stored, kind, shape)
    if kind == "f4e2m1":
        return e2m1(formats.NUMPY, codes)
    if kind == "nf4":
        return np.asarray(LEVELS, np.float32)[codes]
    if kind == "f8e8m0":
        return np.ldexp(np.float32(1), codes.astype(int) - 127)
    return formats.NUMPY.from_f8e4m3(codes) if kind == "f8e4m3" else codes.astype(np.float32)
