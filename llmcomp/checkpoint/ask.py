"""Asking the hub: an answer within seconds or none, and which failures are the network's."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

ASK_SECONDS = 4.0
"""How long the hub may take to answer the first question; an export must not hang before it has begun."""


def within(seconds: float, ask: Callable[[], Any]) -> Any:
    """The answer of `ask`, or TimeoutError. The client's own limit starts anew for each address of the hub, and not before its name is found."""
    answer: list[Any] = []
    trouble: list[Exception] = []

    def run() -> None:
        try:
            answer.append(ask())
        except Exception as error:
            trouble.append(error)

    # A daemon: a question that hangs must not keep the process from ending.
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if trouble:
        raise trouble[0]
    if not answer:
        raise TimeoutError(f"no answer within {seconds:g} s")
    return answer[0]


def is_network(error: Exception) -> bool:
    """Also the disk: OSError. The client's HTTP library, which has changed once, has its own hierarchy."""
    from huggingface_hub import errors

    foreign = type(error).__module__.split(".")[0] in ("httpx", "httpcore", "requests", "urllib3")
    return foreign or isinstance(error, (errors.HfHubHTTPError, errors.LocalEntryNotFoundError, OSError))


def tell(error: Exception) -> str:
    status = getattr(getattr(error, "response", None), "status_code", None)
    lines = str(error).strip().splitlines()
    return f"it answers {status}" if status else (lines[0][:200] if lines else type(error).__name__)
