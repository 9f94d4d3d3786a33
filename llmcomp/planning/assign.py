"""From options to a plan.

Who may get the main format is NNCF's rule: every MatMul but the last, and with `--all-layers` the last and the embeddings too; an 8-bit main
format goes everywhere. Routers get the backup precision unless overridden, which NNCF leaves to its users. What NNCF gets wrong and is
otherwise here: ratio 0 means none; a ratio is met as nearly as the weights allow; a group never grows; what a group does not fit falls to
the backup precision and not to float, unless float was asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from llmcomp import formats
from llmcomp.errors import GroupSizeError, OptionError, RuleError
from llmcomp.graph.layer import Layer
from llmcomp.options import ExportOptions, Override, Rule
from llmcomp.options.rules import did_you_mean
from llmcomp.planning.plan import LayerPlan, Plan, Summary, summarize
from llmcomp.planning.roles import is_router
from llmcomp.planning.scheme import FLOATS, Scheme, layer_bytes
from llmcomp.planning.select import nearest_subset

DEFAULT_GROUP = 64
LEAST_GROUP = 32
"""The smallest group that `adjust` takes: below it the scales cost more than they save (NNCF's min_adjusted_group_size)."""
SHORT = {"int8": ("int8_asym", "int8_sym"), "int4": ("int4_asym", "int4_sym")}
"""optimum-cli's names -> (without --sym, with --sym)."""
COMPRESSION_FIELDS = {
    "weight_format",
    "sym",
    "ratio",
    "group_size",
    "group_size_fallback",
    "all_layers",
    "backup_precision",
    "ignored_scope",
    "override",
    "sensitivity_metric",
}


@dataclass(frozen=True)
class _Asked:
    """A scheme as asked for one layer, and why."""

    format: str
    group_size: int
    reason: str


def resolve(name: str, sym: bool) -> str:
    """The exact name of a weight format.

    Raises:
        OptionError: no such format.
    """
    if name in SHORT:
        return SHORT[name][sym]
    if name in FLOATS or formats.exists(name):
        return name
    raise OptionError(f"weight format {name!r}", "no such format", did_you_mean(name, [*SHORT, *formats.names(), "fp16", "fp32"]))


def check_options(options: ExportOptions) -> None:
    """What can be refused without a model.

    Raises:
        OptionError: an unknown format in --weight-format or --override, or options that contradict it.
    """
    main = resolve(options.weight_format, options.sym)
    if options.sym and main.endswith("_asym"):
        raise OptionError("--sym", f"{main} is asymmetric by name", f"Use --weight-format {main.removesuffix('asym')}sym, or drop --sym")
    low = main not in FLOATS and formats.get(main).bits < 8
    if not low and options.ratio != 1:
        raise OptionError(f"--ratio {options.ratio:g}", f"{main} is no smaller than the backup, so nothing is to mix", "Use --ratio 1")
    if not low and options.group_size not in (None, -1):
        scales = "no scales" if main in FLOATS else "one scale for each output channel"
        raise OptionError(f"--group-size {options.group_size}", f"{main} has {scales}", "Use --group-size -1")
    for override in options.overrides:
        if resolve(override.format, options.sym) in FLOATS and override.group_size is not None:
            raise OptionError(f"override '{override.text}'", f"{override.format} has no groups", "Leave the group size out")


def needs_scores(options: ExportOptions) -> bool:
    """Whether a plan must read weights: only a ratio strictly between 0 and 1 ranks layers."""
    main = resolve(options.weight_format, options.sym)
    return main not in FLOATS and formats.get(main).bits < 8 and 0 < options.ratio < 1


def make_plan(layers: Sequence[Layer], options: ExportOptions, scores: Mapping[str, float] | None = None) -> Plan:
    """The plan for these layers. `scores` (layer name -> sensitivity, high keeps precision) are needed if `needs_scores(options)`.

    Raises:
        OptionError: as `check_options`, or scores are missing.
        RuleError: a rule matches nothing, or everything.
        GroupSizeError: with fallback `error`, all layers that the group does not divide.
    """
    check_options(options)
    main = resolve(options.weight_format, options.sym)
    ignored = {layer.name: rule for rule in _ignore_rules(options, layers) for layer in layers if _matches(rule, layer)}
    overridden = {layer.name: o for o in _overrides(options, layers) for layer in layers if _matches(o.rule, layer)}
    planner = _Planner(options, main)
    schemes: dict[str, _Asked] = {}
    candidates = []
    for layer in layers:
        if layer.name in overridden:
            schemes[layer.name] = planner.fit(layer, planner.of_override(overridden[layer.name]))
        elif layer.name in ignored:
            schemes[layer.name] = _Asked("keep", -1, f"ignored by {ignored[layer.name].text}")
        elif main in FLOATS:
            schemes[layer.name] = _Asked(main, -1, "")
        else:
            schemes[layer.name] = planner.first(layer)
            if schemes[layer.name].format == main:
                candidates.append(layer)
    if planner.unfit:
        raise GroupSizeError(
            f"group size {planner.group}",
            f"it does not divide {len(planner.unfit)} layers: " + ", ".join(f"{layer.name} ({layer.shape[-1]})" for layer in planner.unfit),
            "Use --group-size-fallback adjust, another --group-size, or --override for these",
        )
    if main not in FLOATS and formats.get(main).bits < 8 and options.ratio < 1:
        for name in _beyond_ratio(candidates, options.ratio, scores):
            layer = next(x for x in candidates if x.name == name)
            schemes[name] = planner.backup(layer, f"beyond the ratio {options.ratio:g}")
    entries = tuple(_entry(layer, schemes[layer.name]) for layer in layers)
    requested = Summary(
        weights=0,
        bytes=0,
        bits_per_weight=0,
        ratio=0,
        ratio_requested=options.ratio,
        bits_per_weight_requested=planner.requested_bits(layers),
    )
    return Plan(main=main, layers=entries, summary=summarize(entries, layers, main, requested), notes=tuple(planner.notes(entries)))


class _Planner:
    """Schemes for single layers under one set of options."""

    def __init__(self, options: ExportOptions, main: str) -> None:
        self.options, self.main = options, main
        self.group = self._group(main, options.group_size)
        self.unfit: list[Layer] = []

    @staticmethod
    def _group(name: str, asked: int | None) -> int:
        if name in FLOATS or not formats.get(name).grouped:
            return -1
        return DEFAULT_GROUP if asked is None else asked

    def first(self, layer: Layer) -> _Asked:
        """The scheme of a layer that no rule names, before the ratio is applied."""
        everywhere = self.options.all_layers or formats.get(self.main).bits >= 8
        if not everywhere and "Gather" in layer.ops:
            return self.backup(layer, "embedding" + (" tied to the last layer" if layer.last else ""))
        if not everywhere and layer.last:
            return self.backup(layer, "last layer")
        if formats.get(self.main).bits < 8 and is_router(layer):
            return self.backup(layer, "router")
        return self.fit(layer, _Asked(self.main, self.group, ""))

    def of_override(self, override: Override) -> _Asked:
        name = resolve(override.format, self.options.sym)
        group = override.group_size if override.group_size is not None else self._group(name, self.options.group_size)
        return _Asked(name, -1 if name in FLOATS else group, f"override {override.text}")

    def fit(self, layer: Layer, asked: _Asked) -> _Asked:
        """The asked scheme, made to fit the layer's channel size and its readers."""
        if asked.format in FLOATS:
            return asked
        if "Gather" in layer.ops and not formats.get(asked.format).for_embeddings:
            return self.backup(layer, f"{asked.format} cannot be looked up compressed")
        width = layer.shape[-1]
        if asked.group_size == -1 or width % asked.group_size == 0:
            return asked
        if self.options.group_size_fallback == "error":
            self.unfit.append(layer)
            return asked
        why = f"{asked.group_size} does not divide {width}"
        if self.options.group_size_fallback == "ignore":
            return _Asked("keep", -1, why)
        group = LEAST_GROUP
        while group * 2 <= asked.group_size and width % (group * 2) == 0:
            group *= 2
        if group <= asked.group_size and width % group == 0:
            return _Asked(asked.format, group, f"{asked.reason}; {why}" if asked.reason else why)
        return self.backup(layer, f"{why}, nor does a power of two from {LEAST_GROUP} on")

    def backup(self, layer: Layer, why: str) -> _Asked:
        name = self.options.backup_precision
        return _Asked("keep" if name == "none" else name, -1, why)

    def requested_bits(self, layers: Sequence[Layer]) -> float:
        """Bits per weight if every group fitted and the ratio were met exactly."""
        total = bits = 0.0
        for layer in layers:
            backup = _bits(layer, Scheme(self.backup(layer, "").format, -1))
            main = backup
            if self.main in FLOATS:
                main = _bits(layer, Scheme(self.main, -1))
            elif self.first(layer).format == self.main:
                main = _bits_of_format(self.main, self.group, layer.shape[-1])
            ratio = self.options.ratio if self.main not in FLOATS and formats.get(self.main).bits < 8 else 1.0
            bits += layer.size * (ratio * main + (1 - ratio) * backup)
            total += layer.size
        self.unfit.clear()
        return round(bits / total, 4) if total else 0.0

    def notes(self, entries: Sequence[LayerPlan]) -> list[str]:
        adjusted = [e for e in entries if "does not divide" in e.reason]
        if not adjusted:
            return []
        kinds = sorted({f"{e.format}" + (f" group {e.group_size}" if e.group_size > 0 else "") for e in adjusted})
        return [f"{len(adjusted)} layers that group {self.group} does not divide: {', '.join(kinds)}"]


def _bits(layer: Layer, scheme: Scheme) -> float:
    return 8 * layer_bytes(layer, scheme) / layer.size


def _bits_of_format(name: str, group: int, width: int) -> float:
    """Bits per weight of a format whose group fits, eight channels together so that no nibble is lost to rounding."""
    width = group if group > 0 else width
    return 8 * sum(part.nbytes for part in formats.get(name).parts((8, width), -1)) / (8 * width)


def _entry(layer: Layer, asked: _Asked) -> LayerPlan:
    scheme = Scheme(asked.format, asked.group_size)
    return LayerPlan(
        name=layer.name,
        tensor=layer.tensor,
        shape=layer.shape,
        format=asked.format,
        group_size=asked.group_size,
        bytes=layer_bytes(layer, scheme),
        reason=asked.reason,
    )


def _beyond_ratio(candidates: Sequence[Layer], ratio: float, scores: Mapping[str, float] | None) -> list[str]:
    if ratio > 0 and scores is None:
        raise OptionError(f"ratio {ratio:g}", "the layers have no sensitivity scores to rank them by", "Compute them first")
    known = scores or {}
    sizes = [layer.size for layer in candidates]
    costs = [known.get(layer.name, 0.0) * layer.size for layer in candidates]
    chosen = set(nearest_subset(sizes, costs, ratio))
    return [layer.name for i, layer in enumerate(candidates) if i not in chosen]


def _names(layer: Layer) -> tuple[str, ...]:
    return (layer.name, layer.tensor, *layer.nodes)


def _matches(rule: Rule, layer: Layer) -> bool:
    return rule.matches(_names(layer), layer.ops)


def _ignore_rules(options: ExportOptions, layers: Sequence[Layer]) -> list[Rule]:
    rules = list(options.ignored_scope.rules())
    for rule in rules:
        _check_rule(rule, layers, "ignored scope", options.ignored_scope.validate)
    if rules and all(any(_matches(rule, layer) for rule in rules) for layer in layers):
        raise RuleError(
            "ignored scope",
            "its rules together match every layer, so nothing would be compressed",
            "Narrow them, or use --weight-format fp16",
        )
    return rules


def _overrides(options: ExportOptions, layers: Sequence[Layer]) -> list[Override]:
    for override in options.overrides:
        _check_rule(override.rule, layers, "override", True)
    return list(options.overrides)


def _check_rule(rule: Rule, layers: Sequence[Layer], what: str, validate: bool) -> None:
    matched = sum(_matches(rule, layer) for layer in layers)
    if matched == 0 and validate:
        near = rule.near([n for layer in layers for n in _names(layer)], sorted({op for layer in layers for op in layer.ops}))
        hint = f"Did you mean {' or '.join(near)}?" if near else "`llmcomp plan` lists the layers' names"
        raise RuleError(f"{what} '{rule.text}'", "it matches no layer", hint)
    if matched == len(layers) > 1:
        raise RuleError(f"{what} '{rule.text}'", f"it matches all {matched} layers", "Narrow it; --weight-format speaks for all layers")
