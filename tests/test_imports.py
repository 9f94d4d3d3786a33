"""The arrows between rooms, and what importing a room must not load."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "llmcomp"

ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "heap": set(),
    "imports": set(),
    "progress": set(),
    "threads": set(),
    "options": {"errors"},
    "formats": {"errors"},
    "kernels": {"formats", "errors"},
    "checkpoint": {"errors", "formats"},
    "graph": {"checkpoint", "errors", "imports"},
    "calibration": {"graph", "kernels", "options", "checkpoint", "errors", "imports", "threads"},
    "planning": {"formats", "graph", "calibration", "options", "errors"},
    "algorithms": {"formats", "errors"},
    "writing": {"formats", "graph", "checkpoint", "planning", "options", "pages", "errors", "imports"},
    "fitting": {"algorithms", "formats", "graph", "planning"},
    "folding": {"algorithms", "graph", "planning"},
    "permuting": {"algorithms", "folding", "graph", "planning"},
    "solving": {"algorithms", "formats", "kernels", "planning", "threads"},
    "adapting": {"algorithms", "formats", "planning", "solving"},
    "calibrating": {"adapting", "algorithms", "calibration", "errors", "fitting", "formats", "graph", "planning", "solving", "threads"},
    "budgeting": {"errors", "folding", "graph", "options", "planning", "writing"},
    "running": {"calibration", "progress"},
    "preparing": {"calibration", "checkpoint", "errors", "graph", "inspect", "kernels", "options", "planning", "running", "writing"},
    "deciding": {
        *("algorithms", "budgeting", "calibration", "errors", "folding", "graph", "kernels", "measuring"),
        *("options", "planning", "preparing", "running", "writing"),
    },
    "compressing": {
        *("algorithms", "calibrating", "calibration", "errors", "fitting", "folding", "formats", "graph", "kernels"),
        *("permuting", "planning", "preparing", "running", "threads", "writing"),
    },
    "forecasting": {"calibration", "graph", "planning", "writing"},
    "foreseeing": {"checkpoint", "forecasting", "formats", "graph", "options", "planning", "training", "writing"},
    "starting": {"compressing", "errors", "formats", "graph", "planning", "training"},
    "teaching": {"calibration", "checkpoint", "errors", "options", "progress", "running", "training"},
    "training": {"checkpoint", "errors", "formats", "graph", "options"},
    "measuring": {"algorithms", "calibration", "errors", "graph", "planning", "solving"},
    "judging": {"judge", "checkpoint", "errors", "progress"},
    "judge": set(),
    "comparison": {"judge", "inspect", "pages", "errors"},
    "pages": set(),
}
"""Room -> rooms that it may import. cli and the entry paths may import every room."""

ENTRY = {"distilling", "export", "compress", "inspect", "cli", "__init__", "__main__"}
TORCH = {"torch", "transformers", "optimum", "accelerate", "openvino_tokenizers"}
TORCH_FILES = {
    "graph/trace.py",
    "graph/conversions.py",
    "calibration/convert.py",
    "writing/tokenizer.py",
    "graph/bounds.py",
    "judge/hf_reference.py",
}
"""Child processes: with `training/` the only files that may import torch and what brings it, anywhere in them."""
LIGHT = {"cli/optimum.py", "judge/tokens.py"}
"""optimum's command base class imports no torch; a judged model without tokenizer.json needs transformers' tokenizer."""


def modules(path: Path) -> list[str]:
    """Dotted names that a file imports, at any depth; `from llmcomp import x` counts as llmcomp.x."""
    names = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf8"))):
        if isinstance(node, ast.Import):
            names += [a.name for a in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names += [f"llmcomp.{a.name}" for a in node.names] if node.module == "llmcomp" else [node.module]
    return names


FILES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_arrows(path: Path) -> None:
    here = path.relative_to(PACKAGE)
    room = here.parts[0].removesuffix(".py")
    if room in ENTRY:
        return
    assert room in ALLOWED, f"{room} is not a room of the table"
    for name in modules(path):
        if name.startswith("llmcomp."):
            target = name.split(".")[1]
            assert target == room or target in ALLOWED[room] or target == "__version__", f"{here} imports {name}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_torch_stays_in_the_children(path: Path) -> None:
    here = path.relative_to(PACKAGE).as_posix()
    found = {name for name in modules(path) if name.split(".")[0] in TORCH}
    assert not found or here in TORCH_FILES | LIGHT or here.startswith("training/"), f"{here} imports {sorted(found)}"


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("llmcomp", ("numpy", "torch", "openvino", "matplotlib")),
        ("llmcomp.options.modes", ("numpy", "torch")),
        ("llmcomp.cli", ("torch", "openvino", "transformers", "matplotlib")),
        ("llmcomp.formats", ("torch", "openvino")),
        ("llmcomp.checkpoint", ("torch", "transformers", "openvino")),
        ("llmcomp.calibration", ("torch", "transformers", "openvino", "datasets", "pyarrow")),
        ("llmcomp.export", ("torch", "transformers", "optimum", "matplotlib")),
    ],
)
def test_lean_import(module: str, absent: tuple[str, ...]) -> None:
    code = f"import sys, {module}; print([m for m in {absent!r} if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert found == "[]"


@pytest.mark.parametrize("folder", sorted({p.parent for p in FILES if p.parent != PACKAGE}), ids=lambda p: p.name)
def test_every_room_says_what_it_is(folder: Path) -> None:
    doc = ast.get_docstring(ast.parse((folder / "__init__.py").read_text(encoding="utf8"))) or ""
    lines = [line.split(":")[0] for line in doc.strip().splitlines()[-4:]]
    assert lines == ["comes in", "goes out", "may import", "read first"]
