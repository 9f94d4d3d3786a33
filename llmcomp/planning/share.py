"""What a plan owes: the layers that could not get what was asked for them, and the share of weights that got it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from pydantic import BaseModel, ConfigDict, Field

from llmcomp.errors import NothingCompressedError


def scheme_text(name: str, group_size: int) -> str:
    """FORMAT:GROUP, as an override spells it; without a group where there is one scale per channel, or none."""
    return f"{name}:{group_size}" if group_size > 0 else name


def scheme_of(text: str) -> tuple[str, int]:
    """Format and group size of what `scheme_text` gave."""
    name, colon, group = text.rpartition(":")
    return (name, int(group)) if colon else (text, -1)


class Fallback(BaseModel):
    """A layer that gets something else than the options put it in."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    layer: str
    asked: str
    """As `scheme_text` has it."""
    got: str
    weights: int = Field(ge=0)
    reason: str

    @property
    def is_shortfall(self) -> bool:
        """Whether it is another format, not the same one in smaller groups."""
        return self.asked.partition(":")[0] != self.got.partition(":")[0]


class Share(BaseModel):
    """How many of the weights that were to get a format have got it.

    Wanted are the weights of the ratio's layers, as far as the ratio goes, and of those that an override puts in a number format. Backup precision
    for embedding, last layer, routers and what is beyond the ratio, and layers left as they are by a rule, are as asked and do not count.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    wanted: int = Field(ge=0)
    reached: int = Field(ge=0)

    @property
    def value(self) -> float:
        """1 if nothing was wanted."""
        return self.reached / self.wanted if self.wanted else 1.0


def share_of(
    counted: int,
    in_main: int,
    ratio: float,
    overridden: Collection[tuple[str, int]],
    fallbacks: Iterable[Fallback],
    in_ratio: Collection[str],
    beyond: bool,
) -> Share:
    """`counted` and `in_main` are weights that the ratio counts, and those of them in the main format; `overridden` (layer, weights) those that
    overrides put in a number format; `in_ratio` names the counted layers; `beyond`: some of these got the backup for being beyond the ratio."""
    fell = {one.layer: one.weights for one in fallbacks if one.is_shortfall}
    fallen = sum(weights for layer, weights in fell.items() if layer in in_ratio)
    # Layers come whole: what a ratio lacks while there are layers beyond it, which could have had the format, is no shortfall.
    missing = 0 if beyond else min(fallen, max(0, round(ratio * counted) - in_main))
    named = sum(weights for _, weights in overridden)
    lost = sum(weights for layer, weights in overridden if layer in fell)
    return Share(wanted=in_main + missing + named, reached=in_main + named - lost)


def still_owed(share: Share | None, fallbacks: Iterable[Fallback], got: Mapping[str, str]) -> tuple[Share | None, tuple[Fallback, ...]]:
    """The same after lines were edited: `got` is layer -> scheme of all lines, and one that is no longer the fallback is as asked."""
    fallbacks = tuple(fallbacks)
    kept = tuple(one for one in fallbacks if got.get(one.layer) == one.got)
    if share is None:
        return None, kept
    edited = sum(one.weights for one in fallbacks if one not in kept and one.is_shortfall)
    # Nothing is owed but what is told, whatever else was edited.
    owed = sum(one.weights for one in kept if one.is_shortfall)
    return Share(wanted=share.wanted, reached=min(share.wanted, max(share.reached + edited, share.wanted - owed))), kept


def check_reached(main: str, layers: int, share: Share | None, fallbacks: Collection[Fallback]) -> None:
    """Some weight gets what was asked for.

    Raises:
        NothingCompressedError: none does, or there is no layer.
    """
    if not layers:
        raise NothingCompressedError("the model", "it has no matrix that could be compressed", "Leave it as it is")
    if share is None or share.reached or not share.wanted:
        return
    first = next(one for one in fallbacks if one.is_shortfall)
    raise NothingCompressedError(
        main,
        f"no layer can get it: {first.layer} would get {first.got} ({first.reason})",
        f"Ask for {first.got.partition(':')[0].replace('keep', 'fp16')}, or another --group-size",
    )
