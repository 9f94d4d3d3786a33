"""The experts of a section taken out of it: what they read, how tokens are routed, and a model of one of them.

The exporter multiplies every token by every expert, and weighs the results by a routing in which all but the chosen are zero: x is tiled, goes
through stacks of matrices [experts, out, in], is multiplied by the routing and summed up. What comes out is the same if each expert sees its own
tokens alone, which is what calibration wants to know of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import openvino as ov
from numpy.typing import NDArray
from openvino import opset13 as ops

from llmcomp.graph.layer import Layer

MIXTURE, TOKENS, EXPERT, BIAS = "llmcomp.mixture.", "llmcomp.tokens", "llmcomp.expert.", "llmcomp.bias."
SHAPERS = {"Reshape", "Unsqueeze", "Squeeze", "Transpose"}


@dataclass(frozen=True)
class Mixture:
    """Stacks of experts that share their tokens.

    `expert` has the inputs `llmcomp.tokens` [1, tokens, in], one `llmcomp.expert.NAME` [1, ...] for each stack, as the graph holds it, and one
    `llmcomp.bias.N` for each of `biases`; its first output is what the expert gives [1, tokens, out], then comes what each stack reads.
    """

    name: str
    """Of the section's input that takes the sum of what the experts give [tokens, out]."""
    stacks: tuple[Layer, ...]
    """In the order of computation."""
    sites: tuple[tuple[str, ...], ...]
    """Names of the stacks that read the tokens themselves, then of those that read each inner value."""
    expert: ov.Model
    biases: tuple[NDArray[np.float32], ...]
    """[experts, ...] each."""
    experts: int


@dataclass(frozen=True)
class Found:
    """A mixture, and its places in the graph that it is taken from."""

    mixture: Mixture
    tokens: Any
    """Value [tokens, in]."""
    routing: Any
    """Value [tokens, experts]."""
    total: Any
    """Value [tokens, out], in any number of leading axes."""


def find_mixture(number: int, stacks: Sequence[Layer], placed: Callable[[Layer], Any]) -> Found | None:
    """The mixture of some stacks; `placed` gives the parameter of each. None if the graph is of another form."""
    products = {layer.name: _product(placed(layer)) for layer in stacks}
    if not stacks or any(node is None for node in products.values()):
        return None
    tiles = {tile.get_name(): tile for product in products.values() if product is not None and (tile := _tile(product)) is not None}
    if len(tiles) != 1:
        return None
    (tile,) = tiles.values()
    tokens, experts = tile.input_value(0), stacks[0].shape[0]
    entries = [product.input_value(0) for product in products.values() if product is not None and _tile(product) is not None]
    entry = entries[0]
    weighed = _weighed(entry)
    if weighed is None or any(value != entry for value in entries) or len(tokens.get_partial_shape()) != 2:
        return None
    product, side, summed = weighed
    given = _behind_shapers(product.input_value(side))
    routing = _behind_shapers(product.input_value(1 - side))
    if routing.get_node().get_type_name() != "ScatterElementsUpdate" or len(routing.get_partial_shape()) != 2:
        return None
    made = _expert_model(entry, given, products, experts)
    if made is None:
        return None
    model, biases, sites = made
    order = {name: i for i, names in enumerate(sites) for name in names}
    ordered = tuple(sorted(stacks, key=lambda layer: order[layer.name]))
    mixture = Mixture(f"{MIXTURE}{number}", ordered, sites, model, biases, experts)
    return Found(mixture, tokens, routing, summed.output(0))


def _product(parameter: Any) -> Any | None:
    targets = list(parameter.output(0).get_target_inputs())
    if len(targets) != 1 or targets[0].get_node().get_type_name() != "MatMul" or targets[0].get_index() != 1:
        return None
    return targets[0].get_node()


def _tile(product: Any) -> Any | None:
    """The Tile whose copies a product reads."""
    node = product.input_value(0).get_node()
    if node.get_type_name() == "Reshape" and node.input_value(0).get_node().get_type_name() == "Tile":
        return node.input_value(0).get_node()
    return None


def _weighed(entry: Any) -> tuple[Any, int, Any] | None:
    """The product with the routing behind an entry, on which side of it the experts are, and the sum over experts behind it."""
    seen, stack = set(), [entry]
    while stack:
        for target in stack.pop().get_target_inputs():
            node = target.get_node()
            if node.get_name() in seen:
                continue
            seen.add(node.get_name())
            behind = [t.get_node() for t in node.output(0).get_target_inputs()]
            if node.get_type_name() == "Multiply" and len(behind) == 1 and behind[0].get_type_name() == "ReduceSum":
                return node, target.get_index(), behind[0]
            stack += node.outputs()
    return None


def _behind_shapers(value: Any) -> Any:
    while value.get_node().get_type_name() in SHAPERS:
        value = value.get_node().input_value(0)
    return value


def _expert_model(
    entry: Any, given: Any, products: dict[str, Any], experts: int
) -> tuple[ov.Model, tuple[NDArray[np.float32], ...], tuple[tuple[str, ...], ...]] | None:
    """What lies between what the experts read and what they give, for one of them, in a copy."""
    part = ov.Model([ops.result(given)], [node for node in _above(given.get_node()) if node.get_type_name() == "Parameter"], "experts")
    place = {node.get_name(): i for i, node in enumerate(part.get_ordered_ops())}
    nodes = list(part.clone().get_ordered_ops())
    between = sorted(_between(entry, given), key=lambda node: place[node.get_name()])
    if any(product.get_name() not in {node.get_name() for node in between} for product in products.values()):
        return None
    tokens = _parameter(TOKENS, [1, -1, entry.get_partial_shape()[2].get_length()])
    parameters, biases = [tokens], list[NDArray[np.float32]]()
    sites: dict[tuple[int, int], list[str]] = {}
    names = {product.get_name(): name for name, product in products.items()}
    for node in between:
        for port, value in enumerate(node.input_values()):
            here = nodes[place[node.get_name()]].input(port)
            layer = names.get(node.get_name())
            if layer is not None and port == 1:
                parameters.append(_parameter(EXPERT + layer, [1, *value.get_shape()[1:]]))
                here.replace_source_output(parameters[-1].output(0))
                continue
            if layer is not None:
                sites.setdefault((place[value.get_node().get_name()], value.get_index()), []).append(layer)
            if value == entry:
                here.replace_source_output(tokens.output(0))
                continue
            constant = _constant(value)
            if constant is not None and constant.ndim == 3 and constant.shape[0] == experts > 1:
                parameters.append(_parameter(f"{BIAS}{len(biases)}", [1, *constant.shape[1:]]))
                biases.append(np.asarray(constant, np.float32))
                here.replace_source_output(parameters[-1].output(0))
    start = (place[entry.get_node().get_name()], entry.get_index())
    values = [tokens.output(0) if key == start else nodes[key[0]].output(key[1]) for key in sites]
    out = nodes[place[given.get_node().get_name()]].output(given.get_index())
    results = [ops.result(value) for value in (out, *values)]
    return ov.Model(results, parameters, "expert"), tuple(biases), tuple(tuple(readers) for readers in sites.values())


def _parameter(name: str, shape: list[int]) -> Any:
    parameter = ops.parameter(shape, ov.Type.f32, name=name)
    parameter.output(0).set_names({name})
    return parameter


def _between(entry: Any, given: Any) -> list[Any]:
    """Operations that the given value depends on and that depend on the entry, in the order of computation."""
    found: dict[str, Any] = {}

    def visit(node: Any) -> bool:
        """Whether it depends on the entry."""
        if node.get_name() in found:
            return True
        depends = False
        for value in node.input_values():
            if value == entry:
                depends = True
            elif value.get_node().get_type_name() not in ("Constant", "Parameter"):
                depends |= visit(value.get_node())
        if depends:
            found[node.get_name()] = node
        return depends

    visit(given.get_node())
    return list(found.values())


def _above(node: Any) -> list[Any]:
    seen, stack = {node.get_name(): node}, [node]
    while stack:
        for value in stack.pop().input_values():
            other = value.get_node()
            if other.get_name() not in seen:
                seen[other.get_name()] = other
                stack.append(other)
    return list(seen.values())


def _constant(value: Any) -> NDArray[Any] | None:
    node = value.get_node()
    if node.get_type_name() == "Convert":
        node = node.input_value(0).get_node()
    return node.data if node.get_type_name() == "Constant" else None
