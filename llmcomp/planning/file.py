"""JSON files with one layer a line, which people read, compare, edit and feed back."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Protocol, TypeVar

from pydantic import BaseModel, ValidationError

from llmcomp.errors import OptionError
from llmcomp.graph.layer import Layer
from llmcomp.options.rules import near


class Entry(Protocol):
    """A line about one layer."""

    @property
    def name(self) -> str: ...
    @property
    def tensor(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


File = TypeVar("File", bound=BaseModel)


def to_json(model: BaseModel) -> str:
    """`model` has `layers`: one of them a line, so that a diff of two files reads."""
    head = model.model_dump(mode="json", exclude={"layers"})
    lines = ",\n".join("  " + json.dumps(layer) for layer in model.model_dump(mode="json", include={"layers"})["layers"])
    body = json.dumps(head, indent=1)[:-2]
    return f'{body},\n "layers": [\n{lines}\n ]\n}}\n'


def from_json(kind: type[File], version: int, text: str, where: str, command: str) -> File:
    """A file that `llmcomp COMMAND` writes. `kind` has `version` and `layers`.

    Raises:
        OptionError: not JSON, an unknown key, a value of the wrong kind, another version, two lines for one layer.
    """
    again = f"rite it anew with `llmcomp {command}`"
    try:
        model: Any = kind.model_validate(json.loads(text))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(p) for p in first["loc"]) or "its top"
        raise OptionError(where, f"{place}: {first['msg']}", f"Mend the file, or w{again}") from None
    except (ValueError, RecursionError) as error:
        raise OptionError(where, f"it is not JSON ({error})", f"Mend the file, or w{again}") from None
    if model.version != version:
        raise OptionError(where, f"it has version {model.version}, this llmcomp reads {version}", f"W{again}")
    name, count = Counter(entry.name for entry in model.layers).most_common(1)[0] if model.layers else ("", 0)
    if count > 1:
        raise OptionError(f"{where}, layer {name}", f"it stands there {count} times", "Leave one of the lines")
    return model


def check_known(entries: Iterable[Entry], layers: Sequence[Layer], where: str, what: str) -> None:
    """Every line is about one of these layers, of this tensor and shape.

    Raises:
        OptionError: another one; `what` the file is, for the remedy.
    """
    known = {layer.name: layer for layer in layers}
    for entry in entries:
        place = f"{where}, layer {entry.name}"
        if entry.name not in known:
            found = near(entry.name, known)
            remedy = f"Did you mean {' or '.join(found)}?" if found else f"This {what} is for another model"
            raise OptionError(place, "the model has no such layer", remedy)
        layer = known[entry.name]
        for said, true in ((list(entry.shape), list(layer.shape)), (entry.tensor, layer.tensor)):
            if said != true:
                raise OptionError(place, f"it says {said}, the model has {true}", f"This {what} is for another model")
