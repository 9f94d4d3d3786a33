"""Chat templates, rendered as transformers does it, but without transformers and torch, and without the clock."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from llmcomp.errors import CalibrationError, TokenizerError

TODAY = datetime(2025, 1, 1)
"""For templates that ask for the date: the same data gives the same tokens on every day."""
REMEDY = "Give texts instead of messages, or add the template of the model to its folder"


class Template:
    """The chat template of a folder: chat_template.jinja, else chat_template.json, else the one in tokenizer_config.json.

    Raises:
        CalibrationError: there is none, or none that jinja understands.
    """

    def __init__(self, folder: Path) -> None:
        config = read_json(folder / "tokenizer_config.json")
        source = _source(folder, config)
        if source is None:
            raise CalibrationError(str(folder), "its tokenizer has no chat template, which turns messages into text", REMEDY)
        self._tokens = _special_tokens({**read_json(folder / "special_tokens_map.json"), **config})
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise CalibrationError(str(folder), f"its chat template is broken ({error})", REMEDY) from None

    def render(self, messages: Sequence[Mapping[str, Any]], where: str, asks: bool = False) -> str:
        """The text of a conversation, special tokens spelled out; with `asks` the beginning of an answer comes last.

        Raises:
            CalibrationError: the template refuses it; `where` is the thing.
        """
        try:
            return self._template.render(messages=messages, tools=None, documents=None, add_generation_prompt=asks, **self._tokens)
        except Exception as error:  # templates run code of their own, which fails in many ways
            raise CalibrationError(
                where, f"the model's chat template refuses it ({error})", "Mend the messages, or take them out"
            ) from None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; empty if there is no such file.

    Raises:
        TokenizerError: something else is in it.
    """
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf8"))
    except (ValueError, RecursionError) as error:
        raise TokenizerError(str(path), f"it is not JSON ({error})", "Download or copy the file again") from None
    if not isinstance(value, dict):
        raise TokenizerError(str(path), "it is not a JSON object", "Download or copy the file again")
    return value


def _source(folder: Path, config: Mapping[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf8")
        except UnicodeDecodeError as error:
            raise CalibrationError(str(path), f"it is not UTF-8 ({error})", REMEDY) from None
    found = read_json(folder / "chat_template.json").get("chat_template") or config.get("chat_template")
    if isinstance(found, list):
        # Several by name: one for tools, say.
        found = next((t.get("template") for t in found if isinstance(t, dict) and t.get("name") == "default"), None)
    return found if isinstance(found, str) else None


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """bos_token, eos_token and so on, as templates name them."""
    tokens = {k: v.get("content") if isinstance(v, dict) else v for k, v in config.items() if k.endswith("_token")}
    return {k: v for k, v in tokens.items() if isinstance(v, str)}


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks what the assistant says for training; its content is text like any other."""

    tags = {"generation"}  # noqa: RUF012 as jinja declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals.update(raise_exception=_refuse, strftime_now=TODAY.strftime)
    return environment


def _tojson(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False) -> str:
    """jinja's own escapes what HTML would misread."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)
