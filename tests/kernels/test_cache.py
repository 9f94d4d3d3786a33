"""What is compiled, how often, and what is left of it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from llmcomp import formats, kernels
from llmcomp.kernels import cache
from llmcomp.kernels import quantize as module
from tests.formats.inputs import CASES

W = CASES["heavy tails"]


@pytest.fixture(autouse=True)
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Names of the models that a test compiles, with an empty cache before and after it."""
    names: list[str] = []
    compile_model = cache._compile

    def counted(traced: Any, short: bool) -> Any:
        names.append(traced.model.get_friendly_name())
        return compile_model(traced, short)

    monkeypatch.setattr(cache, "_compile", counted)
    monkeypatch.setattr(module, "NUMPY_BELOW", 0)
    kernels.clear_cache()
    yield names
    kernels.clear_cache()


def quantize(name: str = "int4_asym", rule: str = "minmax") -> kernels.Tile:
    return kernels.quantize_rows(formats.get(name), W, 64, rule)


def right(tile: kernels.Tile, name: str = "int4_asym") -> bool:
    return np.array_equal(tile.codes, formats.quantize(formats.get(name), W, 64).packed()["codes"])


def test_once_per_job(compiled: list[str]) -> None:
    fmt = formats.get("int4_sym")
    for rows in (24, 16, 8):
        for rule in ("minmax", "absolute"):
            kernels.quantize_rows(fmt, W[:rows], 64, rule)
        kernels.roundtrip_rows(fmt, W[:rows], 32)
        kernels.error_rows(fmt, W[:rows], 16)
        # Importance changes nothing that a named rule quantizes.
        kernels.quantize_rows(fmt, W[:rows], 64, "minmax", kernels.Given(importance=np.ones(W.shape[1], np.float32)))
    assert sorted(compiled) == ["int4_sym_error", "int4_sym_quantize", "int4_sym_quantize", "int4_sym_roundtrip"]
    assert len(cache.CACHE) == 4


def test_clearing_empties_it_and_all_works_on(compiled: list[str]) -> None:
    first = quantize()
    kernels.clear_cache()
    assert len(cache.CACHE) == 0
    assert right(first) and right(quantize()) and right(quantize())
    assert len(compiled) == 2


def test_no_cache_keeps_nothing(compiled: list[str]) -> None:
    with kernels.no_cache():
        tiles = [quantize() for _ in range(3)]
        assert len(cache.CACHE) == 0 and len(compiled) == 3
        with kernels.no_cache():
            pass
        quantize()
        assert len(compiled) == 4
    assert all(right(tile) for tile in tiles)
    with pytest.raises(ZeroDivisionError), kernels.no_cache():
        raise ZeroDivisionError
    quantize()
    assert len(cache.CACHE) == 1


def test_small_tiles_compile_nothing(compiled: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "NUMPY_BELOW", W.size + 1)
    fmt = formats.get("int4_asym")
    assert right(quantize()) and kernels.roundtrip_rows(fmt, W, 64).shape == W.shape and kernels.error_rows(fmt, W, 64).shape == (24, 3)
    assert not compiled
    monkeypatch.setattr(module, "NUMPY_BELOW", W.size)
    assert right(quantize()) and len(compiled) == 1


def test_an_unknown_rule_compiles_nothing(compiled: list[str]) -> None:
    from llmcomp.errors import OptionError

    with pytest.raises(OptionError):
        quantize(rule="floor")
    assert not compiled and len(cache.CACHE) == 0


def test_threads_share_what_is_compiled_and_not_their_memory(compiled: list[str]) -> None:
    """Several at once, each with its own rows, while the cache is cleared under them."""
    fmt, wrong = formats.get("int4_asym"), []
    parts = [np.ascontiguousarray(W[8 * i : 8 * i + 8]) * np.float32(i + 1) for i in range(3)]
    wanted = [formats.quantize(fmt, part, 64).packed()["codes"] for part in parts]
    stop = threading.Event()

    def work(i: int) -> None:
        done = 0
        while done < 30 or not stop.is_set():
            tile = kernels.quantize_rows(fmt, parts[i], 64)
            if not np.array_equal(tile.codes, wanted[i]):
                wrong.append(i)
            done += 1

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(4):
        kernels.clear_cache()
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong
    # At most once between two clearings, however many threads ask.
    assert len(compiled) <= 5
