"""From options to a plan.

Who may get the main format is NNCF's rule: every MatMul but the last, and with `--all-layers` the last and the embeddings too; an 8-bit main
format goes everywhere. Routers get the backup precision unless overridden, which NNCF leaves to its users. What NNCF gets wrong and is
otherwise here: ratio 0 means none; a ratio is met as nearly as the weights allow; a group never grows; what a group does not fit falls to
the backup precision and not to float, unless float was asked for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from llmcomp import formats
from llmcomp.errors import GroupSizeError, OptionError
from llmcomp.graph.layer import Layer
from llmcomp.options import ExportOptions, Override, Rule
from llmcomp.planning.check import check_options, is_low, resolve
from llmcomp.planning.devices import ragged
from llmcomp.planning.matching import ignored_layers, overridden_layers
from llmcomp.planning.plan import LayerPlan, Plan, summarize
from llmcomp.planning.roles import is_router
from llmcomp.planning.scheme import FLOATS, SCALE_ESTIMATION, Scheme, adaptable, adapter_bytes, layer_bytes
from llmcomp.planning.select import nearest_subset

LEAST_GROUP = 32
"""The smallest group that `adjust` takes: below it the scales cost more than they save (NNCF's min_adjusted_group_size)."""


@dataclass(frozen=True)
class _Asked:
    """A scheme for one layer, why, and whether the ratio counts the layer."""

    format: str
    group_size: int = -1
    reason: str = ""
    in_ratio: bool = False


def make_plan(layers: Sequence[Layer], options: ExportOptions, scores: Mapping[str, float] | None = None) -> Plan:
    """The plan for these layers. `scores` (layer name -> sensitivity, high keeps precision) are needed if `needs_scores(options)`.

    Raises:
        OptionError: as `check_options`, or a layer's score is missing.
        RuleError: a rule matches nothing, or everything.
        GroupSizeError: with fallback `error`, all layers that the group does not divide.
    """
    check_options(options)
    planner = _Planner(options)
    ignored, overridden = ignored_layers(options, layers), overridden_layers(options, layers)
    asked = [planner.asked(layer, overridden.get(layer.name), ignored.get(layer.name)) for layer in layers]
    given = [planner.fit(layer, one) for layer, one in zip(layers, asked, strict=True)]
    if options.group_size_fallback == "error":
        planner.refuse_misfits(layers)
    notes = planner.notes(layers, given)
    if planner.mixes:
        for i in _beyond_ratio(layers, given, planner.main, options.ratio, scores or {}):
            given[i] = replace(planner.backup(f"beyond the ratio {options.ratio:g}"), in_ratio=True)
    entries = tuple(planner.entry(layer, one) for layer, one in zip(layers, given, strict=True))
    return Plan(
        main=planner.main,
        folds="awq" if options.awq else "equalize" if options.folds == "auto" and is_low(planner.main) else "none",
        tables=options.codebook_scope,
        layers=entries,
        summary=summarize(entries, planner.main, options.ratio, planner.requested_bits(layers, asked)),
        notes=notes,
    )


class _Planner:
    """Schemes for single layers under one set of options."""

    def __init__(self, options: ExportOptions) -> None:
        self.options = options
        self.main = resolve(options.weight_format, options.sym)
        self.mixes = is_low(self.main) and options.ratio < 1
        self.misfits: dict[str, int] = {}
        """Layer name -> the asked group size that does not divide it."""

    def asked(self, layer: Layer, override: Override | None, ignored: Rule | None) -> _Asked:
        """What rules and options say, before the group is held against the layer's channel size."""
        if override is not None:
            name = resolve(override.format, self.options.sym)
            return _Asked(name, self._group(name) if override.group_size is None else override.group_size, f"override {override.text}")
        if ignored is not None:
            return _Asked("keep", reason=f"ignored by {ignored.text}")
        if is_low(self.main):
            if not self.options.all_layers and "Gather" in layer.ops:
                return self.backup("embedding" + (" tied to the last layer" if layer.last else ""))
            if not self.options.all_layers and layer.last:
                return self.backup("last layer")
            if is_router(layer):
                return self.backup("router")
        return _Asked(self.main, self._group(self.main), in_ratio=True)

    def fit(self, layer: Layer, asked: _Asked) -> _Asked:
        """The asked scheme, made to fit the layer's readers and channel size."""
        if asked.format in FLOATS:
            return asked
        if "Gather" in layer.ops and not formats.get(asked.format).for_embeddings:
            return self.backup(f"{asked.format} cannot be looked up compressed")
        width = layer.shape[-1]
        divides = asked.group_size == -1 or width % asked.group_size == 0
        why = ragged(layer, Scheme(asked.format, asked.group_size)) if divides else f"{asked.group_size} does not divide {width}"
        if not why:
            return asked
        self.misfits[layer.name] = asked.group_size
        if self.options.group_size_fallback == "ignore":
            return replace(asked, format="keep", group_size=-1, reason=why)
        group = LEAST_GROUP
        while group * 2 <= asked.group_size and width % (group * 2) == 0:
            group *= 2
        if group <= asked.group_size and width % group == 0:
            return replace(asked, group_size=group, reason=f"{asked.reason}; {why}" if asked.reason else why)
        return replace(self.backup(f"{why}, nor does a power of two from {LEAST_GROUP} on"), in_ratio=asked.in_ratio)

    def backup(self, why: str) -> _Asked:
        name = self.options.backup_precision
        return _Asked("keep" if name == "none" else name, reason=why)

    def rule(self, name: str) -> str:
        """The rule for a layer of this format: the asked one for the main format, the format's best for all others."""
        if name in FLOATS:
            return "minmax"
        if self.options.scale_estimation and self.calibrates(name):
            return SCALE_ESTIMATION
        return self.options.scale_rule if name == self.main and self.options.scale_rule != "auto" else formats.get(name).best_rule

    def adapter_rank(self, layer: Layer, name: str) -> int:
        """The rank of the correction of a layer of this format, at most that of the layer itself."""
        wanted = self.options.lora_correction and self.calibrates(name) and adaptable(layer)
        return min(self.options.lora_rank, *layer.shape) if wanted else 0

    def entry(self, layer: Layer, asked: _Asked) -> LayerPlan:
        scheme = Scheme(
            asked.format,
            asked.group_size,
            self.rule(asked.format),
            "gptq" if self.options.gptq and self.calibrates(asked.format) else "nearest",
            self.adapter_rank(layer, asked.format),
            self.options.lora_adapters,
        )
        return LayerPlan(
            name=layer.name,
            tensor=layer.tensor,
            shape=layer.shape,
            **asdict(scheme),
            bytes=layer_bytes(layer, scheme),
            in_ratio=asked.in_ratio,
            reason=asked.reason,
        )

    def calibrates(self, name: str) -> bool:
        """Whether calibration is for layers of this format: it would change nothing at 8 bits."""
        return name not in FLOATS and is_low(name)

    def refuse_misfits(self, layers: Sequence[Layer]) -> None:
        if not self.misfits:
            return
        sizes = sorted(set(self.misfits.values()))
        found = [(layer, self.misfits[layer.name]) for layer in layers if layer.name in self.misfits]
        named = ", ".join(f"{layer.name} ({layer.shape[-1]}" + (f" by {size})" if sizes[1:] else ")") for layer, size in found)
        raise GroupSizeError(
            f"group size {' or '.join(map(str, sizes))}",
            f"it does not divide {len(found)} layers, or OpenVINO's CPU misreads it: {named}",
            "Use --group-size-fallback adjust, another --group-size, or --override for these",
        )

    def notes(self, layers: Sequence[Layer], given: Sequence[_Asked]) -> tuple[str, ...]:
        """What became of misfits, in one line."""
        if not self.misfits:
            return ()
        kinds = Counter((one.format, one.group_size) for layer, one in zip(layers, given, strict=True) if layer.name in self.misfits)
        told = ", ".join(f"{count} {name}" + (f" group {group}" if group > 0 else "") for (name, group), count in sorted(kinds.items()))
        return (f"{len(self.misfits)} layers that the group does not fit: {told}",)

    def requested_bits(self, layers: Sequence[Layer], asked: Sequence[_Asked]) -> float:
        """Bits per weight if every group fitted and the ratio were met exactly."""
        ratio = self.options.ratio
        bits = total = 0.0
        for layer, one in zip(layers, asked, strict=True):
            own = _bits(layer, one)
            if self.mixes and one.in_ratio:
                own = ratio * own + (1 - ratio) * _bits(layer, self.backup(""))
            rank = self.adapter_rank(layer, one.format)
            own += (
                8
                * adapter_bytes(layer.shape, Scheme(one.format, -1, adapter_rank=rank, adapter_format=self.options.lora_adapters))
                / layer.size
            )
            bits += layer.size * own
            total += layer.size
        return round(bits / total, 4) if total else 0.0

    def _group(self, name: str) -> int:
        if name in FLOATS:
            return -1
        fmt = formats.get(name)
        if fmt.fixed_group or fmt.group_size == -1 or self.options.group_size is None:
            return fmt.group_size
        return self.options.group_size


def _bits(layer: Layer, asked: _Asked) -> float:
    """Bits per weight, whether or not the group divides the layer."""
    if asked.format in FLOATS:
        return 8 * layer_bytes(layer, Scheme(asked.format, -1)) / layer.size
    width = asked.group_size if asked.group_size > 0 else layer.shape[-1]
    # Eight channels together, so that no nibble is lost to rounding.
    return sum(part.nbytes for part in formats.get(asked.format).parts((8, width), -1)) / width


def _beyond_ratio(layers: Sequence[Layer], given: Sequence[_Asked], main: str, ratio: float, scores: Mapping[str, float]) -> list[int]:
    """Places of the layers that fit the main format and get the backup, so that the rest is the asked share of all that the ratio counts."""
    able = [i for i, one in enumerate(given) if one.in_ratio and one.format == main]
    if ratio == 0 or not able:
        return able
    missing = [layers[i].name for i in able if layers[i].name not in scores]
    if missing:
        raise OptionError(
            f"ratio {ratio:g}", f"{len(missing)} layers have no sensitivity score, {missing[0]} for one", "Compute them first"
        )
    counted = sum(layer.size for layer, one in zip(layers, given, strict=True) if one.in_ratio)
    sizes = [layers[i].size for i in able]
    # A score is of one weight's error: a layer of twice the weights suffers twice.
    costs = [scores[layers[i].name] * layers[i].size for i in able]
    chosen = set(nearest_subset(sizes, costs, ratio * counted / sum(sizes)))
    return [place for k, place in enumerate(able) if k not in chosen]
