"""A section cut at its sites: what must be computed up to each, from what has been computed before.

Layers of a site can then be compressed on inputs that the compressed layers in front of them, in the same block, give, and no operation
runs twice for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import openvino as ov
from openvino import opset13 as ops

from llmcomp.graph.mixtures import MIXTURE
from llmcomp.graph.sections import HIDDEN, WEIGHT, Section

CARRIED = "llmcomp.carried."


@dataclass(frozen=True)
class Segment:
    """What lies between two sites.

    Inputs of its model: the values named `takes`, a section's ambient values and the layers of the site in front of it, as in `Section`.
    Outputs: `gives`, in this order.
    """

    model: ov.Model | None
    """None if there is nothing to compute."""
    takes: tuple[str, ...]
    gives: tuple[str, ...]
    last_read: tuple[str, ...]
    """Values that nothing behind this segment reads."""
    sums: Mapping[str, str] = field(default_factory=dict)
    """Layer in front of it -> what it gives: the value that the layer's output is added to, with the output added. Layers whose output goes
    elsewhere are not in it."""


@dataclass(frozen=True)
class Segments:
    """`parts[k]` ends with what site k reads, the last one with the section's outgoing hidden state."""

    parts: tuple[Segment, ...]
    sites: tuple[tuple[str, ...], ...]
    """Names of the layers that read each site."""
    inputs: tuple[str, ...]
    """The value that each site is."""
    out: str | None
    """The outgoing hidden state, if there is one."""
    routing: str | None = None
    """How the tokens of the section's mixture are routed; the mixture is a site like others, of its own name alone."""


def cut(section: Section) -> Segments:
    """The segments of a section without logits."""
    return _Cutter(section).cut()


class _Cutter:
    def __init__(self, section: Section) -> None:
        self.section, self.model = section, section.model
        self.nodes = list(self.model.get_ordered_ops())
        self.place = {node.get_name(): i for i, node in enumerate(self.nodes)}
        results = [result.input_value(0) for result in self.model.get_results()]
        self.out = None if section.last else results[0]
        first = 0 if section.last else 1
        count = first + len(section.sites)
        pairs = [(source, names, source) for source, names in zip(results[first:count], section.sites, strict=True)]
        self.routing = None
        if section.mixture is not None:
            tokens, self.routing = results[count:]
            pairs.append((tokens, (section.mixture.name,), self.routing))
        # A site in front of another in the order of the graph cannot depend on it.
        pairs.sort(key=lambda pair: self.place[pair[2].get_node().get_name()])
        self.sources, self.sites = [source for source, *_ in pairs], tuple(names for _, names, _ in pairs)

    def cut(self) -> Segments:
        self.segment_of = self._segments()
        hidden = [(i, 0) for i, node in enumerate(self.nodes) if node.get_friendly_name().startswith((HIDDEN, MIXTURE))]
        if self.routing is not None:
            hidden.append(self._key(self.routing))
        wanted = {*hidden, *(self._key(v) for v in [*self.sources, *([self.out] if self.out is not None else [])])}
        self.names: dict[tuple[int, int], str] = {}
        sums = {name: self._key(value) for name, value in self._sums().items()}
        for node in self.nodes:
            for port in node.inputs():
                value = port.get_source_output()
                if self._crosses(value, node):
                    wanted.add(self._key(value))
        for key in sorted(wanted | set(sums.values())):
            self.names[key] = self._name(key)
        takes = [self._takes(k) for k in range(len(self.sites) + 1)]
        ends = [self.names[self._key(source)] for source in self.sources]
        routing = None if self.routing is None else self.names[self._key(self.routing)]
        out = None if self.out is None else self.names[self._key(self.out)]
        parts = []
        for k, taken in enumerate(takes):
            later = {name for other in takes[k + 1 :] for name in other} | set(ends[k:]) | ({out} if out else set())
            if routing and any(names[0].startswith(MIXTURE) for names in self.sites[k:]):
                later.add(routing)
            gives = [key for key in self.names if self._gives(key, k)]
            here = {name: self.names[key] for name, key in sums.items() if self.segment_of[key[0]] == k}
            model = self._model(k, gives) if gives else None
            dropped = {*taken, *(self.names[key] for key in gives), *ends[:k]} - later
            parts.append(Segment(model, tuple(taken), tuple(self.names[key] for key in gives), tuple(sorted(dropped)), here))
        return Segments(tuple(parts), self.sites, tuple(ends), out, routing)

    def _segments(self) -> list[int | None]:
        """For each operation its segment; None for what depends on neither hidden states nor weights, which each segment has for itself."""
        found: list[int | None] = []
        site_of = {name: k for k, names in enumerate(self.sites) for name in names}
        for node in self.nodes:
            name = node.get_friendly_name()
            above = [found[self.place[v.get_node().get_name()]] for v in node.input_values()]
            inside = [k for k in above if k is not None]
            if node.get_type_name() == "Parameter" and name.startswith((HIDDEN, WEIGHT, MIXTURE)):
                layer = name.removeprefix(WEIGHT)
                inside.append(site_of[layer] + 1 if layer in site_of else 0)
            found.append(max(inside) if inside else None)
        return found

    def _sums(self) -> dict[str, Any]:
        """Layer -> the sum that its output ends in."""
        found = {}
        for layer in (name for names in self.sites for name in names):
            parameter = next((n for n in self.nodes if n.get_friendly_name() == WEIGHT + layer), None)
            targets = [] if parameter is None else list(parameter.output(0).get_target_inputs())
            if len(targets) != 1 or targets[0].get_node().get_type_name() != "MatMul":
                continue
            product = targets[0].get_node()
            value, own = product.output(0), self.segment_of[self.place[product.get_name()]]
            total = None
            while True:
                readers = list(value.get_target_inputs())
                if len(readers) != 1 or readers[0].get_node().get_type_name() != "Add":
                    break
                add = readers[0].get_node()
                if self.segment_of[self.place[add.get_name()]] != own or add.output(0).get_partial_shape() != value.get_partial_shape():
                    break
                other = add.input_value(1 - readers[0].get_index())
                value = add.output(0)
                # A bias is the same in both models.
                if self.segment_of[self.place[other.get_node().get_name()]] is not None:
                    total = value
            if total is not None:
                found[layer] = total
        return found

    def _crosses(self, value: Any, reader: Any) -> bool:
        segment, here = self.segment_of[self._key(value)[0]], self.segment_of[self.place[reader.get_name()]]
        source = value.get_node()
        if segment is None or here is None or reader.get_type_name() == "Result":
            return False
        return segment < here and not (source.get_type_name() == "Parameter" and source.get_friendly_name().startswith(WEIGHT))

    def _takes(self, k: int) -> list[str]:
        found = {
            self.names[self._key(port.get_source_output())]
            for node in self.nodes
            if self.segment_of[self.place[node.get_name()]] == k
            for port in node.inputs()
            if self._crosses(port.get_source_output(), node)
            or port.get_source_output().get_node().get_friendly_name().startswith((HIDDEN, MIXTURE))
        }
        return sorted(found)

    def _gives(self, key: tuple[int, int], k: int) -> bool:
        return self.segment_of[key[0]] == k and self.nodes[key[0]].get_type_name() != "Parameter"

    def _key(self, value: Any) -> tuple[int, int]:
        return self.place[value.get_node().get_name()], value.get_index()

    def _name(self, key: tuple[int, int]) -> str:
        node = self.nodes[key[0]]
        return node.get_friendly_name() if node.get_type_name() == "Parameter" else f"{CARRIED}{key[0]}.{key[1]}"

    def _model(self, k: int, gives: list[tuple[int, int]]) -> ov.Model:
        """A copy of the section of which only this segment is left."""
        nodes = list(self.model.clone().get_ordered_ops())
        parameters: dict[str, Any] = {}
        for i, node in enumerate(self.nodes):
            if self.segment_of[i] != k:
                continue
            for port in node.inputs():
                value = port.get_source_output()
                key = self._key(value)
                if not self._crosses(value, node):
                    continue
                name = self.names[key]
                if name not in parameters:
                    source = nodes[key[0]].output(key[1])
                    parameters[name] = ops.parameter(source.get_partial_shape(), source.get_element_type(), name=name)
                    parameters[name].output(0).set_names({name})
                nodes[i].input(port.get_index()).replace_source_output(parameters[name].output(0))
        results = [ops.result(nodes[i].output(index)) for i, index in gives]
        found = {n.get_name(): n for result in results for n in _above(result) if n.get_type_name() == "Parameter"}
        return ov.Model(results, list(found.values()), f"{self.section.name} {k}")


def _above(node: Any) -> list[Any]:
    seen, stack = {node.get_name(): node}, [node]
    while stack:
        for value in stack.pop().input_values():
            other = value.get_node()
            if other.get_name() not in seen:
                seen[other.get_name()] = other
                stack.append(other)
    return list(seen.values())
