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
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.training.models", "llmcomp.training.distill"])
    process = context.Process(target=_single, args=(function, *given))
    # pytest's own main module means nothing there.
    main, sys.modules["__main__"] = sys.modules["__main__"], sys.modules[__name__]
    try:
        process.start()
    finally:
        sys.modules["__main__"] = main
    process.join(LIMIT)
    assert process.exitcode is not None, "it hangs"
    return process.exitcode


def _single(function: Callable[..., None], *given: Any) -> None:
    import torch

    torch.set_num_threads(1)
    function(*given)
