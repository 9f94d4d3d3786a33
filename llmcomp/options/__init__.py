"""What a user can say: the option table, the validated options, recipes, and rules that name layers.

comes in: command-line values, a recipe in YAML, or keyword arguments
goes out: ExportOptions, IgnoredScope, PruneMode, QuantizationPreset
may import: errors
read first: table.py
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llmcomp.options.export_options import ExportOptions
    from llmcomp.options.modes import PruneMode, QuantizationPreset, StripFormat
    from llmcomp.options.recipe import build, command_line, explained, load_recipe, recipes
    from llmcomp.options.rules import Override, Rule
    from llmcomp.options.scope import IgnoredScope

__all__ = [
    "ExportOptions",
    "IgnoredScope",
    "Override",
    "PruneMode",
    "QuantizationPreset",
    "Rule",
    "StripFormat",
    "build",
    "command_line",
    "explained",
    "load_recipe",
    "recipes",
]

_HOMES = {
    "ExportOptions": "export_options",
    "IgnoredScope": "scope",
    "Override": "rules",
    "PruneMode": "modes",
    "QuantizationPreset": "modes",
    "Rule": "rules",
    "StripFormat": "modes",
    "build": "recipe",
    "command_line": "recipe",
    "explained": "recipe",
    "load_recipe": "recipe",
    "recipes": "recipe",
}


def __getattr__(name: str) -> Any:
    # Imported on first use: the option table must not drag pydantic into `--help` and into every start of optimum-cli.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
