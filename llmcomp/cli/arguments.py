"""The option table as argparse arguments, and argparse's result as options."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmcomp.errors import OutputError
from llmcomp.options.table import OPTIONS, Option

if TYPE_CHECKING:
    from llmcomp.options import ExportOptions

TITLES = {"source": "source", "compression": "compression", "calibration": "calibration", "output": "output", "run": "run"}


def add_arguments(parser: argparse.ArgumentParser, command: str, model_flag: bool = False) -> None:
    """Add the table's options for `command`; with `model_flag` the model is `-m MODEL`, as optimum-cli has it.

    Defaults are left out of the result, so that a recipe can tell what was given.
    """
    groups: dict[str, argparse._ArgumentGroup] = {}
    for option in OPTIONS:
        if command not in option.commands:
            continue
        if option.group not in groups:
            groups[option.group] = parser.add_argument_group(TITLES[option.group])
        flags = option.flags
        if option.field == "model" and model_flag:
            flags = ("-m", "--model")
        _add(groups[option.group], option, flags)


def _add(group: argparse._ArgumentGroup, option: Option, flags: tuple[str, ...]) -> None:
    settings: dict[str, Any] = {"help": _help(option)}
    if option.kind == "switch":
        # What a recipe can switch on, the command line can switch off.
        both = option.in_recipe and not option.field.startswith("no_")
        settings |= {"action": argparse.BooleanOptionalAction if both else "store_true", "default": argparse.SUPPRESS}
    else:
        settings["metavar"] = option.metavar or (None if option.choices else option.field.upper())
        if option.choices:
            settings["choices"] = option.choices
            settings.pop("metavar")
        if option.kind == "number":
            settings["type"] = float
        elif option.kind == "integer":
            settings["type"] = int
        elif option.kind == "list":
            settings["action"] = "append"
    if not flags:
        group.add_argument(option.field, **settings)
        return
    settings["dest"] = option.field
    if option.field == "model":
        settings["required"] = True
    else:
        settings["default"] = argparse.SUPPRESS
    group.add_argument(*flags, **settings)


def _help(option: Option) -> str:
    default = option.default_text or ("" if option.default in (None, False) else str(option.default))
    text = option.help.replace("%", "%%")
    return f"{text} Default: {default}." if default else text


def options_of(parsed: argparse.Namespace) -> ExportOptions:
    """ExportOptions of what was given on the command line and in the recipe.

    Raises:
        OptionError: as ExportOptions and recipes do.
    """
    from llmcomp.options import build
    from llmcomp.options.table import BY_FIELD

    return build({field: value for field, value in vars(parsed).items() if field in BY_FIELD})


def check_file(path: Path, overwrite: bool) -> None:
    """A file of layers may have been edited by hand: it is not replaced unasked. Told before the graph is traced."""
    if path.exists() and not (overwrite and path.is_file()):
        raise OutputError(
            str(path), "it exists" if path.is_file() else "it is not a file", "Choose another file, or use --overwrite to replace one"
        )
    if not path.parent.is_dir():
        raise OutputError(str(path), "its folder does not exist", "Make the folder first")
