"""From options to a plan.

Who may get the main format is NNCF's rule: every MatMul but the last, and with `--all-layers` the last and the embeddings too; an 8-bit main
format goes everywhere. Routers and layers that see get the backup precision unless overridden, which NNCF leaves to its users. What NNCF gets wrong and is
otherwise here: ratio 0 means none; a ratio is met as nearly as the weights allow; a group never grows; what a group does not fit falls to
the backup precision and not to float, unless float was asked for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Literal

from llmcomp import formats
from llmcomp.errors import GroupSizeError, OptionError
from llmcomp.graph.layer import Layer
from llmcomp.graph.stored import Form, Stored
from llmcomp.options import ExportOptions, Override, Rule
from llmcomp.planning.check import DATA_FREE, PREDICTED, check_options, group_of, is_low, known_rules, resolve
from llmcomp.planning.devices import ragged
from llmcomp.planning.matching import ignored_layers, overridden_layers
from llmcomp.planning.measured import Measured
from llmcomp.planning.plan import NOTHING, LayerPlan, Plan, summarize
from llmcomp.planning.roles import is_router
from llmcomp.planning.scheme import (
    FLOATS,
    KEEP,
    NOT_SORTABLE,
    SCALE_ESTIMATION,
    STORED,
    Scheme,
    adaptable,
    adapter_bytes,
    layer_bytes,
    nominal_bits,
    sortable,
)
from llmcomp.planning.select import nearest_subset
from llmcomp.planning.share import Fallback, Share, scheme_text, share_of

LEAST_GROUP = 32
"""The smallest group that `adjust` takes: below it the scales cost more than they save (NNCF's min_adjusted_group_size)."""


@dataclass(frozen=True)
class Asked:
    """A scheme for one layer, why, and whether the ratio counts the layer."""

    format: str
    group_size: int = -1
    reason: str = ""
    in_ratio: bool = False
    form: Form | None = None
    """Of the codes of the source, which it keeps then."""


def make_plan(
    layers: Sequence[Layer],
    options: ExportOptions,
    scores: Mapping[str, float] | None = None,
    measured: Measured | None = None,
    stored: Mapping[str, Stored] = NOTHING,
) -> Plan:
    """The plan for these layers. If `needs_scores(options)` it takes `scores` (layer name -> sensitivity, high keeps precision), or losses from
    `measured` if these are to rank. `stored` are the layers that are stored quantized, by name, of which weight format keep keeps the codes.

    Raises:
        OptionError: as `check_options`, or a layer's score or loss is missing.
        RuleError: a rule matches nothing, or everything.
        GroupSizeError: with fallback `error`, all layers that the group does not divide.
    """
    check_options(options)
    planner = Planner(options, stored=stored)
    ignored, overridden = ignored_layers(options, layers), overridden_layers(options, layers)
    asked = [planner.asked(layer, overridden.get(layer.name), ignored.get(layer.name)) for layer in layers]
    given = [planner.fit(layer, one) for layer, one in zip(layers, asked, strict=True)]
    fallbacks = {layer.name: _fallback(layer, *pair) for layer, *pair in zip(layers, asked, given, strict=True) if _differ(*pair)}
    if options.group_size_fallback == "error":
        planner.refuse_misfits(layers)
    notes = planner.notes(layers, given)
    if planner.mixes:
        by_loss = measured if options.sensitivity_metric == PREDICTED else None
        for i in _beyond_ratio(layers, given, planner, scores or {}, by_loss):
            given[i] = replace(planner.backup(f"beyond the ratio {options.ratio:g}"), in_ratio=True)
            fallbacks.pop(layers[i].name, None)
    entries = tuple(planner.entry(layer, one) for layer, one in zip(layers, given, strict=True))
    return Plan(
        main=planner.main,
        folds=planner.folds(is_low(planner.main)),
        permutation=planner.permutation(is_low(planner.main)),
        target_correction=options.target_correction,
        tables=options.codebook_scope,
        layers=entries,
        summary=summarize(entries, planner.main, options.ratio, planner.requested_bits(layers, asked)),
        notes=notes,
        share=_share(layers, asked, given, planner, overridden, fallbacks),
        fallbacks=tuple(fallbacks.values()),
    )


class Planner:
    """Schemes for single layers under one set of options."""

    def __init__(self, options: ExportOptions, others: Collection[str] = (), stored: Mapping[str, Stored] = NOTHING) -> None:
        self.options, self.stored = options, stored
        self.main = resolve(options.weight_format, options.sym)
        self.ruled = {self.main, *others}
        """Formats that `scale_rule` speaks for."""
        self.mixes = is_low(self.main) and options.ratio < 1
        self.misfits: dict[str, int] = {}
        """Layer name -> the asked group size that does not divide it."""

    def asked(self, layer: Layer, override: Override | None, ignored: Rule | None) -> Asked:
        """What rules and options say, before the group is held against the layer's channel size."""
        if override is not None:
            name = resolve(override.format, self.options.sym)
            return Asked(
                name, group_of(self.options, name) if override.group_size is None else override.group_size, f"override {override.text}"
            )
        if ignored is not None:
            return Asked("keep", reason=f"ignored by {ignored.text}")
        if self.main == KEEP:
            return self._as_stored(layer)
        if is_low(self.main):
            if layer.vision:
                return self.backup("vision")
            if not self.options.all_layers and "Gather" in layer.ops:
                return self.backup("embedding" + (" tied to the last layer" if layer.last else ""))
            if not self.options.all_layers and layer.last:
                return self.backup("last layer")
            if is_router(layer):
                return self.backup("router")
        return Asked(self.main, group_of(self.options, self.main), in_ratio=True)

    def _as_stored(self, layer: Layer) -> Asked:
        """The smallest form of a layer's codes that its readers take, else its values in float."""
        found = self.stored.get(layer.name)
        if found is None:
            return Asked(KEEP, reason="stored in float" if self.options.adapter is None else "stored in float, or changed by the adapter")
        why = found.reason
        for form in found.forms:
            lookup = "Gather" in layer.ops and not formats.get(form.format).for_embeddings
            why = f"{form.format} cannot be looked up compressed" if lookup else ragged(layer, Scheme(form.format, form.group_size))
            why = why or (NOT_SORTABLE if form.sorted and not sortable(layer) else "")
            if not why:
                return Asked(form.format, form.group_size, found.method, form=form)
        return Asked(KEEP, reason=f"{found.method}: {why}")

    def fit(self, layer: Layer, asked: Asked) -> Asked:
        """The asked scheme, made to fit the layer's readers and channel size."""
        if asked.format in FLOATS or asked.form is not None:
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

    def backup(self, why: str) -> Asked:
        name = self.options.backup_precision
        return Asked("keep" if name == "none" else name, reason=why)

    def rule(self, name: str) -> str:
        """The rule for a layer of this format: the asked one for the main format, the format's best for all others."""
        if name in FLOATS:
            return "minmax"
        estimated = self.options.scale_estimation or (self.options.gptq and self.options.scale_rule == "auto")
        if estimated and self.calibrates(name):
            return SCALE_ESTIMATION
        known = name in self.ruled and self.options.scale_rule in known_rules(name)
        return self.options.scale_rule if known else formats.get(name).best_rule

    def rounding(self, name: str) -> Literal["nearest", "gptq"]:
        return "gptq" if self.calibrates(name) and self.options.gptq else "nearest"

    def folds(self, low: bool) -> Literal["none", "equalize", "awq"]:
        """The folds of a plan in which there are low-bit layers, or none."""
        return "awq" if self.options.awq else "equalize" if self.options.folds == "auto" and low else "none"

    def permutation(self, low: bool) -> Literal["none", "sorted"]:
        """As `folds`."""
        return self.options.permutation if low else "none"

    def adapter_rank(self, layer: Layer, name: str) -> int:
        """The rank of the correction of a layer of this format, at most that of the layer itself."""
        wanted = self.options.lora_correction and self.calibrates(name) and adaptable(layer)
        return min(self.options.lora_rank, *layer.shape) if wanted else 0

    def entry(self, layer: Layer, asked: Asked) -> LayerPlan:
        """The plan's line for a layer."""
        scheme = Scheme(
            asked.format,
            asked.group_size,
            self.rule(asked.format),
            self.rounding(asked.format),
            self.adapter_rank(layer, asked.format),
            self.options.lora_adapters,
        )
        if asked.form is not None:
            scheme = Scheme(asked.format, asked.group_size, STORED, scale_type=asked.form.scale_type, sorted=asked.form.sorted)
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

    def notes(self, layers: Sequence[Layer], given: Sequence[Asked]) -> tuple[str, ...]:
        """What became of misfits, in one line."""
        told = (*self._kept(layers, given), *self._ranks(layers, given))
        if not self.misfits:
            return told
        kinds = Counter((one.format, one.group_size) for layer, one in zip(layers, given, strict=True) if layer.name in self.misfits)
        became = ", ".join(f"{count} {name}" + (f" group {group}" if group > 0 else "") for (name, group), count in sorted(kinds.items()))
        return (f"{len(self.misfits)} layers that the group does not fit: {became}", *told)

    def _kept(self, layers: Sequence[Layer], given: Sequence[Asked]) -> tuple[str, ...]:
        """Of layers that are stored quantized and become float."""
        lost = [
            (layer, one)
            for layer, one in zip(layers, given, strict=True)
            if self.main == KEEP and one.format == KEEP and layer.name in self.stored
        ]
        reasons = Counter(one.reason for _, one in lost)
        size = sum(layer_bytes(layer, Scheme(KEEP, -1)) for layer, _ in lost)
        return tuple(f"{count} layers become float: {reason}" for reason, count in reasons.items()) + (
            (f"their {size} bytes may be more than the source has; --override gives them another format",) if lost else ()
        )

    def _ranks(self, layers: Sequence[Layer], given: Sequence[Asked]) -> tuple[str, ...]:
        """Of corrections that are not what was asked for, or take more room than they save."""
        wide, told = self.options.lora_rank, []
        low = [(layer, rank) for layer, one in zip(layers, given, strict=True) if (rank := self.adapter_rank(layer, one.format))]
        capped = [layer for layer, rank in low if rank < wide]
        if capped:
            told.append(f"--lora-rank {wide}: {len(capped)} layers have fewer rows or columns and get as many, {capped[0].name} for one")
        larger = [
            layer
            for layer, one in zip(layers, given, strict=True)
            if self.adapter_rank(layer, one.format) and self.entry(layer, one).bytes >= 2 * layer.size
        ]
        if larger:
            told.append(
                f"{len(larger)} layers are no smaller with their corrections than in fp16, {larger[0].name} for one: lower --lora-rank"
            )
        return tuple(told)

    def requested_bits(self, layers: Sequence[Layer], asked: Sequence[Asked]) -> float:
        """Bits per weight if every group fitted and the ratio were met exactly."""
        ratio = self.options.ratio
        bits = total = 0.0
        for layer, one in zip(layers, asked, strict=True):
            own = 8 * self.entry(layer, one).bytes / layer.size if one.form is not None else nominal_bits(layer, one.format, one.group_size)
            if self.mixes and one.in_ratio:
                backup = self.backup("")
                own = ratio * own + (1 - ratio) * nominal_bits(layer, backup.format, backup.group_size)
            rank = self.adapter_rank(layer, one.format)
            own += (
                8
                * adapter_bytes(layer.shape, Scheme(one.format, -1, adapter_rank=rank, adapter_format=self.options.lora_adapters))
                / layer.size
            )
            bits += layer.size * own
            total += layer.size
        return round(bits / total, 4) if total else 0.0


def _differ(asked: Asked, given: Asked) -> bool:
    return (asked.format, asked.group_size) != (given.format, given.group_size)


def _fallback(layer: Layer, asked: Asked, given: Asked) -> Fallback:
    wanted, got = (scheme_text(one.format, one.group_size) for one in (asked, given))
    return Fallback(layer=layer.name, asked=wanted, got=got, weights=layer.size, reason=given.reason)


def _share(
    layers: Sequence[Layer],
    asked: Sequence[Asked],
    given: Sequence[Asked],
    planner: Planner,
    overridden: Collection[str],
    fallbacks: Mapping[str, Fallback],
) -> Share:
    counted = {layer.name: (layer.size, one) for layer, one in zip(layers, given, strict=True) if one.in_ratio}
    return share_of(
        sum(size for size, _ in counted.values()),
        sum(size for size, one in counted.values() if one.format == planner.main),
        planner.options.ratio,
        [(x.name, x.size) for x, one in zip(layers, asked, strict=True) if x.name in overridden and one.format not in FLOATS],
        fallbacks.values(),
        counted,
        any(one.format != planner.main and x not in fallbacks for x, (_, one) in counted.items()),
    )


def _beyond_ratio(
    layers: Sequence[Layer], given: Sequence[Asked], planner: Planner, scores: Mapping[str, float], measured: Measured | None
) -> list[int]:
    """Places of the layers that fit the main format and get the backup, so that the rest is the asked share of all that the ratio counts."""
    ratio = planner.options.ratio
    able = [i for i, one in enumerate(given) if one.in_ratio and one.format == planner.main]
    if ratio == 0 or not able:
        return able
    if measured is None:
        costs = _costs([layers[i] for i in able], scores, planner.options)
    else:
        backup = planner.backup("")
        costs = [measured.loss(layers[i].name, given[i].format, given[i].group_size) for i in able]
        if backup.format not in FLOATS:
            costs = [cost - measured.loss(layers[i].name, backup.format, backup.group_size) for cost, i in zip(costs, able, strict=True)]
    counted = sum(layer.size for layer, one in zip(layers, given, strict=True) if one.in_ratio)
    sizes = [layers[i].size for i in able]
    chosen = set(nearest_subset(sizes, costs, ratio * counted / sum(sizes)))
    return [place for k, place in enumerate(able) if k not in chosen]


def _costs(layers: Sequence[Layer], scores: Mapping[str, float], options: ExportOptions) -> list[float]:
    """A score is of one weight's error: a layer of twice the weights suffers twice."""
    missing = [layer.name for layer in layers if layer.name not in scores]
    if missing:
        count = f"{len(missing)} {'layer has' if len(missing) == 1 else 'layers have'}"
        raise OptionError(
            f"ratio {options.ratio:g}",
            f"{count} no sensitivity score, {missing[0]} for one ({options.sensitivity_metric})",
            f"Write it into the file, or use --sensitivity-metric {DATA_FREE} without a file",
        )
    return [scores[layer.name] * layer.size for layer in layers]
