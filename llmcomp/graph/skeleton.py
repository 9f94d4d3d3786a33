"""The skeleton: an IR without weights, traced once in a child process and cached.

A cached skeleton serves any checkpoint with the same config, tensor headers and versions whose *real* tensors (those that the trace took
by value: norms, biases, tables) have the same bytes, so a fine-tune never gets another's norms.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import platformdirs

from llmcomp import errors
from llmcomp.checkpoint import Checkpoint

VERSIONED = ("llmcomp", "openvino", "optimum", "optimum-intel", "transformers", "torch")
"""Packages whose version shapes the traced graph."""


@dataclass(frozen=True)
class Skeleton:
    """A traced architecture: `folder` holds skeleton.xml, skeleton.bin, config.json and the manifest."""

    folder: Path
    task: str
    model_type: str
    weights: tuple[dict[str, Any], ...]
    """One record per lifted constant: id (name of its Parameter), tensor, constant (its former name), shape; and matrices (`Pieces`) if it is made of
    more than that tensor, whose name is the architecture's then."""
    real: tuple[str, ...]
    """Checkpoint tensors whose values are in skeleton.bin."""
    fallback: str | None
    """Why the model was traced over its mapped weights, None if it was not."""
    cached: bool

    @property
    def xml(self) -> Path:
        return self.folder / "skeleton.xml"

    @property
    def bin(self) -> Path:
        return self.folder / "skeleton.bin"


def cache_root() -> Path:
    """`LLMCOMP_CACHE`, else the user's cache folder of this platform."""
    return Path(os.environ.get("LLMCOMP_CACHE") or platformdirs.user_cache_dir("llmcomp")) / "skeletons"


def get_skeleton(
    checkpoint: Checkpoint,
    task: str = "auto",
    trust_remote_code: bool = False,
) -> Skeleton:
    """The skeleton of `checkpoint`, from the cache or traced now.

    Raises:
        ArchitectureError: unknown architecture or task, or tensors under other names than the architecture's.
    """
    home = cache_root() / _key(checkpoint, task, trust_remote_code)
    if home.is_dir():
        for folder in sorted(home.iterdir()):
            skeleton = _load(folder, cached=True)
            if skeleton and folder.name == _real_hash(checkpoint, skeleton.real):
                return skeleton
    home.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=".trace-", dir=home))
    try:
        _run_child(checkpoint, task, trust_remote_code, work)
        skeleton = _load(work, cached=False)
        if skeleton is None:
            raise errors.ArchitectureError(checkpoint.source, "the tracing process left no skeleton", "Report this with the output above.")
        final = home / _real_hash(checkpoint, skeleton.real)
        if not final.exists():
            work.replace(final)
        return _load(final, cached=False) or skeleton
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _run_child(checkpoint: Checkpoint, task: str, trust: bool, out: Path) -> None:
    job: dict[str, Any] = {
        "source": checkpoint.source,
        "open": {"source": checkpoint.source, **checkpoint.open_arguments},
        "task": task,
        "trust_remote_code": trust,
        "out": str(out),
    }
    (out / "job.json").write_text(json.dumps(job), encoding="utf8")
    env = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    child = subprocess.run(
        [sys.executable, "-m", "llmcomp.graph.trace", str(out / "job.json")],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    manifest = out / "manifest.json"
    answer = (
        json.loads(manifest.read_text(encoding="utf8")) if manifest.exists() else {"error": "crash", "thing": "", "reason": child.stdout}
    )
    if "error" in answer:
        kind = getattr(errors, answer["error"], None)
        if kind is not None:
            raise kind(answer["thing"], answer["reason"], answer["remedy"])
        if os.environ.get("LLMCOMP_DEBUG"):
            print(answer["reason"], file=sys.stderr)
        what = answer["thing"].splitlines()[0] if answer["thing"] else f"the process ended with code {child.returncode}"
        raise errors.ArchitectureError(
            f"{checkpoint.source}: tracing failed",
            what,
            "Check config.json against the weights; with LLMCOMP_DEBUG=1 in the environment the whole traceback is shown",
        )


def _load(folder: Path, cached: bool) -> Skeleton | None:
    manifest = folder / "manifest.json"
    if (folder.name.startswith(".trace-") and cached) or not manifest.is_file() or not (folder / "skeleton.xml").is_file():
        return None
    m = json.loads(manifest.read_text(encoding="utf8"))
    return Skeleton(folder, m["task"], m["model_type"], tuple(m["weights"]), tuple(m["real"]), m["fallback"], cached)


def _key(checkpoint: Checkpoint, task: str, trust: bool) -> str:
    headers = [(t.name, t.dtype, list(t.shape)) for t in checkpoint.tensors.values()]
    versions = {name: version(name) for name in VERSIONED}
    code = []
    if trust and checkpoint.folder is not None:
        code = [(p.name, p.read_text(encoding="utf8")) for p in sorted(checkpoint.folder.glob("*.py"))]
    return _digest([checkpoint.config, sorted(headers), task, versions, code])


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:24]


def _real_hash(checkpoint: Checkpoint, names: tuple[str, ...]) -> str:
    digest = hashlib.sha256()
    for name in names:
        if name not in checkpoint.tensors:
            return "other"
        digest.update(name.encode())
        digest.update(checkpoint.read(name).tobytes())
    return digest.hexdigest()[:24]
