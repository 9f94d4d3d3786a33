"""Cutting an IR at its decoder blocks, by dependence.

*Hidden* values depend on the stream of hidden states, *ambient* ones (masks, rotary tables, positions) do not. A *cut* is a hidden value that
every path from the embedding to the logits passes. A block lies between the last cut before its first weight and the first cut after its last.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import openvino as ov
from openvino import opset13 as ops


@dataclass(frozen=True)
class Cut:
    """A model between two cuts, ready to compile. `hidden` is the name of the Parameter that stands for the incoming hidden state, if any."""

    model: ov.Model
    hidden: str | None


class Cutter:
    """Cuts one freshly read model; each cut changes the model, so read it anew for the next."""

    def __init__(self, model: ov.Model) -> None:
        self.model = model
        self.order = {node.get_name(): i for i, node in enumerate(model.get_ordered_ops())}
        self.by_name: dict[str, Any] = {}
        for node in model.get_ordered_ops():
            self.by_name.setdefault(node.get_friendly_name(), node)
        self.cuts = self._find_cuts()

    def _find_cuts(self) -> list[Any]:
        embedding = self._embedding()
        if embedding is None:
            return []
        logits = self.model.get_results()[0]
        below = _descendants(embedding)
        hidden = [n for n in _ancestors(logits) if n.get_name() in below]
        hidden.sort(key=lambda n: self.order[n.get_name()])
        names = {n.get_name(): i for i, n in enumerate(hidden)}
        cuts, furthest = [], 0
        for i, node in enumerate(hidden):
            if furthest <= i and node.get_output_size() == 1:
                cuts.append(node)
            reach = [
                names[t.get_node().get_name()] for o in node.outputs() for t in o.get_target_inputs() if t.get_node().get_name() in names
            ]
            furthest = max([furthest, *reach])
        return [c for c in cuts if c.get_type_name() not in ("Result", "Convert")]

    def _embedding(self) -> Any | None:
        """The Gather that looks tokens up: the first that reads input_ids, or nothing for a model that is fed embeddings."""
        source = next((p for p in self.model.get_parameters() if "input_ids" in p.output(0).get_names()), None)
        if source is None:
            return None
        frontier = [source]
        while frontier:
            node = frontier.pop(0)
            for target in _targets(node):
                if target.get_type_name() == "Gather":
                    return target
                if target.get_type_name() in ("Convert", "Reshape", "Unsqueeze"):
                    frontier.append(target)
        return None

    def bounds(self, weights: Iterable[str]) -> tuple[Any, Any] | None:
        """(incoming cut, outgoing cut) around the operations of these friendly names; None if there are none."""
        positions = [self.order[self.by_name[w].get_name()] for w in weights if w in self.by_name]
        if not positions:
            return None
        before = [c for c in self.cuts if self.order[c.get_name()] < min(positions)]
        after = [c for c in self.cuts if self.order[c.get_name()] > max(positions)]
        return (before[-1], after[0]) if before and after else None

    def cut(self, start: Any | None, end: Any | None) -> Cut:
        """The model from `start` (None: the inputs) to `end` (None: the logits)."""
        hidden = None
        if start is not None:
            parameter = ops.parameter(start.output(0).get_partial_shape(), start.output(0).get_element_type(), name="llmcomp.hidden")
            hidden = "llmcomp.hidden"
            parameter.output(0).set_names({hidden})
            for target in start.output(0).get_target_inputs():
                # What only asks for the shape stays ambient and keeps its own source.
                if target.get_node().get_type_name() != "ShapeOf":
                    target.replace_source_output(parameter.output(0))
        result = ops.result(end.output(0)) if end is not None else self.model.get_results()[0]
        inside = {n.get_name(): n for n in _ancestors(result)}
        sinks = [s for s in self.model.get_sinks() if s.input_value(0).get_node().get_name() in inside]
        written = {s.get_attributes()["variable_id"] for s in sinks}
        for node in inside.values():
            # A state of another block that is only asked for its length: the plugin refuses one that is never written.
            if node.get_type_name() == "ReadValue" and node.get_attributes()["variable_id"] not in written and node.get_input_size():
                for target in node.output(0).get_target_inputs():
                    target.replace_source_output(node.input_value(0))
        reached = [n for r in (result, *sinks) for n in _ancestors(r)]
        parameters = list({n.get_name(): n for n in reached if n.get_type_name() == "Parameter"}.values())
        return Cut(ov.Model([result], sinks, parameters, "cut"), hidden)


def _targets(node: Any) -> list[Any]:
    return [t.get_node() for o in node.outputs() for t in o.get_target_inputs()]


def _descendants(node: Any) -> set[str]:
    """Names of everything whose values depend on `node`; asking for a shape is not depending."""
    seen, stack = {node.get_name()}, [node]
    while stack:
        for target in _targets(stack.pop()):
            if target.get_name() not in seen and target.get_type_name() != "ShapeOf":
                seen.add(target.get_name())
                stack.append(target)
    return seen


def _ancestors(node: Any) -> list[Any]:
    seen, stack = {node.get_name(): node}, [node]
    while stack:
        for value in stack.pop().input_values():
            source = value.get_node()
            if source.get_name() not in seen:
                seen[source.get_name()] = source
                stack.append(source)
    return list(seen.values())
