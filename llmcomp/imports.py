"""Keeping packages out of a process that would import them and not need them.

comes in: names of packages
goes out: a process in which they cannot be found
may import: nothing
read first: this file
"""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import ModuleSpec

TELEMETRY = "openvino_telemetry"
"""OpenVINO's import sends an event over the network with it, and without a network the process ends a second later."""


def hide(*packages: str) -> None:
    """Make optional packages look as if they were not installed; their users then do without. Only for a process of our own."""
    find = importlib.util.find_spec

    def find_spec(name: str, package: str | None = None) -> ModuleSpec | None:
        return None if name.split(".")[0] in packages else find(name, package)

    importlib.util.find_spec = find_spec
    if TELEMETRY in packages:
        sys.modules.setdefault(TELEMETRY, None)  # type: ignore[arg-type]
