"""Compiled rules equal numpy to the bit."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from llmcomp import formats, kernels
from llmcomp.formats.nf4 import THRESHOLDS
from llmcomp.kernels import cache
from llmcomp.kernels import quantize as module
from tests.formats.inputs import CASES

DTYPES = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}


@pytest.fixture(autouse=True)
def compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """However small, no tile takes the numpy path."""
    monkeypatch.setattr(module, "NUMPY_BELOW", 0)


def check(name: str, w: np.ndarray, group: int) -> kernels.Tile:
    fmt = formats.get(name)
    tile, wanted = kernels.quantize_rows(fmt, w, group), formats.quantize(fmt, w, group)
    packed = wanted.packed()
    assert np.array_equal(tile.codes, packed["codes"])
    assert np.array_equal(tile.scale.view(np.uint32), wanted.scale.view(np.uint32)) and tile.scale.shape == wanted.scale.shape
    assert (tile.zero_point is None) == (wanted.zero_point is None)
    assert tile.zero_point is None or np.array_equal(tile.zero_point, packed["zero_point"])
    return tile


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", formats.names())
def test_equal_to_numpy(name: str, dtype: str, case: str) -> None:
    with np.errstate(over="ignore"):
        w = CASES[case].astype(DTYPES[dtype])
    if not np.isfinite(w.astype(np.float32)).all():
        w = np.nan_to_num(w.astype(np.float32), posinf=6e4, neginf=-6e4).astype(DTYPES[dtype])
    # One group per row is a job of its own, whatever the source's type.
    for group in (64, -1) if dtype == "f32" else (64,):
        assert check(name, w, group).finite


@pytest.mark.parametrize(("rows", "width", "group"), [(1, 64, 64), (7, 96, 32), (3, 48, 16), (5, 17, -1), (64, 1, -1), (8, 576, 64)])
@pytest.mark.parametrize("name", formats.names())
def test_any_shape(name: str, rows: int, width: int, group: int) -> None:
    check(name, np.random.default_rng(0).normal(size=(rows, width)).astype(np.float32), group)


def test_nf4_on_and_beside_every_threshold() -> None:
    """With a largest magnitude of 1 the scale is 1, so these are the quotients themselves: on a threshold the lower level wins."""
    t = np.array(THRESHOLDS, np.float32)
    below, above = np.nextafter(t, np.float32(-2)), np.nextafter(t, np.float32(2))
    w = np.concatenate([below, t, above, [1, -1, 0]]).astype(np.float32)[None].repeat(8, 0)
    tile = check("nf4", w, 48)
    assert formats.unpack(tile.codes, "nf4", w.shape)[0].tolist() == [*range(15), *range(15), *range(1, 16), 15, 0, 7]


@pytest.mark.parametrize("name", formats.names())
def test_a_whole_tile(name: str) -> None:
    """As large as an export's, so that every vector width and loop tail of the compiled code has run."""
    check(name, np.random.default_rng(1).standard_t(4, (252, 2080)).astype(ml_dtypes.bfloat16), 80)


@pytest.mark.parametrize("known", [True, False])
def test_an_undocumented_option_may_be_refused(monkeypatch: pytest.MonkeyPatch, known: bool) -> None:
    """Without the plugin's option for one fused kernel the codes are the same."""
    monkeypatch.setattr(cache, "ONE_PASS", cache.ONE_PASS if known else {"NO_SUCH_OPTION": "1"})
    with kernels.no_cache():
        check("nf4", CASES["heavy tails"], 64)
        check("fp4", CASES["heavy tails"], 64)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_is_found(dtype: str, value: float) -> None:
    w = CASES["normal"].astype(DTYPES[dtype])
    assert kernels.non_finite(w) == (0, None)
    w[3, 11] = w[9, 0] = value
    assert kernels.non_finite(w) == (2, 3 * w.shape[1] + 11)
    for name in formats.names():
        assert not kernels.quantize_rows(formats.get(name), w, 64).finite


def test_small_tiles_take_the_numpy_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "NUMPY_BELOW", 1 << 30)
    monkeypatch.setattr(cache.CACHE, "request", lambda *_: pytest.fail("compiled"))
    assert check("int4_sym", CASES["normal"], 64).finite
    bad = CASES["normal"].copy()
    bad[0, 0] = np.nan
    assert not kernels.quantize_rows(formats.get("int4_sym"), bad, 64).finite


def test_tiles_own_their_memory() -> None:
    """The next tile of the thread must not change the last one."""
    for name in formats.names():
        fmt = formats.get(name)
        first = kernels.quantize_rows(fmt, CASES["normal"], 64)
        before = (first.codes.copy(), first.scale.copy(), None if first.zero_point is None else first.zero_point.copy())
        kernels.quantize_rows(fmt, CASES["heavy tails"], 64)
        assert np.array_equal(first.codes, before[0]) and np.array_equal(first.scale, before[1])
        assert first.zero_point is None or np.array_equal(first.zero_point, before[2])


def test_read_only_rows_are_taken() -> None:
    w = CASES["normal"].astype(ml_dtypes.bfloat16)
    w.flags.writeable = False
    check("int4_sym", w, 64)
