"""Which layers a user's rules name; a rule that names none or all is a mistake and not obeyed in silence."""

from __future__ import annotations

from collections.abc import Sequence

from llmcomp.errors import RuleError
from llmcomp.graph.layer import Layer
from llmcomp.options import ExportOptions, Override, Rule


def ignored_layers(options: ExportOptions, layers: Sequence[Layer]) -> dict[str, Rule]:
    """Layer name -> the rule of the ignored scope that names it.

    Raises:
        RuleError: a rule names no layer or all of them, or all rules together leave nothing to compress.
    """
    scope = options.ignored_scope
    found: dict[str, Rule] = {}
    for rule in scope.rules():
        for layer in _named(rule, layers, "ignored scope", scope.validate):
            found.setdefault(layer.name, rule)
    if found and len(found) == len(layers):
        raise RuleError(
            "ignored scope",
            "its rules together match every layer, so nothing would be compressed",
            "Narrow them, or use --weight-format fp16",
        )
    return found


def overridden_layers(options: ExportOptions, layers: Sequence[Layer]) -> dict[str, Override]:
    """Layer name -> its override; the last that names it.

    Raises:
        RuleError: an override names no layer, or all of them.
    """
    return {layer.name: override for override in options.overrides for layer in _named(override.rule, layers, "override", True)}


def _named(rule: Rule, layers: Sequence[Layer], what: str, validate: bool) -> list[Layer]:
    found = [layer for layer in layers if rule.matches(_names(layer), layer.ops)]
    if not found and validate:
        near = rule.near([name for layer in layers for name in _names(layer)], sorted({op for layer in layers for op in layer.ops}))
        hint = f"Did you mean {' or '.join(near)}?" if near else "`llmcomp plan` lists the layers' names"
        raise RuleError(f"{what} '{rule.text}'", "it matches no layer", hint)
    if len(found) == len(layers) > 1:
        raise RuleError(f"{what} '{rule.text}'", f"it matches all {len(found)} layers", "Narrow it; --weight-format speaks for all layers")
    return found


def _names(layer: Layer) -> tuple[str, ...]:
    return (layer.name, layer.tensor, *layer.nodes)
