"""The skeleton taken apart into decoder blocks that run one at a time.

Every weight of a section, its incoming hidden state and its *ambient* values (masks, rotary tables, the empty cache) are inputs of its
model, so a block runs with whatever weights it is given, and nothing of the rest is computed. All sections come out of one reading of the IR,
the ambient values out of a second one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import openvino as ov
from numpy.typing import NDArray
from openvino import opset13 as ops

from llmcomp.graph.blocks import Cutter
from llmcomp.graph.layer import Layer
from llmcomp.graph.mixtures import MIXTURE, Found, Mixture, find_mixture
from llmcomp.graph.model import ModelGraph, flat_rows

HIDDEN, AMBIENT, WEIGHT, STACK = "llmcomp.hidden", "llmcomp.ambient.", "llmcomp.layer.", "llmcomp.stack."
EMBEDDING, HEAD = "embedding", "head"
"""Names of the sections before and behind the blocks."""
BY_ELEMENT = {"Result", "Convert", "Multiply", "Divide", "Add", "Subtract", "Tanh"}
"""What may follow on the last MatMul while its rows are taken in parts: logits scaled, or capped."""


class UndividedError(Exception):
    """The blocks of this model cannot be told apart; the reason is for the report."""


@dataclass(frozen=True)
class Section:
    """A part of the model, ready to compile.

    Its inputs are `llmcomp.hidden` (but for the first), `llmcomp.ambient.N` and one f32 `llmcomp.layer.NAME` for each layer, in the
    orientation in which the graph holds it (`Layer.transposed`). Its outputs are the outgoing hidden state, or from the last the logits if
    they are wanted, and then the sites.
    """

    name: str
    layers: tuple[Layer, ...]
    model: ov.Model
    ambient: tuple[str, ...]
    """Names of the ambient inputs."""
    sites: tuple[tuple[str, ...], ...]
    """For each site the names of the layers that read it."""
    last: bool
    """It ends with the model: no hidden state comes out."""
    head: Layer | None = None
    """The layer whose products, the logits, are its first output, where they were asked for."""
    mixture: Mixture | None = None
    """Its experts, where they were wanted apart: what they give is the input of that name, and the last two outputs are what they read and how it is
    routed."""
    any_rows: bool = False
    """Any rows of `head` may be given, for logits of these tokens alone; never where all of the model would run for each part."""


@dataclass(frozen=True)
class Sections:
    """`ambient` gives the ambient values of all sections, by name; its inputs are the model's own, its weights and hidden states may be
    zeros: they count by their shapes only."""

    parts: tuple[Section, ...]
    ambient: ov.Model
    ambient_names: tuple[str, ...]
    embedding: Layer | None
    """Layer whose rows the token ids look up, as input of the first section with rows of any number."""
    undivided: str | None = None
    """Why all of the model is one section, None if each block is one."""
    stacks: Mapping[str, Callable[[], NDArray[np.float32]]] = field(default_factory=dict)
    """Input `llmcomp.stack.NAME` of a section -> the float values of a stack of experts, as the graph holds it."""

    def with_stacks(self, model: ov.Model) -> ov.Model:
        """The model of a section, or of a part of one, with stacks of experts in it: the CPU plugin multiplies by chosen experts with constants
        only."""
        if not any(port.get_any_name().startswith(STACK) for port in model.inputs):
            return model
        filled = model.clone()
        for parameter in filled.get_parameters():
            name = parameter.get_friendly_name()
            if name.startswith(STACK):
                values = self.stacks[name]()
                for target in parameter.output(0).get_target_inputs():
                    target.replace_source_output(ops.constant(values, shared_memory=True).output(0))
                filled.remove_parameter(parameter)
        return filled


def divide(graph: ModelGraph, sites_wanted: Callable[[Layer], bool], logits: bool = False, experts: bool = False) -> Sections:
    """The sections of a graph: what lies before the first block, each block, and what lies behind the last.

    Sites are given out for the layers that `sites_wanted` names. What follows the last block is left out if it holds no such layer, unless
    `logits` are wanted; then a table tied to the last layer is in the first section and in the last. Where blocks cannot be told apart
    everything behind the embedding is one section. With `experts` those of a block are taken out of it where they have the form of a `Mixture`.

    Raises:
        UndividedError: not even that can be cut out, or a state does not start empty.
    """
    return Divider(graph, sites_wanted, logits, experts).divide()


def take_orders(sections: Sections, graph: ModelGraph) -> None:
    """Put the vectors that `graph` has in another order than its skeleton into the models of `sections`: weights are inputs there, these are not."""
    changed = {graph.ir.name(number): number for number in graph.vector_orders}
    for section in sections.parts:
        for node in section.model.get_ordered_ops():
            if node.get_type_name() == "Constant" and node.get_friendly_name() in changed:
                values = np.frombuffer(graph.constant_bytes(changed[node.get_friendly_name()]), "<f4")
                node.output(0).replace(ops.constant(values.reshape(node.get_output_shape(0))).output(0))


class Divider:
    def __init__(self, graph: ModelGraph, sites_wanted: Callable[[Layer], bool], logits: bool = False, experts: bool = False) -> None:
        self.graph, self.sites_wanted, self.logits, self.experts = graph, sites_wanted, logits, experts
        self.model = ov.Core().read_model(graph.skeleton.xml)
        self.order = {node.get_name(): i for i, node in enumerate(self.model.get_ordered_ops())}
        self.readers = {layer.name: self._readers(layer) for layer in graph.layers}
        self.ambient: dict[tuple[int, int], str] = {}
        """(place of an operation in the model's order, output) -> name of the ambient value."""
        self.placed: dict[tuple[str, str], Any] = {}
        """(name of a section, of a layer) -> the f32 Parameter that stands for it there."""
        self.stacks: dict[str, Any] = {}
        """Name of a stack of experts -> the Parameter that stands for it."""

    def divide(self) -> Sections:
        _forget_state(self.model)
        self.cutter = Cutter(self.model)
        tables = [x for x in self.graph.layers if x.block is None and "Gather" in x.ops]
        reason = None
        try:
            groups, cuts = self._by_block(tables)
        except UndividedError as error:
            reason = str(error)
            groups, cuts = self._whole(tables)
        for layer in self.graph.layers:
            if len(layer.shape) > 2:
                self._place_stack(layer)
        groups = [(EMBEDDING, tables), *((name, [x for x in layers if len(x.shape) == 2]) for name, layers in groups)]
        embedding = self._embedding(tables)
        for name, layers in groups:
            for layer in layers:
                self._place(name, layer, layer is embedding and name == EMBEDDING)
        first_cut = self.order[cuts[0].get_name()]
        starts, ends = [None, *(_part(cut) for cut in cuts)], [*cuts, None]
        parts = tuple(self._section(name, layers, starts[i], ends[i] if i < len(cuts) else None) for i, (name, layers) in enumerate(groups))
        stacks = {STACK + x.name: partial(_stack, self.graph, x) for x in self.graph.layers if len(x.shape) > 2}
        return Sections(parts, self._ambient_model(first_cut), tuple(self.ambient.values()), embedding, reason, stacks)

    def _by_block(self, tables: Sequence[Layer]) -> tuple[list[tuple[str, list[Layer]]], list[Any]]:
        """Each block, what follows them if calibration wants it, and the hidden values in between, the first before the first block."""
        blocks = sorted({layer.block for layer in self.graph.layers if layer.block is not None})
        if not blocks:
            raise UndividedError("no layer's name tells its block")
        groups = [(f"block {b}", [x for x in self.graph.layers if x.block == b]) for b in blocks]
        cuts = self._cuts([layers for _, layers in groups])
        after = [x for x in self.graph.layers if x.block is None and x not in tables]
        if self.logits or any(self.sites_wanted(x) for x in after):
            groups.append((HEAD, [*after, *self._tied(tables)]))
        return groups, cuts

    def _whole(self, tables: Sequence[Layer]) -> tuple[list[tuple[str, list[Layer]]], list[Any]]:
        """Everything behind the embedding as one section."""
        rest = [x for x in self.graph.layers if x not in tables]
        positions = [self._place_of(t.get_node()) for x in rest for t in self.readers[x.name][1:]]
        before = [c for c in self.cutter.cuts if self._place_of(c) < min(positions, default=-1)]
        if not before:
            raise UndividedError("no single hidden value lies between the embedding and the first layer")
        return [("the whole model", [*rest, *self._tied(tables)])], [before[-1]]

    def _tied(self, tables: Sequence[Layer]) -> list[Layer]:
        """The tables that are the last layer, too, if logits are wanted."""
        return [x for x in tables if self.logits and x.last]

    def _ambient_model(self, first_cut: int) -> ov.Model:
        """Gives the ambient values. What they ask hidden states for their shape is computed, from the first cut on."""
        model = ov.Core().read_model(self.graph.skeleton.xml)
        nodes = model.get_ordered_ops()
        _forget_state(model)
        _part(nodes[first_cut])
        results = [ops.result(nodes[place].output(index)) for place, index in self.ambient]
        return ov.Model(results, _parameters_of(results), "ambient")

    def _readers(self, layer: Layer) -> list[Any]:
        """Operations that read a layer in this reading of the model."""
        source = self.graph.ir.name(self.graph.sources[layer.name].layer_id)
        nodes = [n for n in self.model.get_ordered_ops() if n.get_friendly_name() == source and not n.get_input_size()]
        if len(nodes) != 1:
            raise UndividedError(f"{len(nodes)} constants are called {source}")
        return [nodes[0], *_behind_converts(nodes[0])]

    def _cuts(self, groups: Sequence[Sequence[Layer]]) -> list[Any]:
        """The hidden values before the first block, between blocks and after the last."""
        cuts: list[Any] = []
        for layers in groups:
            positions = [self._place_of(t.get_node()) for x in layers for t in self.readers[x.name][1:]]
            before = [c for c in self.cutter.cuts if self._place_of(c) < min(positions)]
            after = [c for c in self.cutter.cuts if self._place_of(c) > max(positions)]
            if not before or not after or (cuts and self._place_of(cuts[-1]) > self._place_of(before[-1])):
                raise UndividedError(f"the hidden state is not one value around {layers[0].name}")
            cuts += [after[0]] if cuts else [before[-1], after[0]]
        return cuts

    def _place_of(self, node: Any) -> int:
        """Topological, as the cuts are sorted."""
        return self.cutter.order[node.get_name()]

    def _embedding(self, layers: Sequence[Layer]) -> Layer | None:
        """The table that tokens are looked up in: rows of others may be needed by number."""
        for layer in layers:
            for target in self.readers[layer.name][1:]:
                node = target.get_node()
                if node.get_type_name() == "Gather" and _comes_from(node.input_value(1), "input_ids"):
                    return layer
        return None

    def _place(self, section: str, layer: Layer, any_rows: bool) -> None:
        source, *targets = self.readers[layer.name]
        shape = source.get_output_partial_shape(0)
        if len(layer.ops) > 1:
            # A table tied to the last layer is two weights here; that of the MatMul keeps its placeholder if no logits are wanted.
            kind = "Gather" if section == EMBEDDING else "MatMul"
            targets = [t for t in targets if t.get_node().get_type_name() == kind]
        if any_rows:
            shape[0] = ov.Dimension()
        elif self._is_head(section, layer) and section == HEAD and _stands_alone(targets):
            shape[1 if layer.transposed else 0] = ov.Dimension()
        parameter = ops.parameter(shape, ov.Type.f32, name=WEIGHT + layer.name)
        parameter.output(0).set_names({WEIGHT + layer.name})
        for target in targets:
            target.replace_source_output(parameter.output(0))
        self.placed[section, layer.name] = parameter

    def _place_stack(self, layer: Layer) -> None:
        source, *targets = self.readers[layer.name]
        parameter = ops.parameter(source.get_output_partial_shape(0), ov.Type.f32, name=STACK + layer.name)
        parameter.output(0).set_names({STACK + layer.name})
        for target in targets:
            target.replace_source_output(parameter.output(0))
        self.stacks[layer.name] = parameter

    def _is_head(self, section: str, layer: Layer) -> bool:
        return self.logits and layer.last and section != EMBEDDING

    def _section(self, name: str, layers: list[Layer], start: Any | None, end: Any | None) -> Section:
        sites: dict[tuple[str, int], tuple[Any, list[str]]] = {}
        for layer in layers:
            for target in self.placed[name, layer.name].output(0).get_target_inputs():
                node = target.get_node()
                if node.get_type_name() == "MatMul" and self.sites_wanted(layer):
                    source = node.input_value(0)
                    sites.setdefault((source.get_node().get_name(), source.get_index()), (source, []))[1].append(layer.name)
        found = self._mixture(layers) if end is not None else None
        ends_with = end.output(0) if end is not None else self.model.get_results()[0].input_value(0) if self.logits else None
        outputs = [*([ends_with] if ends_with is not None else []), *(source for source, _ in sites.values())]
        seeds = [start] if start is not None else [self.placed[name, x.name] for x in layers]
        if found is not None:
            outputs += [found.tokens, found.routing]
            given = ops.parameter(found.total.get_partial_shape(), ov.Type.f32, name=found.mixture.name)
            given.output(0).set_names({found.mixture.name})
            for target in found.total.get_target_inputs():
                target.replace_source_output(given.output(0))
            seeds.append(given)
        inside = self._inside(seeds, [o.get_node() for o in outputs])
        ambient = self._cut_ambient(inside) if start is not None else ()
        results = [ops.result(o) for o in outputs]
        head = next((x for x in layers if end is None and self._is_head(name, x)), None)
        return Section(
            name,
            tuple(layers),
            ov.Model(results, _parameters_of(results), name),
            ambient,
            tuple(tuple(readers) for _, readers in sites.values()),
            end is None,
            head,
            found.mixture if found is not None else None,
            head is not None and self.placed[name, head.name].get_partial_shape().is_dynamic,
        )

    def _mixture(self, layers: Sequence[Layer]) -> Found | None:
        """The experts of the block that these layers are in."""
        blocks = {x.block for x in layers}
        stacks = [x for x in self.graph.layers if len(x.shape) > 2 and x.block in blocks]
        if not self.experts or not stacks or len(blocks) != 1:
            return None
        return find_mixture(blocks.pop() or 0, stacks, lambda x: self.stacks[x.name])

    def _inside(self, seeds: Iterable[Any], ends: Iterable[Any]) -> dict[str, Any]:
        """Operations that depend on the seeds' values and that the ends depend on."""
        below = {n.get_name() for seed in seeds for n in _walk(seed, _computing_targets)}
        above = {n.get_name(): n for end in ends for n in _walk(end, _sources)}
        return {name: node for name, node in above.items() if name in below}

    def _cut_ambient(self, inside: dict[str, Any]) -> tuple[str, ...]:
        """Replace every value that a section takes from elsewhere by a Parameter; returns their names."""
        parameters: dict[str, Any] = {}
        seen: set[str] = set()

        def local(value: Any) -> bool:
            """Whether a value outside is made of the section's own shapes and of constants, in part at least."""
            return any(self._is_local_leaf(n, inside) for n in _walk(value.get_node(), lambda n: _sources(n, inside)))

        def visit(node: Any) -> None:
            if node.get_name() in seen:
                return
            seen.add(node.get_name())
            for port in node.inputs():
                value = port.get_source_output()
                source = value.get_node()
                kind = source.get_type_name()
                if (
                    source.get_name() in inside
                    or kind == "Constant"
                    or source.get_friendly_name().startswith((HIDDEN, WEIGHT, AMBIENT, STACK, MIXTURE))
                ):
                    continue
                if all(n.get_type_name() == "Constant" for n in _walk(source, _sources) if not n.get_input_size()):
                    continue
                if kind != "Parameter" and local(value):
                    visit(source)
                    continue
                parameter = self._ambient_parameter(value, parameters)
                port.replace_source_output(parameter.output(0))

        for node in inside.values():
            visit(node)
        return tuple(parameters)

    def _is_local_leaf(self, node: Any, inside: dict[str, Any]) -> bool:
        if node.get_type_name() != "ShapeOf":
            return False
        source = node.input_value(0).get_node()
        return source.get_name() in inside or source.get_friendly_name().startswith(HIDDEN)

    def _ambient_parameter(self, value: Any, parameters: dict[str, Any]) -> Any:
        key = (self.order[value.get_node().get_name()], value.get_index())
        name = self.ambient.setdefault(key, f"{AMBIENT}{len(self.ambient)}")
        if name not in parameters:
            parameters[name] = ops.parameter(value.get_partial_shape(), value.get_element_type(), name=name)
            parameters[name].output(0).set_names({name})
        return parameters[name]


def _stack(graph: ModelGraph, layer: Layer) -> NDArray[np.float32]:
    rows = np.asarray(graph.rows(layer, 0, flat_rows(layer)), np.float32).reshape(layer.shape)
    return np.ascontiguousarray(rows.swapaxes(-1, -2)) if layer.transposed else np.ascontiguousarray(rows)


def _part(cut: Any) -> Any:
    """Whatever computes with the value of a cut reads a Parameter from now on; what only asks for its shape keeps asking."""
    parameter = ops.parameter(cut.output(0).get_partial_shape(), cut.output(0).get_element_type(), name=HIDDEN)
    parameter.output(0).set_names({HIDDEN})
    for target in cut.output(0).get_target_inputs():
        if target.get_node().get_type_name() not in ("ShapeOf", "Result"):
            target.replace_source_output(parameter.output(0))
    return parameter


def _forget_state(model: ov.Model) -> None:
    """Whatever reads a state reads its initial value."""
    for node in model.get_ordered_ops():
        if node.get_type_name() == "ReadValue":
            if not node.get_input_size():
                raise UndividedError(f"the state {node.get_friendly_name()} has no initial value in the graph")
            for target in node.output(0).get_target_inputs():
                target.replace_source_output(node.input_value(0))


def _behind_converts(node: Any) -> list[Any]:
    """Input ports that read a constant, through a Convert or directly."""
    found: list[Any] = []
    for target in node.output(0).get_target_inputs():
        reader = target.get_node()
        found += list(reader.output(0).get_target_inputs()) if reader.get_type_name() == "Convert" else [target]
    return found


def _comes_from(value: Any, name: str) -> bool:
    while value.get_node().get_type_name() in ("Convert", "Reshape", "Unsqueeze"):
        value = value.get_node().input_value(0)
    return name in value.get_names()


def _sources(node: Any, stop: dict[str, Any] | None = None) -> list[Any]:
    if stop is not None and (node.get_name() in stop or node.get_type_name() == "ShapeOf"):
        return []
    return [value.get_node() for value in node.input_values()]


def _computing_targets(node: Any) -> list[Any]:
    return [t.get_node() for o in node.outputs() for t in o.get_target_inputs() if t.get_node().get_type_name() != "ShapeOf"]


def _stands_alone(targets: Sequence[Any]) -> bool:
    """Whether nothing behind these MatMuls needs to know how many products there are: each is only changed by itself."""
    behind = {n.get_name(): n for t in targets for n in _walk(t.get_node(), _computing_targets)}
    matrices = {t.get_node().get_name() for t in targets}
    for name, node in behind.items():
        if name not in matrices and node.get_type_name() not in BY_ELEMENT:
            return False
        others = [v for v in node.input_values() if name not in matrices and v.get_node().get_name() not in behind]
        if any(v.get_partial_shape().is_dynamic or max(v.get_shape(), default=1) > 1 for v in others):
            return False
    return True


def _walk(node: Any, neighbours: Callable[[Any], list[Any]]) -> list[Any]:
    seen, stack = {node.get_name(): node}, [node]
    while stack:
        for other in neighbours(stack.pop()):
            if other.get_name() not in seen:
                seen[other.get_name()] = other
                stack.append(other)
    return list(seen.values())


def _parameters_of(results: Sequence[Any]) -> list[Any]:
    found = {n.get_name(): n for r in results for n in _walk(r, _sources) if n.get_type_name() == "Parameter"}
    return list(found.values())
