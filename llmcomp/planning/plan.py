"""The plan: one line per layer, JSON that a person can read, edit and feed back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from math import prod
from typing import Literal

from pydantic import BaseModel, ConfigDict

from llmcomp import formats
from llmcomp.errors import GroupSizeError, OptionError
from llmcomp.graph.layer import Layer
from llmcomp.graph.stored import Form, Stored
from llmcomp.options.rules import did_you_mean
from llmcomp.planning import file
from llmcomp.planning.check import check_group, check_rule
from llmcomp.planning.devices import ragged
from llmcomp.planning.scheme import FLOATS, NOT_SORTABLE, SCALE_ESTIMATION, STORED, Scheme, adaptable, adapter_bytes, layer_bytes, sortable
from llmcomp.planning.share import Fallback, Share, check_reached, scheme_text, still_owed

VERSION = 1
NOT_CALIBRATED = "not calibrated"
"""The reason, or its end, of a layer that calibration was asked for and could not reach."""
NOTHING: Mapping[str, Stored] = {}
ROUNDED = {"scale_type": "f16", "sorted": False}
"""What lines of other rules than STORED say."""


class LayerPlan(BaseModel):
    """What becomes of one layer. `format` is a number format or one of keep, fp16, fp32; `bytes` are exact, and computed anew when read."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    tensor: str
    shape: tuple[int, ...]
    format: str
    group_size: int = -1
    rule: str = "minmax"
    """What picks the scales: one of the format's rules, `search`, `scale_estimation`, or `stored`: codes and scales are those of the source."""
    rounding: Literal["nearest", "gptq"] = "nearest"
    adapter_rank: int = 0
    """Of a low-rank correction beside the layer; its bytes are in `bytes`."""
    adapter_format: Literal["int8_asym", "fp16"] = "int8_asym"
    scale_type: Literal["f16", "f32"] = "f16"
    """Of the rule `stored`: what holds the scales of the source; found anew when read."""
    sorted: bool = False
    """Of the rule `stored`: columns come in the order of their groups, and inputs are looked up in it; found anew when read."""
    bytes: int = 0
    in_ratio: bool = True
    """Whether the ratio counts it: neither embedding, last layer nor router, and not named by a rule."""
    reason: str = ""

    @property
    def scheme(self) -> Scheme:
        return Scheme(
            self.format, self.group_size, self.rule, self.rounding, self.adapter_rank, self.adapter_format, self.scale_type, self.sorted
        )


class Summary(BaseModel):
    """Totals. A ratio is the share, of the weights that it counts, that have the main format."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    weights: int
    bytes: int
    bits_per_weight: float
    bits_per_weight_requested: float | None = None
    ratio: float
    ratio_requested: float | None = None


class Point(BaseModel):
    """A size that a model can be brought to, and what it loses then."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    bin_bytes: int
    bits_per_weight: float
    """8 x bytes of the .bin / elements of the source weights."""
    nats: float
    """Predicted KL at the model's end, nats per token."""


class Budget(BaseModel):
    """The budget that a plan was made for, and how near to the best it comes."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["target_size", "target_bpw", "max_loss"]
    requested: float
    """Bytes of the .xml and .bin together, bits per weight, or nats per token."""
    reached: float
    """In the same unit; for max_loss the prediction."""
    nats: float
    """Predicted KL, nats per token."""
    bound: float
    """Under a size or bits: no plan that fits is predicted to lose less nats than this. Under a loss: none that keeps it has fewer bytes."""
    gap: float
    """How far the best plan could lie below this one, in the unit of `bound`; 0 if this one is proven the best."""
    interaction: float
    """What the sum of the layers' own losses was multiplied with."""
    table: tuple[Point, ...] = ()
    """Sizes against predicted losses, from the smallest model to the best."""


class Plan(BaseModel):
    """Layers in topological order, and what they add up to."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: int = VERSION
    main: str
    """The format that `ratio` is about."""
    folds: Literal["none", "equalize", "awq"] = "none"
    """equalize: columns of low-bit weights are made alike, by factors that move into norms and other weights and change nothing else;
    awq: the factors are those that lose least on the calibration data."""
    permutation: Literal["none", "sorted"] = "none"
    """sorted: the inner channels of MLPs come in the order of their magnitudes where low-bit weights have groups along them; exact, too."""
    target_correction: bool = False
    """Layers with second-order rounding are rounded to weights that make up for what the layers before them have lost."""
    tables: Literal["tensor", "blocks"] = "tensor"
    """Of adaptive codebooks. tensor: each weight has its own; blocks: one for weights of the same name in all blocks."""
    layers: tuple[LayerPlan, ...]
    summary: Summary
    notes: tuple[str, ...] = ()
    share: Share | None = None
    """None where every line is itself what is asked for, in a plan for a budget."""
    fallbacks: tuple[Fallback, ...] = ()
    """Layers whose channels the asked group or format does not fit; none where `share` is None."""
    budget: Budget | None = None

    def to_json(self) -> str:
        """One layer a line, so that a diff of two plans reads."""
        return file.to_json(self)

    @classmethod
    def from_json(cls, text: str, where: str = "plan") -> Plan:
        """Raises OptionError: not JSON, an unknown key, a value of the wrong kind, another version, two lines for one layer."""
        return file.from_json(cls, VERSION, text, where, "plan")

    def check_against(self, layers: Sequence[Layer], where: str = "plan", stored: Mapping[str, Stored] = NOTHING) -> Plan:
        """This plan for these layers, its bytes and totals computed anew, without a budget, which an edited plan may no longer meet. A line that
        somebody has edited is what is asked for. `stored` are those that are stored quantized, by name; it is only looked at where a line says
        `stored`.

        Raises:
            OptionError: a layer is missing, unknown, of another tensor or shape, or a format does not exist or does not fit.
            GroupSizeError: a group size that does not divide its layer.
        """
        _check_format(self.main, f"{where}, main")
        file.check_known(self.layers, layers, where, "plan")
        planned = {entry.name: entry for entry in self.layers}
        missing = [layer.name for layer in layers if layer.name not in planned]
        if missing:
            raise OptionError(
                where, f"it lacks {len(missing)} of the model's layers: {', '.join(missing[:5])}", "Add them; `keep` leaves one as it is"
            )
        if self.target_correction and not any(entry.rounding == "gptq" for entry in self.layers):
            raise OptionError(
                f"{where}, target_correction", "no layer has rounding gptq, which it is for", "Give some layers that, or set it to false"
            )
        if self.keeps_codes and self.is_calibrated:
            raise OptionError(
                where, f"some layers have rule {STORED}, and others look at data", f"Give all of them {STORED} or float, or none {STORED}"
            )
        checked = tuple(_checked(planned[layer.name], layer, where, stored.get(layer.name)) for layer in layers)
        summary = summarize(checked, self.main, self.summary.ratio_requested, self.summary.bits_per_weight_requested)
        share, fallbacks = still_owed(self.share, self.fallbacks, {x.name: scheme_text(x.format, x.group_size) for x in checked})
        return self.model_copy(update={"layers": checked, "summary": summary, "share": share, "fallbacks": fallbacks, "budget": None})

    @property
    def schemes(self) -> dict[str, Scheme]:
        """Layer name -> scheme."""
        return {entry.name: entry.scheme for entry in self.layers}

    def of(self, layers: Sequence[Layer]) -> Plan:
        """The part of this plan that is about these layers; `share` stays that of all."""
        names = {layer.name for layer in layers}
        entries = tuple(entry for entry in self.layers if entry.name in names)
        summary = summarize(entries, self.main, self.summary.ratio_requested, self.summary.bits_per_weight_requested)
        fallbacks = tuple(one for one in self.fallbacks if one.layer in names)
        return self.model_copy(update={"layers": entries, "summary": summary, "fallbacks": fallbacks})

    @property
    def is_calibrated(self) -> bool:
        """Whether following it needs calibration data."""
        return self.folds == "awq" or any(entry.scheme.is_calibrated for entry in self.layers)

    @property
    def keeps_codes(self) -> bool:
        """Whether some layers keep the codes of the source."""
        return any(entry.scheme.is_stored for entry in self.layers)

    def without_calibration(self, reached: Collection[str]) -> tuple[Plan, list[str]]:
        """This plan with plain rounding for the layers that are not in `reached`, and the names of those that had asked for more."""
        missed = [entry.name for entry in self.layers if entry.scheme.is_calibrated and entry.name not in reached]
        plain = {
            entry.name: {
                "rule": formats.get(entry.format).best_rule if entry.rule == SCALE_ESTIMATION else entry.rule,
                "rounding": "nearest",
                "adapter_rank": 0,
                "bytes": entry.bytes - adapter_bytes(entry.shape, entry.scheme),
                "reason": f"{entry.reason}; {NOT_CALIBRATED}" if entry.reason else NOT_CALIBRATED,
            }
            for entry in self.layers
            if entry.name in missed
        }
        layers = tuple(entry.model_copy(update=plain.get(entry.name, {})) for entry in self.layers)
        summary = summarize(layers, self.main, self.summary.ratio_requested, self.summary.bits_per_weight_requested)
        return self.model_copy(update={"layers": layers, "summary": summary}), missed

    def check_reached(self) -> None:
        """Raises NothingCompressedError: no weight gets what was asked for, or there is none."""
        check_reached(self.main, len(self.layers), self.share, self.fallbacks)

    def counts(self) -> dict[str, int]:
        """Format -> number of layers."""
        return dict(sorted(Counter(entry.format for entry in self.layers).items()))

    def main_format(self) -> LayerPlan:
        """The layer whose scheme most weights share."""
        weights: Counter[tuple[str, int]] = Counter()
        for entry in self.layers:
            weights[entry.format, entry.group_size] += prod(entry.shape)
        (name, group), _ = weights.most_common(1)[0]
        return next(e for e in self.layers if (e.format, e.group_size) == (name, group))


def _check_format(name: str, place: str) -> None:
    try:
        known = name in FLOATS or formats.exists(name)
    except OptionError as error:
        raise OptionError(f"{place}, {error.thing}", error.reason, error.remedy) from None
    if not known:
        raise OptionError(place, f"no format {name!r}", did_you_mean(name, [*formats.names(), *FLOATS]))


def _checked(entry: LayerPlan, layer: Layer, where: str, stored: Stored | None) -> LayerPlan:
    place = f"{where}, layer {entry.name}"
    _check_format(entry.format, place)
    if entry.format in FLOATS:
        # Who edits a line into `keep` does not think of the group size beside it.
        entry = entry.model_copy(update={"group_size": -1, "rule": "minmax", "rounding": "nearest", "adapter_rank": 0, **ROUNDED})
    else:
        if entry.group_size != -1 and (entry.group_size < 1 or layer.shape[-1] % entry.group_size):
            raise GroupSizeError(place, f"group size {entry.group_size} does not divide {layer.shape[-1]}", "Use a divisor, or -1")
        check_group(place, entry.format, entry.group_size)
        if entry.rule == STORED:
            form = _form(entry, place, stored)
            entry = entry.model_copy(update={"scale_type": form.scale_type, "sorted": form.sorted})
            if form.sorted and not sortable(layer):
                raise OptionError(place, f"rule {STORED}: {NOT_SORTABLE}", "Use another rule, such as minmax, or format keep")
        else:
            entry = entry.model_copy(update=ROUNDED)
            check_rule(place, entry.format, entry.rule)
        trouble = ragged(layer, entry.scheme)
        if trouble:
            raise GroupSizeError(place, trouble, "Use a power of two, or int8_asym with -1")
        if "Gather" in layer.ops and not formats.get(entry.format).for_embeddings:
            raise OptionError(place, f"a {entry.format} table cannot be looked up compressed", "Use an integer format for embeddings")
        if entry.adapter_rank and not adaptable(layer):
            raise OptionError(place, "it is no matrix that one MatMul reads, so there is no place for adapters", "Use adapter_rank 0")
        if not 0 <= entry.adapter_rank <= min(layer.shape):
            raise OptionError(place, f"adapter_rank {entry.adapter_rank} is not between 0 and {min(layer.shape)}", "Use 8")
    return entry.model_copy(update={"bytes": layer_bytes(layer, entry.scheme)})


def _form(entry: LayerPlan, place: str, stored: Stored | None) -> Form:
    """The form of a layer's codes that a line asks for."""
    if stored is None:
        raise OptionError(place, f"rule {STORED}: it is not stored quantized", "Use another rule, such as minmax, or format keep")
    found = next((form for form in stored.forms if (form.format, form.group_size) == (entry.format, entry.group_size)), None)
    if found is None:
        held = ", ".join(f"{form.format} group {form.group_size}" for form in stored.forms)
        reason = f"they fit {held}" if held else stored.reason
        raise OptionError(
            place,
            f"rule {STORED}: {entry.format} group {entry.group_size} does not hold its {stored.method} codes ({reason})",
            "Use a format that holds them, another rule, such as minmax, or format keep",
        )
    return found


def summarize(entries: Sequence[LayerPlan], main: str, ratio_requested: float | None, bits_requested: float | None) -> Summary:
    """Totals of a plan, beside what was asked for."""
    weights = sum(prod(entry.shape) for entry in entries)
    stored = sum(entry.bytes for entry in entries)
    counted = sum(prod(entry.shape) for entry in entries if entry.in_ratio)
    in_main = sum(prod(entry.shape) for entry in entries if entry.in_ratio and entry.format == main)
    return Summary(
        weights=weights,
        bytes=stored,
        bits_per_weight=round(8 * stored / weights, 4) if weights else 0.0,
        bits_per_weight_requested=bits_requested,
        ratio=round(in_main / counted, 6) if counted else 0.0,
        ratio_requested=ratio_requested,
    )
