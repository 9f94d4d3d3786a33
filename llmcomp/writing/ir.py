"""The final XML: each weight of the skeleton becomes one decompression chain over constants of the .bin."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from llmcomp.formats import Node
from llmcomp.graph.ir import IR
from llmcomp.graph.layer import Layer
from llmcomp.graph.model import ModelGraph
from llmcomp.planning import ORDER, Scheme, adapters, layer_chain
from llmcomp.writing.layout import GATHER_AXIS, LAST_AXIS, Layout, Slot

PRECISION = {"f16": "FP16", "f32": "FP32", "bf16": "BF16", "i64": "I64"}
"""How the IR spells types on ports, where it differs from upper case."""
SUFFIX = {"codes": "", "weight": ""}
"""The codes keep the weight's own name, other parts are named `<weight>/<part>`, as NNCF names them."""


def write_ir(
    graph: ModelGraph, schemes: Mapping[str, Scheme], layout: Layout, tail: Mapping[str, Slot], path: Path, rt_info: Mapping[str, Any]
) -> None:
    """Write the XML of the compressed model.

    `tail` holds, by layer name, the scales of layers whose chain computes in f32. The graph's own IR is left as it was.
    """
    ir = IR.read(graph.skeleton.xml)
    for number, (offset, _) in layout.constants.items():
        ir.data(number)["offset"] = str(offset)
    for number, place in layout.inserted.items():
        _multiply_output(ir, number, place)
    matmuls = {layer.name: [number for number, _ in graph.weight_readers(graph.sources[layer.name].layer_id)] for layer in graph.layers}
    for layer in graph.layers:
        _replace(ir, graph, layer, schemes[layer.name], layout, tail.get(layer.name))
        if schemes[layer.name].sorted:
            _sort_inputs(ir, matmuls[layer.name], layer, _constant_name(graph, layer), layout)
        pair = adapters(layer, schemes[layer.name])
        if pair:
            _correct(ir, graph, layer, pair, layout, tail)
    _write_rt_info(ir.root, rt_info)
    ir.write(path)


def _replace(ir: IR, graph: ModelGraph, layer: Layer, scheme: Scheme, layout: Layout, tail: Slot | None) -> None:
    number = graph.sources[layer.name].layer_id
    builder = _Chain(ir, number, _constant_name(graph, layer), layer, layout, tail)
    output = builder.build(layer_chain(layer, scheme, "f32" if tail else "f16"))
    for reader, port in ir.readers(number):
        if ir.kind(reader) == "Convert":
            for target in ir.readers(reader):
                ir.connect((output.layer, output.port), target)
            ir.remove(reader)
        else:
            ir.connect((output.layer, output.port), (reader, port))
    if layer.transposed:
        for reader, _ in ir.readers(output.layer):
            _mark_transposed(ir, reader, layer)
    ir.remove(number)


def _correct(
    ir: IR, graph: ModelGraph, layer: Layer, pair: Sequence[tuple[Layer, Scheme]], layout: Layout, tail: Mapping[str, Slot]
) -> None:
    """Whatever reads the layer's MatMul reads its sum with x Aᵀ Bᵀ from now on."""
    ((matmul, _),) = graph.weight_readers(graph.sources[layer.name].layer_id)
    readers, order = ir.readers(matmul), list(ir.layers)
    first = min((reader for reader, _ in readers), key=order.index)
    port = ir.layers[matmul].find("output/port")
    assert port is not None
    y = _Output(matmul, int(port.attrib["id"]), "f32", ir.output_shape(matmul))
    x = _Output(*ir.inputs[matmul][0], "f32", _dimensions(ir.layers[matmul].findall("input/port")[0]))
    turned = ir.data(matmul).get("transpose_a", "false")
    for adapter, scheme in pair:
        kind = adapter.name.rsplit("/", 1)[1]
        name, wide = f"{_constant_name(graph, layer)}_{kind}", tail.get(adapter.name)
        weight = _Chain(ir, first, name, adapter, layout, wide).build(layer_chain(adapter, scheme, "f32" if wide else "f16"))
        attributes = {"transpose_a": turned, "transpose_b": "true"}
        shape = (*y.shape[:-1], adapter.shape[0])
        x = _add(ir, first, "MatMul", "opset1", f"{ir.name(matmul)}/{kind}", attributes, [x, weight], "f32", shape)
        turned = "false"
    total = _add(ir, first, "Add", "opset1", f"{ir.name(matmul)}/corrected", {"auto_broadcast": "numpy"}, [y, x], "f32", y.shape)
    for target in readers:
        ir.connect((total.layer, total.port), target)
    # A tensor's names go with its value: the model's output has one.
    names, output = port.attrib.pop("names", None), ir.layers[total.layer].find("output/port")
    if names is not None and output is not None:
        output.set("names", names)


def _sort_inputs(ir: IR, matmuls: Sequence[int], layer: Layer, name: str, layout: Layout) -> None:
    """The MatMuls of a layer read their input in the order of its columns from now on."""
    slot = layout.slots[layer.name, ORDER]
    for matmul in matmuls:
        x = _Output(*ir.inputs[matmul][0], "f32", _dimensions(ir.layers[matmul].findall("input/port")[0]))
        order = _add_constant(ir, matmul, f"{name}/{ORDER}", "i32", slot.part.shape, slot.offset, slot.part.nbytes)
        axis = _add_constant(ir, matmul, f"{name}/axis", "i64", (), layout.integers[LAST_AXIS], 8)
        found = _add(ir, matmul, "Gather", "opset8", f"{ir.name(matmul)}/sorted", {"batch_dims": "0"}, [x, order, axis], "f32", x.shape)
        ir.connect((found.layer, found.port), (matmul, 0))


def _dimensions(port: ET.Element) -> tuple[int, ...]:
    return tuple(int(d.text or -1) for d in port.iterfind("dim"))


def _multiply_output(ir: IR, number: int, place: tuple[int, int]) -> None:
    """Whatever reads the only output of an operation reads its product with a constant [..., channels] from now on."""
    readers, order = ir.readers(number), list(ir.layers)
    first = min((reader for reader, _ in readers), key=order.index)
    x = _Output(number, ir.inputs[first][next(port for reader, port in readers if reader == first)][1], "f32", ir.output_shape(number))
    shape = (1,) * (len(x.shape) - 1) + (x.shape[-1],)
    factors = _add_constant(ir, first, f"{ir.name(number)}/factors", "f32", shape, *place)
    product = _add(ir, first, "Multiply", "opset1", f"{ir.name(number)}/folded", {"auto_broadcast": "numpy"}, [x, factors], "f32", x.shape)
    for target in readers:
        ir.connect((product.layer, product.port), target)


def _mark_transposed(ir: IR, reader: int, layer: Layer) -> None:
    """A weight stored (in, out) is written (out, in): its MatMul reads it transposed from now on."""
    data, port = ir.layers[reader].find("data"), ir.layers[reader].findall("input/port")[1]
    assert data is not None
    data.set("transpose_b", "true")
    for dim, size in zip(port.iterfind("dim"), layer.shape, strict=True):
        dim.text = str(size)


def _constant_name(graph: ModelGraph, layer: Layer) -> str:
    number = graph.sources[layer.name].layer_id
    record = next((w for w in graph.skeleton.weights if w["id"] == graph.ir.name(number)), None)
    return str(record["constant"]) if record else graph.ir.name(number)


@dataclass(frozen=True)
class _Output:
    layer: int
    port: int
    element_type: str
    shape: tuple[int, ...]


class _Chain:
    """Builds the layers of one decompression chain in front of the layer that it replaces."""

    def __init__(self, ir: IR, before: int, name: str, layer: Layer, layout: Layout, tail: Slot | None) -> None:
        self.name, self.layer, self.layout, self.tail = name, layer, layout, tail
        self._insert, self._constant = partial(_add, ir, before), partial(_add_constant, ir, before)

    def build(self, node: Node, root: bool = True) -> _Output:
        inputs = [self.build(i, root=False) for i in node.inputs]
        if node.op == "Part":
            slot = self.layout.slots[self.layer.name, str(node.attr)]
            if node.attr == "scale" and self.tail is not None:
                slot = self.tail
            suffix = SUFFIX.get(str(node.attr), f"/{node.attr}")
            return self._constant(self.name + suffix, slot.part.element_type, slot.part.shape, slot.offset, slot.part.nbytes)
        if node.op == "Convert":
            to = str(node.attr)
            # The mark keeps the last Convert from being folded; on the one behind the codes it makes the CPU plugin decompress at load.
            return self._insert(
                "Convert", "opset1", self.name + "/convert", {"destination_type": to}, inputs, to, inputs[0].shape, decompression=root
            )
        if node.op in ("Subtract", "Multiply"):
            suffix = "/zero_point/subtract" if node.op == "Subtract" else "/fq_weights_1"
            shape = np.broadcast_shapes(inputs[0].shape, inputs[1].shape)
            return self._insert(node.op, "opset1", self.name + suffix, {"auto_broadcast": "numpy"}, inputs, inputs[0].element_type, shape)
        if node.op == "Reshape":
            target = tuple(int(d) for d in node.attr or ())
            pattern = self._constant(f"{self.name}/shape", "i64", (len(target),), self.layout.integers[target], 8 * len(target))
            attributes = {"special_zero": "false"}
            return self._insert("Reshape", "opset1", f"{self.name}/reshape", attributes, [*inputs, pattern], inputs[0].element_type, target)
        if node.op == "Gather":
            axis = self._constant(f"{self.name}/axis", "i64", (), self.layout.integers[GATHER_AXIS], 8)
            attributes = {"batch_dims": "0"}
            return self._insert(
                "Gather", "opset8", f"{self.name}/lookup", attributes, [*inputs, axis], inputs[0].element_type, inputs[1].shape
            )
        raise ValueError(f"no IR layer for {node.op!r}")


def _add_constant(ir: IR, before: int, name: str, element_type: str, shape: tuple[int, ...], offset: int, nbytes: int) -> _Output:
    data = {"element_type": element_type, "shape": ", ".join(map(str, shape)), "offset": str(offset), "size": str(nbytes)}
    return _add(ir, before, "Const", "opset1", name, data, [], element_type, shape)


def _add(
    ir: IR,
    before: int,
    kind: str,
    version: str,
    name: str,
    data: dict[str, str],
    inputs: list[_Output],
    element_type: str,
    shape: tuple[int, ...],
    decompression: bool = False,
) -> _Output:
    number = ir.new_id()
    element = ET.Element("layer", {"id": str(number), "name": name, "type": kind, "version": version})
    ET.SubElement(element, "data", data)
    if decompression:
        rt_info = ET.SubElement(element, "rt_info")
        ET.SubElement(rt_info, "attribute", {"name": "decompression", "version": "0"})
    if inputs:
        ports = ET.SubElement(element, "input")
        for i, source in enumerate(inputs):
            _port(ports, i, source.element_type, source.shape)
    # As the runtime numbers them: inputs from 0, the output after them.
    _port(ET.SubElement(element, "output"), len(inputs), element_type, shape)
    ir.add(element, before, {i: (source.layer, source.port) for i, source in enumerate(inputs)})
    return _Output(number, len(inputs), element_type, shape)


def _port(parent: ET.Element, number: int, element_type: str, shape: tuple[int, ...]) -> None:
    port = ET.SubElement(parent, "port", {"id": str(number), "precision": PRECISION.get(element_type, element_type.upper())})
    for size in shape:
        ET.SubElement(port, "dim").text = str(size)


def _write_rt_info(root: ET.Element, entries: Mapping[str, Any]) -> None:
    """Add our block and drop KV_CACHE_PRECISION=f16, which belongs to the uncompressed model: kept, it would hold the KV cache at f16."""
    info = root.find("rt_info")
    if info is None:
        info = ET.SubElement(root, "rt_info")
    options = info.find("runtime_options")
    if options is not None:
        for element in options.findall("KV_CACHE_PRECISION"):
            options.remove(element)
    _nested(ET.SubElement(info, "llmcomp"), entries)


def _nested(parent: ET.Element, entries: Mapping[str, Any]) -> None:
    for key, value in entries.items():
        element = ET.SubElement(parent, key)
        if isinstance(value, Mapping):
            _nested(element, value)
        else:
            element.set("value", str(value))
