"""A function in a process of its own, which may kill itself. The processes are forked from one that has loaded the libraries and done nothing else:
that takes seconds each time, and a fork of the tests' own process could wait for threads that it does not have."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable
from typing import Any

LIMIT = 120
"""Seconds."""


def apart(function: Callable[..., None], *given: Any) -> int:
    """Its exit code, -SIGKILL where it was killed."""
    return together(function, [given])[0]


def together(function: Callable[..., None], given: list[tuple[Any, ...]]) -> list[int]:
    """The exit codes of several at a time."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.training.models", "llmcomp.training.distill"])
    processes = [context.Process(target=_single, args=(function, *one)) for one in given]
    # pytest's own main module means nothing there.
    main, sys.modules["__main__"] = sys.modules["__main__"], sys.modules[__name__]
    try:
        for process in processes:
            process.start()
    finally:
        sys.modules["__main__"] = main
    try:
        for process in processes:
            process.join(LIMIT)
        codes = [process.exitcode for process in processes]
        assert None not in codes, "it hangs"
        return [code for code in codes if code is not None]
    finally:
        for process in processes:
            process.kill()


def _single(function: Callable[..., None], *given: Any) -> None:
    import torch

    torch.set_num_threads(1)
    function(*given)
