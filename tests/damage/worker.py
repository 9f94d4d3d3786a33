"""Runs plans and exports of damaged sources, each in a process of its own (`python -m tests.damage.worker JOBS`).

A trace's child process spends its first seconds importing torch, transformers and optimum. Here they are imported once, and each child is a fork:
the same code runs in it, some ten times sooner. One request a line comes in, one answer a line goes out.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SECONDS = 60
"""What a case may take."""


def run(requests: list[dict[str, Any]], jobs: int) -> Iterator[dict[str, Any]]:
    """Answers in the order in which they come; one that kills its process is answered for."""
    command = [sys.executable, "-m", "tests.damage.worker", str(jobs)]
    worker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert worker.stdin is not None and worker.stdout is not None
    with worker:
        worker.stdin.write("".join(json.dumps(request) + "\n" for request in requests))
        worker.stdin.close()
        for line in worker.stdout:
            yield json.loads(line)
    assert worker.returncode == 0


def _serve(jobs: int) -> None:
    _import()
    running: dict[int, tuple[dict[str, Any], float]] = {}
    requests = [json.loads(line) for line in sys.stdin]
    for request in requests:
        while len(running) >= jobs:
            _collect(running)
        answer = Path(request["answer"])
        answer.unlink(missing_ok=True)
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            _case(request)
            os._exit(0)
        running[pid] = (request, time.monotonic())
    while running:
        _collect(running)


def _collect(running: dict[int, tuple[dict[str, Any], float]]) -> None:
    pid, status, used = os.wait4(-1, 0)
    request, started = running.pop(pid)
    answer = Path(request["answer"])
    told = json.loads(answer.read_text()) if answer.exists() else {"kind": "killed", "told": f"wait status {status}"}
    seconds = time.monotonic() - started
    print(json.dumps({"name": request["name"], **told, "seconds": seconds, "kib": max(used.ru_maxrss, told.get("kib", 0))}), flush=True)


def _import() -> None:
    from llmcomp.imports import TELEMETRY, hide

    hide(TELEMETRY, "sklearn")
    os.environ |= {"TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    import torch
    import transformers.models.auto.modeling_auto
    import transformers.models.llama.modeling_llama  # noqa: F401
    from accelerate import init_empty_weights  # noqa: F401

    torch.set_num_threads(1)


def _case(request: dict[str, Any]) -> None:
    from llmcomp.errors import LlmcompError
    from llmcomp.export import export, plan_model
    from llmcomp.graph import skeleton
    from llmcomp.options import ExportOptions

    signal.alarm(SECONDS)
    skeleton._spawn = _forked
    os.environ["LLMCOMP_CACHE"] = request["cache"]
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    if not os.environ.get("DAMAGE_LOUD"):
        os.dup2(null, 2)
    try:
        options = ExportOptions(**request["options"])
        answer: dict[str, Any] = {"kind": "done", "told": ""}
        if options.output is None:
            answer["layers"] = [(layer.tensor, layer.shape, layer.format) for layer in plan_model(options).layers]
        else:
            export(options)
    except LlmcompError as error:
        answer = {"kind": "refused", "told": str(error), "class": type(error).__name__}
    except BaseException as error:
        answer = {"kind": "raised", "told": f"{type(error).__name__}: {error}\n{traceback.format_exc()}"}
    answer["kib"] = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    answer["traced"] = TRACED
    Path(request["answer"]).write_text(json.dumps(answer))


TRACED: list[float] = []


def _forked(job: Path, limit: float) -> tuple[int, str]:
    """As `skeleton._spawn`."""
    from llmcomp.graph.trace import main

    output = job.with_name("output.txt")
    began = time.monotonic()
    pid = os.fork()
    if pid == 0:
        code = 1
        signal.alarm(SECONDS)
        with output.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
            with contextlib.suppress(BaseException):
                code = main(str(job))
        os._exit(code)
    signal.alarm(SECONDS)
    _, status = os.waitpid(pid, 0)
    TRACED.append(time.monotonic() - began)
    text = output.read_text(errors="replace")
    output.unlink()
    return os.waitstatus_to_exitcode(status), text


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
