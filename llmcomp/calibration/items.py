"""What every kind of source is read as: a stream of texts and chats; and how a record with columns becomes one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from llmcomp.errors import CalibrationError

TEXT, MESSAGES = "text", "messages"
"""The columns that are looked for, in this order."""


@dataclass(frozen=True)
class Text:
    """A document, or a piece of one."""

    content: str
    begins: bool = True
    """Whether a document begins here."""


@dataclass(frozen=True)
class Chat:
    messages: list[dict[str, Any]]
    where: str
    """For error messages: the file and the line."""


Item = Text | Chat
Record = tuple[str, Mapping[str, Any]]
"""(where, columns)."""


def choose_column(where: str, columns: Iterable[str], asked: str | None) -> str:
    """The asked column, else text, else messages.

    Raises:
        CalibrationError: there is no such one; the message lists those that there are.
    """
    columns = list(columns)
    found = next((c for c in ([asked] if asked else [TEXT, MESSAGES]) if c in columns), None)
    if found is None:
        wanted = f"column {asked!r}" if asked else f"column {TEXT!r} or {MESSAGES!r}"
        raise CalibrationError(
            where, f"no {wanted} among {', '.join(map(str, columns)) or 'none at all'}", "Name one with --dataset-column"
        )
    return found


def items(records: Iterable[Record], asked: str | None) -> Iterator[Item]:
    """The texts or chats in one column of all records, which the first record decides. Blank texts, nulls and chats without a message are left out.

    Raises:
        CalibrationError: a record without that column, or with something else in it.
    """
    column = asked
    for where, record in records:
        if column is None or column not in record:
            column = choose_column(where, record, column)
        item = _item(record[column], where, column)
        if item is not None:
            yield item


def _item(value: Any, where: str, column: str) -> Item | None:
    if value is None or value == []:
        return None
    if isinstance(value, str):
        check_text(value, where)
        text = value.strip("\r\n")
        return Text(text) if text.strip() else None
    if isinstance(value, list) and all(_is_message(m) for m in value):
        # Tables have every key in every message, null where a message has no such thing.
        return Chat([{k: v for k, v in m.items() if v is not None or k == "content"} for m in value], where)
    kind = "a list of something else" if isinstance(value, list) else f"of type {type(value).__name__}"
    raise CalibrationError(
        where, f"column {column!r} is neither a text nor a list of messages with role and content, but {kind}", "Mend the data"
    )


def _is_message(value: Any) -> bool:
    """A role, and a content: text, parts, or none beside something else that is said, as in a call of a tool."""
    if not isinstance(value, Mapping) or not isinstance(value.get("role"), str):
        return False
    content = value.get("content")
    others = [key for key, one in value.items() if key not in ("role", "content") and one is not None]
    return isinstance(content, str | list) or (content is None and bool(others))


def check_text(text: str, where: str) -> None:
    """Refuse halves of characters, as broken escapes in JSON make them.

    Raises:
        CalibrationError: with `where` as the thing.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise CalibrationError(
            where, f"character {error.start} of its text is half of one ({text[error.start]!a})", "Mend the escape"
        ) from None
