"""Whether the Hugging Face hub can be asked, known within seconds: its clients retry for a minute before they say so."""

from __future__ import annotations

import os
import re
import ssl
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from llmcomp.judge.errors import JudgeError

ASK_SECONDS = 4.0
REMEDY = "Check the network, or give a local one; what is in the hub client's cache works offline."


def is_hub_id(source: str) -> bool:
    """NAME or OWNER/NAME, as the hub allows them."""
    return re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", source) is not None


def trouble() -> str | None:
    """Why the hub cannot be asked; None if it answers, whatever it answers."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return "the hub is not asked (HF_HUB_OFFLINE)"
    found: list[str | None] = []
    # A daemon: looking up a name has no time limit of its own.
    thread = threading.Thread(target=lambda: found.append(_ask()), daemon=True)
    thread.start()
    thread.join(ASK_SECONDS)
    reason = found[0] if found else f"no answer within {ASK_SECONDS:g} s"
    return f"the hub cannot be reached ({reason})" if reason else None


def _ask() -> str | None:
    request = urllib.request.Request(os.environ.get("HF_ENDPOINT", "https://huggingface.co"), method="HEAD")
    try:
        urllib.request.urlopen(request, timeout=ASK_SECONDS).close()
    except urllib.error.HTTPError:
        return None
    except urllib.error.URLError as error:
        # Certificates: the hub's client has its own bundle and may well succeed.
        return None if isinstance(error.reason, ssl.SSLError) else str(error.reason)
    except (OSError, ValueError) as error:
        return str(error) or type(error).__name__
    return None


def require_cached(repo: str, file: str, reason: str, what: str) -> None:
    """Raises JudgeError unless `file` of the repository is in the hub client's cache, where the hub cannot be asked for `reason`."""
    import huggingface_hub

    if not isinstance(huggingface_hub.try_to_load_from_cache(repo, file), str):
        raise JudgeError(f"{what} {repo}: no such folder; {reason}, and it is not in the cache. {REMEDY}")


@contextmanager
def offline() -> Iterator[None]:
    """The hub's client and `datasets` look into their cache alone; both read the environment only when they are imported."""
    import datasets
    import huggingface_hub

    places: list[Any] = [huggingface_hub.constants, datasets.config]
    before = [place.HF_HUB_OFFLINE for place in places]
    try:
        for place in places:
            place.HF_HUB_OFFLINE = True
        yield
    finally:
        for place, value in zip(places, before, strict=True):
            place.HF_HUB_OFFLINE = value
