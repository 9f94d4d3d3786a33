"""A Python call leaves the process as it was, in a fresh one that has loaded nothing of ours yet and in one with torch, also when it raises."""

from __future__ import annotations

import json
import locale
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmcomp.imports import TELEMETRY, hide
from tests.tiny import tiny_llama

FRESH = ("export, plain", "export, calibrated", "export that raises, plain")
"""What is called in a process that has not loaded torch; in the other everything is."""
ROOT = Path(__file__).parent.parent
TEXT = "The lamp was lit, and the ferry came in late. " * 60


def state() -> dict[str, Any]:
    """Everything global that a library could change and its user would notice, as values that can be compared."""
    import threadpoolctl

    torch = sys.modules.get("torch")
    numpy_state: Any = np.random.get_state()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGSEGV)}
    libraries = {lib["filepath"]: lib["num_threads"] for lib in threadpoolctl.threadpool_info()}
    found = {
        "random": random.getstate(),
        "numpy": (numpy_state[0], numpy_state[1].tolist(), *numpy_state[2:]),
        "numpy errors": np.geterr(),
        "environment": dict(os.environ),
        "working directory": str(Path.cwd()),
        "umask": (mask := os.umask(0), os.umask(mask))[0],
        "signal handlers": {number: repr(handler) for number, handler in handlers.items()},
        "warning filters": [str(one) for one in warnings.filters],
        "showwarning": repr(warnings.showwarning),
        "root logger": (logging.getLogger().level, [repr(h) for h in logging.getLogger().handlers], logging.root.manager.disable),
        "locale": locale.setlocale(locale.LC_ALL),
        "standard streams": [repr(stream) for stream in (sys.stdout, sys.stderr, sys.stdin)],
        "hooks": [repr(hook) for hook in (sys.excepthook, threading.excepthook)],
        "path": list(sys.path),
        "recursion limit": sys.getrecursionlimit(),
        "affinity": sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "BLAS threads": libraries,
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "children": _children(),
    }
    if torch is not None:
        found["torch random"] = torch.random.get_rng_state().tolist()
        found["torch"] = (
            str(torch.get_default_dtype()),
            torch.is_grad_enabled(),
            torch.get_num_threads(),
            torch.are_deterministic_algorithms_enabled(),
        )
    return found


def _children() -> list[int]:
    import psutil

    return [child.pid for child in psutil.Process().children(recursive=True)]


def changes(call: Callable[[], object]) -> dict[str, Any]:
    """What a call changed. Libraries that it loaded first have thread counts of their own, which nobody has set before."""
    before = state()
    call()
    after = state()
    known = before["BLAS threads"]
    after["BLAS threads"] = {name: count for name, count in after["BLAS threads"].items() if name in known}
    return {key: (before[key], after[key]) for key in before if before[key] != after[key]}


def calls(folder: Path) -> dict[str, Callable[[], object]]:
    """What is called, by name; those that raise return their error."""
    from llmcomp import export as path
    from llmcomp.errors import LlmcompError
    from llmcomp.options import ExportOptions

    data = {"dataset": str(folder / "text.txt"), "num_samples": 4, "sequence_length": 32}
    ways: dict[str, dict[str, Any]] = {
        "plain": {},
        "calibrated": {**data, "awq": True, "gptq": True, "target_correction": True, "lora_correction": True},
    }

    def options(name: str, way: dict[str, Any], **more: Any) -> Any:
        return ExportOptions(
            **{
                "model": str(folder / "m"),
                "output": folder / name,
                "group_size": 32,
                "weight_format": "int4_sym",
                "overwrite": True,
                **way,
                **more,
            }
        )

    def failing(name: str, way: dict[str, Any]) -> object:
        try:
            path.export(options(name, way, model=str(folder / "broken")))
        except LlmcompError as error:
            return error
        raise AssertionError("the broken model was exported")

    def interrupted(name: str, way: dict[str, Any]) -> object:
        with pytest.MonkeyPatch.context() as patch:

            def stop(*_: object, **__: object) -> None:
                raise KeyboardInterrupt

            patch.setattr("llmcomp.writing.stream.BinWriter._finish_layer", stop)
            with pytest.raises(KeyboardInterrupt):
                path.export(options(name, way))
        return None

    found: dict[str, Callable[[], object]] = {}
    for name, way in ways.items():
        found[f"export, {name}"] = lambda name=name, way=way: path.export(options(name, way))
        found[f"export that raises, {name}"] = lambda name=name, way=way: failing(f"{name} broken", way)
        found[f"export that is interrupted, {name}"] = lambda name=name, way=way: interrupted(f"{name} interrupted", way)
        found[f"dry run, {name}"] = lambda name=name, way=way: path.dry_run(options(f"{name} dry", way))
    by_data = {**data, "ratio": 0.5, "sensitivity_metric": "hessian_input_activation"}
    found["plan"] = lambda: path.plan_model(options("p", by_data, output=None))
    found["measure"] = lambda: path.measure_model(options("p", {**data, "candidates": ("int4_sym:32",)}, output=None))
    return found


def main(folder: Path, with_torch: bool) -> None:
    """In a process of its own: changes of each call, as JSON."""
    if with_torch:
        import torch

        # None of these is what torch begins with.
        torch.set_default_dtype(torch.float64)
        torch.set_grad_enabled(False)
        torch.set_num_threads(1)
        torch.manual_seed(3)
    random.seed(1)
    np.random.seed(2)
    os.environ["LLMCOMP_CACHE"] = str(folder / "cache")
    # OpenVINO's own import starts a thread and a process that send telemetry, whoever imports it.
    hide(TELEMETRY)
    os.chdir(folder)
    found = {}
    first = state()
    for name, call in calls(folder).items():
        if not with_torch and name not in FRESH:
            continue
        if changed := changes(call):
            found[name] = {key: [repr(value)[:2000] for value in pair] for key, pair in changed.items()}
    last = state()
    found["all together"] = {
        key: [repr(first[key])[:2000], repr(last[key])[:2000]] for key in first if key != "BLAS threads" and first[key] != last[key]
    }
    print("RESULT" + json.dumps({key: value for key, value in found.items() if value}))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, one with a NaN, and text."""
    from tests.tiny import save_shards

    folder = tmp_path_factory.mktemp("effects")
    tensors = tiny_llama(folder / "m")
    tiny_llama(folder / "broken")
    bad = tensors["model.layers.1.mlp.up_proj.weight"].copy()
    bad[3, 5] = np.nan
    save_shards(folder / "broken", {**tensors, "model.layers.1.mlp.up_proj.weight": bad})
    (folder / "text.txt").write_text(TEXT, encoding="utf8")
    return folder


@pytest.mark.parametrize("with_torch", [False, True], ids=["fresh", "torch"])
def test_a_call_leaves_the_process_as_it_was(folder: Path, with_torch: bool) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.test_side_effects", str(folder), str(int(with_torch))], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
    assert json.loads(line.removeprefix("RESULT")) == {}


def test_a_change_would_be_seen() -> None:
    def meddle() -> None:
        random.random()
        np.random.random()
        os.environ["LLMCOMP_TEST"] = "1"
        warnings.simplefilter("ignore")
        logging.getLogger().setLevel(5)

    level, filters = logging.getLogger().level, warnings.filters[:]
    try:
        assert {"random", "numpy", "environment", "warning filters", "root logger"} <= changes(meddle).keys()
    finally:
        logging.getLogger().setLevel(level)
        warnings.filters[:] = filters  # type: ignore[index]
        del os.environ["LLMCOMP_TEST"]


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2] == "1")
