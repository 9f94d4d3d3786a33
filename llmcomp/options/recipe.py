"""Recipes: options in a YAML file, one story each; and options put together from a recipe and the command line."""

from __future__ import annotations

import shlex
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any

import yaml

from llmcomp.errors import OptionError
from llmcomp.options.export_options import BUDGETS, ExportOptions
from llmcomp.options.rules import did_you_mean
from llmcomp.options.scope import IgnoredScope
from llmcomp.options.table import BY_FIELD, EXPORT

_PACKAGE = Path(__file__).parent.parent
# In a wheel the recipes lie inside the package, in a checkout beside it.
FOLDERS = (_PACKAGE / "configs", _PACKAGE.parent / "configs")


class _Loader(yaml.SafeLoader):
    """A second value for a key would replace the first in silence; here it is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"'{key.value}' is given twice", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def recipes() -> dict[str, Path]:
    """Shipped recipes by name."""
    return {path.stem: path for folder in reversed(FOLDERS) if folder.is_dir() for path in sorted(folder.glob("*.yaml"))}


def load_recipe(name: str) -> dict[str, Any]:
    """Options of a recipe, by field name. `name` is a path, or the name of a shipped recipe.

    OptionError: no such recipe, not YAML, not a mapping, an unknown key or one that does not belong into a recipe.
    """
    path = Path(name) if Path(name).is_file() else recipes().get(name)
    if path is None:
        raise OptionError(f"recipe '{name}'", "neither a file nor a shipped recipe", did_you_mean(name, recipes()))
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise OptionError(f"recipe '{path}'", f"not YAML ({' '.join(str(error).split())})", "Mend the file") from None
    if content is None:
        return {}
    if not isinstance(content, Mapping):
        raise OptionError(f"recipe '{path}'", "it is not a mapping of option names to values", "Write lines such as `group_size: 64`")
    return {_field(str(key), path): value for key, value in content.items()}


def _field(key: str, path: Path) -> str:
    field = key.replace("-", "_")
    option = BY_FIELD.get(field)
    if option is None:
        possible = [name for name, entry in BY_FIELD.items() if entry.in_recipe]
        raise OptionError(f"recipe '{path}'", f"no such option as '{key}'", did_you_mean(field, possible))
    if not option.in_recipe:
        raise OptionError(
            f"recipe '{path}'",
            f"'{key}' is a matter of one run, not of a recipe",
            f"Say {(*option.flags, key.upper())[0]} on the command line",
        )
    return field


def build(given: Mapping[str, Any]) -> ExportOptions:
    """Options from what the command line gave, the recipe that `recipe` or `quality` names being read first if there is one.

    The command line's value replaces the recipe's; ignored scopes and overrides follow the recipe's, so that the last
    rule, which wins, is the command line's. A budget, or a ratio, replaces the recipe's budget of whatever kind.
    """
    values: dict[str, Any] = {}
    named = [field for field in ("recipe", "quality") if given.get(field) is not None]
    if len(named) > 1:
        raise OptionError("--quality", "it is a recipe, and --recipe names another", "Leave one of them out")
    if named:
        values = _named(f"--{named[0]}", str(given[named[0]]))
    if any(given.get(field) is not None for field in (*BUDGETS, "ratio")):
        values = {field: value for field, value in values.items() if field not in BUDGETS}
    merged = {**values, **given}
    if "ignored_scope" in values and "ignored_scope" in given:
        merged["ignored_scope"] = IgnoredScope.parse(values["ignored_scope"]) + IgnoredScope.parse(given["ignored_scope"])
    if isinstance(values.get("override"), list) and "override" in given:
        merged["override"] = [*values["override"], *given["override"]]
    try:
        return ExportOptions(**merged)
    except OptionError as error:
        raise explained(error, given.get("quality"), given.get("recipe")) from None


def command_line(options: ExportOptions) -> str:
    """The command that gives these options, ready for a shell; a token is left out, texts that were given as such are counted."""
    words = ["llmcomp", "export", options.model, str(options.output)]
    # What a recipe has brought is among the values.
    left_out = {"model", "output", "token", "resume", "recipe", "quality"}
    for field, value in options.model_dump(mode="json", exclude=left_out, exclude_defaults=True).items():
        # pydantic keeps a default that has a serializer of its own.
        if value is None or EXPORT not in BY_FIELD[field].commands:
            continue
        flag = BY_FIELD[field].flags[0]
        if isinstance(value, bool):
            words.append(flag if value else f"--no-{flag[2:]}")
        elif isinstance(value, dict):
            words += [word for text in options.ignored_scope.rules() for word in (flag, text.text)]
        else:
            words += [word for one in (value if isinstance(value, list) else [value]) for word in (flag, str(one))]
    return shlex.join(words)


def explained(error: OptionError, quality: str | None, recipe: str | None) -> OptionError:
    """The error, which says where an option that it names comes from if nobody typed it."""
    if quality is None and recipe is None:
        return error
    flag, name = ("--quality", quality) if quality is not None else ("--recipe", recipe)
    words = {word.strip(":,.") for word in str(error).split()}
    brought = [own for field in _named(flag, str(name)) for own in BY_FIELD[field].flags[:1] if own in words]
    if not brought:
        return error
    return type(error)(error.thing, f"{error.reason.rstrip('.')} ({flag} {name} brings {', '.join(brought)})", error.remedy)


def _named(flag: str, name: str) -> dict[str, Any]:
    """What a recipe says. A quality is never a file that happens to be called so."""
    return load_recipe(str(recipes().get(name, name)) if flag == "--quality" else name)
