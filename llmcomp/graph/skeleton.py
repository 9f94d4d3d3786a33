"""Skeletons: the IRs of a model without weights, one for each submodel, traced once in a child process and cached.

They serve any checkpoint with the same config, tensor headers and versions whose *real* tensors (those that the trace took
by value: norms, biases, tables) have the same bytes, so a fine-tune never gets another's norms.
"""

from __future__ import annotations

import errno
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
from llmcomp.graph.bounds import check_sizes, one_line, seconds

VERSIONED = ("llmcomp", "openvino", "optimum", "optimum-intel", "transformers", "torch")
"""Packages whose version shapes the traced graph."""


FORMAT = 2
"""Of what is kept in the cache; another one does not find it."""
MANIFEST, CONFIG, XML, BIN, EXAMPLE = "manifest.json", "config.json", "skeleton.xml", "skeleton.bin", "example.npz"


@dataclass(frozen=True)
class Skeleton:
    """A traced architecture, or a submodel of one: `folder` holds skeleton.xml and skeleton.bin."""

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
    name: str = "openvino_model"
    """Of the files that it becomes; the exporter has other ones than this where a model is exported as several submodels."""

    @property
    def xml(self) -> Path:
        return self.folder / XML

    @property
    def bin(self) -> Path:
        return self.folder / BIN

    @property
    def example(self) -> Path:
        """Inputs, by name, that the submodel was traced with."""
        return self.folder / EXAMPLE

    @property
    def config(self) -> Path | None:
        """The config that a model of several submodels needs in place of the checkpoint's."""
        path = self.folder.parent / CONFIG
        return path if path.is_file() else None


def cache_root() -> Path:
    """`LLMCOMP_CACHE`, else the user's cache folder of this platform."""
    return Path(os.environ.get("LLMCOMP_CACHE") or platformdirs.user_cache_dir("llmcomp")) / "skeletons"


def get_skeletons(checkpoint: Checkpoint, task: str = "auto", trust_remote_code: bool = False) -> tuple[Skeleton, ...]:
    """The skeletons of `checkpoint`, from the cache or traced now: one, or one for each of its submodels.

    Raises:
        ArchitectureError: unknown architecture or task, or tensors under other names than the architecture's.
    """
    check_sizes(checkpoint)
    home = cache_root() / _key(checkpoint, task, trust_remote_code)
    if home.is_dir():
        for folder in sorted(home.iterdir()):
            skeletons = _load(folder, cached=True)
            if skeletons and folder.name == _real_hash(checkpoint, skeletons[0].real):
                return skeletons
    home.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=".trace-", dir=home))
    try:
        _run_child(checkpoint, task, trust_remote_code, work)
        skeletons = _load(work, cached=False)
        if not skeletons:
            raise errors.ArchitectureError(checkpoint.source, "the tracing process left no skeleton", "Report this with the output above.")
        final = home / _real_hash(checkpoint, skeletons[0].real)
        if not final.exists():
            work.replace(final)
        return _load(final, cached=False) or skeletons
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
    code, output = _spawn(out / "job.json", seconds(checkpoint))
    try:
        answer = json.loads((out / MANIFEST).read_text(encoding="utf8"))
    except (OSError, ValueError):
        # The process was ended before it had written all of it.
        told = f"the process ended with code {code}" if code is not None else f"it took more than {seconds(checkpoint):g} s"
        answer = {"error": "crash", "thing": told, "reason": output}
    if "error" in answer:
        if os.strerror(errno.ENOSPC) in answer["reason"]:
            raise errors.DiskSpaceError(
                str(out.parent), "the disk of the cache took no more", "Free some disk, or set LLMCOMP_CACHE to a folder with room"
            )
        kind = getattr(errors, answer["error"], None)
        if kind is not None:
            raise kind(answer["thing"], answer["reason"], answer["remedy"])
        if os.environ.get("LLMCOMP_DEBUG"):
            print(answer["reason"], file=sys.stderr)
        raise errors.ArchitectureError(
            f"{checkpoint.source}: tracing failed",
            one_line(answer["thing"]),
            "Check config.json against the weights; with LLMCOMP_DEBUG=1 in the environment the whole traceback is shown",
        )


def _spawn(job: Path, limit: float) -> tuple[int | None, str]:
    """Trace in a process of its own, for `limit` seconds at most: (exit code, None if it took longer; what it printed)."""
    env = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    command = [sys.executable, "-m", "llmcomp.graph.trace", str(job)]
    try:
        child = subprocess.run(
            command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", timeout=limit
        )
    except subprocess.TimeoutExpired:
        return None, ""
    return child.returncode, child.stdout


def _load(folder: Path, cached: bool) -> tuple[Skeleton, ...]:
    """Empty if the folder does not hold all of them."""
    manifest = folder / MANIFEST
    if (folder.name.startswith(".trace-") and cached) or not manifest.is_file():
        return ()
    m = json.loads(manifest.read_text(encoding="utf8"))
    if not all((folder / one["name"] / XML).is_file() for one in m["models"]):
        return ()
    return tuple(
        Skeleton(
            folder / one["name"], m["task"], m["model_type"], tuple(one["weights"]), tuple(m["real"]), m["fallback"], cached, one["name"]
        )
        for one in m["models"]
    )


def _key(checkpoint: Checkpoint, task: str, trust: bool) -> str:
    headers = [(t.name, t.dtype, list(t.shape)) for t in checkpoint.tensors.values()]
    versions = {name: version(name) for name in VERSIONED}
    code = []
    if trust and checkpoint.folder is not None:
        code = [(p.name, p.read_text(encoding="utf8")) for p in sorted(checkpoint.folder.glob("*.py"))]
    return _digest([FORMAT, checkpoint.config, sorted(headers), task, versions, code])


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
