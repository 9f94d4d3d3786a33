"""Rules that name layers, and what a rule asks for."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from difflib import get_close_matches
from fnmatch import translate

from llmcomp.errors import OptionError

REGEX, TYPE = "re:", "type:"


@dataclass(frozen=True)
class Rule:
    """A name, a glob, `re:REGEX` or `type:OPERATION`.

    A regular expression is matched from the start of a name, need not reach its end, as NNCF's patterns. A glob must fit
    the whole name, and its `*` crosses dots. OptionError: an empty rule or a broken expression.
    """

    text: str
    _pattern: re.Pattern[str] | None = field(init=False, repr=False, compare=False, default=None)

    def __post_init__(self) -> None:
        body = self.text.removeprefix(REGEX).removeprefix(TYPE)
        if not body:
            raise OptionError(f"rule '{self.text}'", "it is empty", "Give a name, a glob, re:REGEX or type:OPERATION")
        if self.text.startswith(REGEX):
            try:
                pattern = re.compile(body)
            except re.error as error:
                raise OptionError(
                    f"rule '{self.text}'", f"not a regular expression ({error})", "Mend it, or use a glob such as *.q_proj"
                ) from None
        elif self.is_exact or self.is_type:
            return
        else:
            pattern = re.compile(translate(self.text))
        object.__setattr__(self, "_pattern", pattern)

    @property
    def is_type(self) -> bool:
        return self.text.startswith(TYPE)

    @property
    def is_exact(self) -> bool:
        return not self.text.startswith((REGEX, TYPE)) and not any(mark in self.text for mark in "*?[")

    def matches(self, names: Iterable[str], ops: Iterable[str] = ()) -> bool:
        """Whether one of a layer's names, or for a type rule one of the operations that read it, fits."""
        if self.is_type:
            return self.text.removeprefix(TYPE) in ops
        if self._pattern is None:
            return self.text in names
        return any(self._pattern.match(name) for name in names)

    def near(self, names: Iterable[str], ops: Iterable[str]) -> list[str]:
        """At most three names, tails of names or operations that look like what was meant."""
        if self.is_type:
            return near(self.text.removeprefix(TYPE), ops)
        if self.is_exact:
            return near(self.text, names)
        # Of a pattern only the literal tail says what was meant, and a model has few distinct tails.
        literal = re.split(r"[*?\[\]()|\\^$+{}]+", self.text.removeprefix(REGEX).rstrip("*?$"))[-1].strip(".")
        tails = {name.rsplit(".", count)[-1] if count == 1 else ".".join(name.split(".")[-count:]) for name in names for count in (1, 2)}
        return near(literal, sorted(tails))


def near(word: str, words: Iterable[str]) -> list[str]:
    """At most three of `words` that look like `word`, likeliest first."""
    return get_close_matches(word, list(dict.fromkeys(words)), n=3, cutoff=0.6)


def did_you_mean(word: str, words: Iterable[str]) -> str:
    """A remedy for a misspelt word: the near ones, or all of them when none is near."""
    words = list(words)
    found = near(word, words)
    return f"Did you mean {' or '.join(found)}?" if found else f"Possible are {', '.join(words)}"


@dataclass(frozen=True)
class Override:
    """`PATTERN=FORMAT[:GROUP]`. `group_size` None: what the format would get otherwise; -1: one scale for each output channel."""

    text: str
    rule: Rule = field(init=False)
    format: str = field(init=False)
    group_size: int | None = field(init=False)

    def __post_init__(self) -> None:
        # The last "=": a regular expression may hold one (a lookahead), a format may not.
        pattern, equals, scheme = self.text.rpartition("=")
        name, colon, group = scheme.partition(":")
        if not equals or not pattern or not name or (colon and not re.fullmatch(r"-1|[1-9]\d*", group)):
            raise OptionError(
                f"override '{self.text}'",
                "it is not PATTERN=FORMAT[:GROUP]",
                "Write for instance '*.down_proj=int8_asym' or '*.o_proj=int4_sym:32'",
            )
        object.__setattr__(self, "rule", Rule(pattern))
        object.__setattr__(self, "format", name)
        object.__setattr__(self, "group_size", int(group) if colon else None)
