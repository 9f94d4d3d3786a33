"""What `llmcomp measure` found: one line per layer, JSON that a person can read, edit and feed back to `llmcomp plan`."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat

from llmcomp import formats
from llmcomp.errors import GroupSizeError, OptionError
from llmcomp.graph.layer import Layer
from llmcomp.options.rules import did_you_mean
from llmcomp.planning import file
from llmcomp.planning.check import check_group, check_rounds

VERSION = 1


class MeasuredLayer(BaseModel):
    """How much one layer suffers."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    tensor: str
    shape: tuple[int, ...]
    metrics: dict[str, FiniteFloat] = {}
    """Metric of `--sensitivity-metric` -> score; high keeps precision."""
    nats: dict[str, FiniteFloat] = {}
    """FORMAT:GROUP -> KL at the model's end, in nats per token, if this layer alone is rounded so. Never negative."""


class Measured(BaseModel):
    """Layers in topological order, and what they were measured with."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: int = VERSION
    data: str
    """What text it was."""
    weights: str | None = None
    """`Checkpoint.values_digest` of the model; None lets the file serve any model of its layers."""
    tokens: int = Field(ge=0)
    interaction: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """KL with all layers rounded, over the sum of their own."""
    layers: tuple[MeasuredLayer, ...]

    def to_json(self) -> str:
        """One layer a line, so that a diff of two files reads."""
        return file.to_json(self)

    @classmethod
    def from_json(cls, text: str, where: str = "sensitivity file") -> Measured:
        """Raises OptionError: not JSON, an unknown key, a value of the wrong kind, another version, two lines for one layer."""
        return file.from_json(cls, VERSION, text, where, "measure")

    def check_against(self, layers: Sequence[Layer], weights: str, where: str = "sensitivity file") -> Measured:
        """This file for these layers of a model with this digest, in their order; not every layer needs a line.

        Raises:
            OptionError: it is of other weights; a layer is unknown, or of another tensor or shape; a candidate is no FORMAT:GROUP, or its loss negative.
            GroupSizeError: a candidate's group does not divide its layer.
        """
        if self.weights not in (None, weights):
            raise OptionError(
                where,
                "it was measured on other weights than this model's",
                'Measure this model; or set "weights" to null in the file, to use it for a relative all the same',
            )
        file.check_known(self.layers, layers, where, "file")
        for entry in self.layers:
            for text, loss in entry.nats.items():
                place = f"{where}, layer {entry.name}, {text}"
                _, group = parse_candidate(text, place)
                if group != -1 and entry.shape[-1] % group:
                    raise GroupSizeError(place, f"group size {group} does not divide {entry.shape[-1]}", "Take it out")
                if loss < 0:
                    raise OptionError(place, f"a loss of {loss:g} nats is negative", "Mend it, or take it out")
        by_name = {entry.name: entry for entry in self.layers}
        return self.model_copy(update={"layers": tuple(by_name[layer.name] for layer in layers if layer.name in by_name)})

    def loss(self, layer: str, name: str, group_size: int) -> float:
        """Nats of one layer under a scheme.

        Raises:
            OptionError: it was not measured.
        """
        wanted = candidate(name, group_size)
        for entry in self.layers:
            if entry.name == layer and wanted in entry.nats:
                return entry.nats[wanted]
        raise OptionError(
            f"layer {layer}",
            f"its loss as {wanted} is not among what was measured",
            f"Measure with {wanted} among the --candidates, or rank by another --sensitivity-metric",
        )

    def scores(self, metric: str) -> dict[str, float]:
        """Layer name -> score, of the layers that have this one."""
        return {entry.name: entry.metrics[metric] for entry in self.layers if metric in entry.metrics}


def candidate(name: str, group_size: int) -> str:
    """FORMAT:GROUP, as files and options spell a candidate."""
    return f"{name}:{group_size}"


def parse_candidate(text: str, place: str) -> tuple[str, int]:
    """(exact name of a format, group size, -1 for one scale per output channel) from FORMAT:GROUP.

    Raises:
        OptionError: it is not of that form, or no such format exists, or it is defined with another group; `place` as the thing.
    """
    name, colon, size = text.rpartition(":")
    if not colon or not size.removeprefix("-").isdecimal() or int(size) < -1 or int(size) == 0:
        raise OptionError(place, "it is not FORMAT:GROUP", "Write for example int4_sym:64, with -1 for one scale per output channel")
    if not formats.exists(name):
        raise OptionError(place, f"no format {name!r}", did_you_mean(name, formats.names()))
    check_group(place, name, int(size))
    check_rounds(place, name)
    return name, int(size)
