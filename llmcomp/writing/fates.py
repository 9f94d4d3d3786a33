"""What became of every source tensor, what the formats were asked to take and what they take, and where an export has fallen back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from llmcomp.graph.layer import Layer
from llmcomp.graph.model import ModelGraph
from llmcomp.planning import FLOATS, NOT_CALIBRATED, Plan, adapter_bytes, nominal_bits, scheme_of, scheme_text

Fate = Literal["compressed", "merged", "kept float", "unused"]
FATES: Mapping[Fate, str] = {
    "compressed": "it is a layer, in a number format",
    "merged": "together with other tensors it makes up a layer",
    "kept float": "a norm, a bias, a table or a layer that stays float; factors of folds may be in it",
    "unused": "the architecture does not ask for it",
}


def tensor_fates(graphs: Sequence[ModelGraph], plan: Plan) -> list[dict[str, Any]]:
    """One line on each tensor of the source, in its order: the fate, and the layers that it is in with their formats. `plan` is for all graphs."""
    users: dict[str, list[str]] = {}
    sources = {layer.name: graph.sources[layer.name].tensors for graph in graphs for layer in graph.layers}
    for layer, tensors in sources.items():
        for read in tensors:
            users.setdefault(read, []).append(layer)
    real, schemes, lines = {name for graph in graphs for name in graph.skeleton.real}, plan.schemes, []
    for name, tensor in graphs[0].checkpoint.tensors.items():
        layers = users.get(name, [])
        fate: Fate = "kept float" if name in real else "unused"
        if layers:
            merged = any(len(sources[layer]) > 1 for layer in layers)
            fate = "merged" if merged else "kept float" if all(schemes[layer].is_float for layer in layers) else "compressed"
        got = {layer: scheme_text(schemes[layer].format, schemes[layer].group_size) for layer in layers}
        lines.append({"tensor": name, "shape": list(tensor.shape), "type": tensor.dtype, "fate": fate, "layers": got})
    return lines


def requests(layers: Sequence[Layer], plan: Plan) -> list[dict[str, Any]]:
    """For each scheme that was asked for its layers, the bits per weight that it should take, and those that they take: bytes of codes, scales,
    zero points, tables and corrections, over the number of weights."""
    asked = {one.layer: one.asked for one in plan.fallbacks}
    rows: dict[str, dict[str, Any]] = {}
    by_name = {layer.name: layer for layer in layers}
    for entry in plan.layers:
        layer, got = by_name[entry.name], scheme_text(entry.format, entry.group_size)
        scheme = asked.get(entry.name, got)
        row = rows.setdefault(scheme, {"scheme": scheme, "layers": 0, "weights": 0, "bytes": 0, "bits_requested": 0.0, "got": Counter()})
        row["layers"] += 1
        row["weights"] += layer.size
        row["bytes"] += entry.bytes
        row["bits_requested"] += layer.size * nominal_bits(layer, *scheme_of(scheme)) + 8 * adapter_bytes(entry.shape, entry.scheme)
        row["got"][got] += layer.size
    for row in rows.values():
        row["bits_requested"] = round(row["bits_requested"] / row["weights"], 4)
        row["bits_achieved"] = round(8 * row["bytes"] / row["weights"], 4)
        row["got"] = dict(row["got"])
    return list(rows.values())


def fallbacks(plan: Plan, calibrated: Mapping[str, Mapping[str, Any]], wide: Iterable[str]) -> list[dict[str, Any]]:
    """Each case in which a layer is not what was asked for, with the reason. `wide` are the layers whose scales had to be stored in f32."""

    def line(kind: str, layer: str, asked: str, got: str, reason: str) -> dict[str, Any]:
        return {"kind": kind, "layer": layer, "asked": asked, "got": got, "reason": reason}

    found = [line("format" if one.is_shortfall else "group", one.layer, one.asked, one.got, one.reason) for one in plan.fallbacks]
    for entry in plan.layers:
        if entry.reason.endswith(NOT_CALIBRATED) and entry.format not in FLOATS:
            found.append(line("calibration", entry.name, "calibrated", f"plain {entry.rule}", "what it reads is not seen block by block"))
    for name, told in calibrated.items():
        experts = told.get("experts_kept", {})
        plain = experts.get("plain", 0) if experts else int(told.get("kept") == "plain")
        if plain:
            whom = f"{plain} of {sum(experts.values())} experts plain" if experts else "plain rounding"
            found.append(line("rounding", name, "calibrated", whom, "it loses no more on the calibration data"))
        if told.get("few_tokens"):
            numbers = ", ".join(map(str, told["few_tokens"]))
            found.append(line("experts", name, "their own tokens", "tokens of all kinds", f"few tokens are routed to experts {numbers}"))
    found += [line("scales", name, "f16", "f32", "f16 cannot hold the scales of some of its groups") for name in wide]
    return found
