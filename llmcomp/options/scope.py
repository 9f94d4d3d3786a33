"""IgnoredScope: the layers that stay float."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from llmcomp.errors import OptionError
from llmcomp.options.rules import REGEX, TYPE, Rule, did_you_mean


@dataclass(frozen=True)
class IgnoredScope:
    """What to leave out of compression, in NNCF's words.

    `names`: exact names, globs or `re:REGEX`; `patterns`: regular expressions matched from the start of a name; `types`:
    operation types. `validate` False allows a rule that matches nothing.
    """

    names: tuple[str, ...] = ()
    patterns: tuple[str, ...] = ()
    types: tuple[str, ...] = ()
    validate: bool = True

    def __post_init__(self) -> None:
        for name in ("names", "patterns", "types"):
            value = getattr(self, name)
            if isinstance(value, str) or not isinstance(value, Sequence) or not all(isinstance(entry, str) for entry in value):
                raise OptionError(f"ignored_scope.{name}", f"{value!r} is not a list of texts", "Write a list, even of one entry")
            object.__setattr__(self, name, tuple(value))
        if not isinstance(self.validate, bool):
            raise OptionError("ignored_scope.validate", f"{self.validate!r} is not true or false", "Write true or false")
        self.rules()

    def rules(self) -> tuple[Rule, ...]:
        """All entries as rules. OptionError: one is empty or a broken regular expression."""
        texts = [*self.names, *(REGEX + entry for entry in self.patterns), *(TYPE + entry for entry in self.types)]
        return tuple(Rule(text) for text in texts)

    def __add__(self, other: IgnoredScope) -> IgnoredScope:
        """Both scopes' entries; validated if one of them is."""
        return IgnoredScope(
            (*self.names, *other.names), (*self.patterns, *other.patterns), (*self.types, *other.types), self.validate or other.validate
        )

    @classmethod
    def parse(cls, value: object) -> IgnoredScope:
        """From a scope, a mapping of its fields, or a list of rules with prefixes. OptionError otherwise."""
        if isinstance(value, cls):
            return value
        if isinstance(value, Mapping):
            known = [entry.name for entry in fields(cls)]
            for key in value:
                if key not in known:
                    raise OptionError(f"ignored_scope.{key}", "no such key", did_you_mean(str(key), known))
            return cls(**value)
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise OptionError("ignored_scope", f"{value!r} is neither a list of rules nor a mapping", "Write a list, even of one rule")
        names = tuple(entry for entry in value if not (isinstance(entry, str) and entry.startswith(TYPE)))
        return cls(names=names, types=tuple(entry.removeprefix(TYPE) for entry in value if entry not in names))
