"""Compiled jobs, shared between threads; infer requests, one per thread."""

from __future__ import annotations

import os
import platform
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol

import openvino as ov

from llmcomp.kernels.trace import Trace

ONE_PASS = {"SNIPPETS_MODE": "IGNORE_CALLBACK"}
"""Makes the plugin fuse a chain of elementwise operations into one kernel, which it else does for static shapes only (measured: NF4 four
times faster, E2M1 five times; factors for columns cost nothing)."""


class Traceable(Protocol):
    """What can be compiled; equal ones are compiled once."""

    @property
    def short(self) -> bool:
        """Whether it takes so little time that threads had better not share it: compiled for several streams it takes twice as long."""

    def trace(self) -> Trace:
        """The graph."""

    def __hash__(self) -> int: ...


class Cache:
    """What has been compiled. Switched off, it compiles at every call and keeps nothing."""

    def __init__(self) -> None:
        self.enabled = True
        self._lock = threading.Lock()
        self._generation = 0
        self._compiled: dict[Traceable, tuple[Any, Trace]] = {}
        self._local = threading.local()

    def request(self, job: Traceable) -> tuple[Any, Trace]:
        """An infer request of this thread's own, and what was traced."""
        if not self.enabled:
            traced = job.trace()
            return _compile(traced, job.short).create_infer_request(), traced
        if getattr(self._local, "generation", None) != self._generation:
            self._local.requests, self._local.generation = {}, self._generation
        requests: dict[Traceable, tuple[Any, Trace]] = self._local.requests
        if job.short and job not in requests:
            traced = job.trace()
            requests[job] = (_compile(traced, True).create_infer_request(), traced)
        elif job not in requests:
            with self._lock:
                if job not in self._compiled:
                    traced = job.trace()
                    self._compiled[job] = (_compile(traced, False), traced)
                compiled, traced = self._compiled[job]
            requests[job] = (compiled.create_infer_request(), traced)
        return requests[job]

    def __len__(self) -> int:
        return len(self._compiled)

    def clear(self) -> None:
        with self._lock:
            for compiled, _ in self._compiled.values():
                # Refused while a thread computes; then the memory goes with that thread's request.
                with suppress(RuntimeError):
                    compiled.release_memory()
            self._compiled.clear()
            self._generation += 1


def _compile(traced: Trace, short: bool) -> Any:
    streams = 1 if short else os.cpu_count() or 1
    properties = {"INFERENCE_PRECISION_HINT": "f32", "NUM_STREAMS": streams, "INFERENCE_NUM_THREADS": streams}
    if short:
        return ov.Core().compile_model(traced.model, "CPU", {**properties, "ENABLE_CPU_PINNING": False, "CPU_DENORMALS_OPTIMIZATION": True})
    if platform.machine().lower() in ("x86_64", "amd64"):
        try:
            return ov.Core().compile_model(traced.model, "CPU", {**properties, **ONE_PASS})
        except RuntimeError as error:
            # An option that the plugin does not document may go; the result is the same without it.
            if next(iter(ONE_PASS)) not in str(error):
                raise
    return ov.Core().compile_model(traced.model, "CPU", properties)


CACHE = Cache()


def clear_cache() -> None:
    """Forget all compiled jobs and give their memory back; threads drop their requests at their next call."""
    CACHE.clear()


@contextmanager
def no_cache() -> Iterator[None]:
    """Within, every call compiles anew and keeps nothing."""
    before, CACHE.enabled = CACHE.enabled, False
    try:
        yield
    finally:
        CACHE.enabled = before
