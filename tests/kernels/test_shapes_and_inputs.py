"""Compiled jobs over changing shapes, with factors, given scales and round trips: numpy to the bit."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from llmcomp import formats, kernels
from llmcomp.errors import GroupSizeError, OptionError
from llmcomp.formats import NUMPY, Format, Namespace
from llmcomp.kernels import Given, cache
from llmcomp.kernels import quantize as module

DTYPES = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}
BOOK = "codebook[-1,-0.625,-0.25,0,0.125,0.5,1]"
NAMES = (*formats.names(), BOOK)
NOTHING = Given()
RULES = [(name, rule) for name in NAMES for rule in formats.get(name).rules]


@pytest.fixture(autouse=True)
def compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """However small, no tile takes the numpy path."""
    monkeypatch.setattr(module, "NUMPY_BELOW", 0)


def check(fmt: Format, w: np.ndarray, group: int, rule: object = "minmax", given: Given = NOTHING, kinds: str = "qre") -> None:
    """Quantize, roundtrip and error, or some of them, against numpy's arithmetic on the folded weights. Each is compiled: a tenth of a second."""
    wide = given.folded(w)
    named = rule if isinstance(rule, str) else "minmax"
    scale, zero_point = given.scale, given.zero_point
    if scale is None and not isinstance(rule, str):
        found = rule(NUMPY, fmt, wide.reshape(formats.grouped_shape(w.shape, group)), None)  # type: ignore[operator]
        scale, zero_point = found["scale"], found.get("zero_point")
    wanted = formats.quantize(fmt, wide, group, named, scale, zero_point)
    if "q" in kinds:
        tile, packed = kernels.quantize_rows(fmt, w, group, rule, given), wanted.packed()  # type: ignore[arg-type]
        assert np.array_equal(tile.codes, packed["codes"])
        assert tile.scale.shape == wanted.scale.shape and np.array_equal(tile.scale.view(np.uint32), wanted.scale.view(np.uint32))
        assert (tile.zero_point is None) == (fmt.zero_point_type is None)
        assert tile.zero_point is None or np.array_equal(tile.zero_point, packed["zero_point"])
        assert tile.finite
    back = decoded(wanted)
    if "r" in kinds:
        # By value: integers lose the sign of a zero in numpy's codes, which a compiled round trip keeps.
        assert np.array_equal(kernels.roundtrip_rows(fmt, w, group, rule, given), back)  # type: ignore[arg-type]
    if "e" in kinds:
        squares = np.square(np.float64(wide - back)) * (1 if given.importance is None else np.float64(given.importance))
        errors = squares.reshape(formats.grouped_shape(w.shape, group)).sum(-1).reshape(len(w), -1)
        # Sums of f32 terms of one sign in another order: each partial sum rounds by 2^-24, and there are fewer than a hundred in a row.
        np.testing.assert_allclose(kernels.error_rows(fmt, w, group, rule, given), errors, rtol=1e-5, atol=1e-37)  # type: ignore[arg-type]


def decoded(weight: formats.CompressedWeight) -> np.ndarray:
    """With the f32 scale."""
    zeros = None if weight.zero_point is None else weight.zero_point.astype(np.float32)
    codes = NUMPY.numbers(weight.codes, weight.format.code_type)
    return weight.format.decode(NUMPY, codes, weight.scale, zeros).reshape(weight.shape)


def tile(rows: int, width: int, dtype: str = "f32", seed: int = 0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_t(4, (rows, width)) * 0.02).astype(DTYPES[dtype])


def factors(rows: int, width: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of columns, of rows, and importance."""
    rng = np.random.default_rng(5)
    return tuple(np.exp(rng.normal(size=n)).astype(np.float32) for n in (width, rows, width))  # type: ignore[return-value]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "rule"), RULES)
def test_every_rule(name: str, rule: str, dtype: str) -> None:
    # What a rule picks does not depend on the kind of job; the source's type only on its first Convert.
    check(formats.get(name), tile(24, 192, dtype), 32, rule, kinds="qre" if dtype == "bf16" else "q")


@pytest.mark.parametrize("name", NAMES)
def test_factors_and_importance(name: str) -> None:
    w = tile(24, 192)
    columns, rows, importance = factors(*w.shape)
    if name in ("int4_asym", "nf4", "mxfp8_e4m3"):
        check(formats.get(name), w, 32, given=Given(columns), kinds="qr")
        check(formats.get(name), w, 32, given=Given(rows=rows, importance=importance), kinds="qe")
    check(formats.get(name), w.astype(ml_dtypes.bfloat16), -1, given=Given(columns, rows, importance), kinds="qe")


@pytest.mark.parametrize("name", NAMES)
def test_given_scales(name: str) -> None:
    """Scales that no rule would pick: too small for some weights, which are cut, too large for others."""
    fmt, w = formats.get(name), tile(24, 192, "f16")
    columns, rows, importance = factors(*w.shape)
    for group, given, kinds in ((32, Given(), "qr"), (-1, Given(columns, rows, importance), "qe")):
        chosen = formats.quantize(fmt, w, group)
        noise = np.exp2(np.random.default_rng(1).integers(-2, 3, chosen.scale.shape)).astype(np.float32)
        zeros = None
        if chosen.zero_point is not None:
            zeros = np.clip(chosen.zero_point.astype(np.float32) + 1, 0, 2**fmt.bits - 1).astype(np.float32)
        check(fmt, w, group, given=replace(given, scale=chosen.scale * noise, zero_point=zeros), kinds=kinds)


def half(xp: Namespace, fmt: Format, w: object, importance: object) -> dict[str, object]:
    """A rule from outside: half the scale of minmax."""
    ranges = fmt.ranges(xp, w)
    return {**ranges, "scale": xp.multiply(ranges["scale"], 0.5)}


@pytest.mark.parametrize("name", ["int4_asym", "int3_sym", "mxfp4", "nvfp4", BOOK])
def test_a_rule_from_outside(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for group in (32, -1):
        check(formats.get(name), tile(24, 192), group, half)
    monkeypatch.setattr(module, "NUMPY_BELOW", 1 << 30)
    check(formats.get(name), tile(24, 192), 32, half)


def test_the_numpy_path_takes_all_that_the_compiled_one_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "NUMPY_BELOW", 1 << 30)
    monkeypatch.setattr(cache.CACHE, "request", lambda *_: pytest.fail("compiled"))
    w = tile(24, 192, "bf16")
    columns, rows, importance = factors(*w.shape)
    for name, rule in RULES:
        for group in (32, -1):
            check(formats.get(name), w, group, rule, Given(columns, rows, importance))
            chosen = formats.quantize(formats.get(name), w, group)
            zeros = None if chosen.zero_point is None else chosen.zero_point.astype(np.float32)
            check(formats.get(name), w, group, given=Given(scale=chosen.scale * 2, zero_point=zeros))


def test_large_tables_take_the_numpy_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache.CACHE, "request", lambda *_: pytest.fail("compiled"))
    check(formats.get(f"codebook[{','.join(map(str, range(-50, 50)))}]"), tile(24, 192), 32)


@pytest.mark.parametrize("given", [False, True])
def test_unknown_rules_and_sizes_are_refused(given: bool) -> None:
    scales = Given(columns=np.ones(192, np.float32)) if given else Given()
    for run in (kernels.quantize_rows, kernels.roundtrip_rows, kernels.error_rows):
        with pytest.raises(OptionError, match="floor"):
            run(formats.get("int4_sym"), tile(24, 192), 32, "floor", scales)
        with pytest.raises(GroupSizeError, match="80"):
            run(formats.get("int4_sym"), tile(24, 192), 80, "minmax", scales)


@pytest.mark.parametrize("name", ["fp8_e4m3", "int4_asym"])
@pytest.mark.parametrize("first", [(24, 1, 64), (24, 3, 1), (1, 3, 64)])
def test_an_axis_of_1_does_not_spoil_the_next_tile(first: tuple[int, int, int], name: str) -> None:
    """The plugin's kernels keep the broadcast of such an axis: after one group per row only the first of every 16 scales was written."""
    kernels.clear_cache()
    for rows, groups, size in (first, first, (24, 26, 16), (8, 17, 1), (17, 1, 33), (40, 33, 32)):
        # Other scales each time, so that what an earlier tile left in the request's memory is wrong.
        check(formats.get(name), tile(rows, groups * size, seed=size) * np.float32(rows), size, kinds="q")


@pytest.mark.parametrize("name", NAMES)
def test_without_the_undocumented_option(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A division is one, not a product with a reciprocal, however the plugin fuses it."""
    monkeypatch.setattr(cache, "ONE_PASS", {})
    with kernels.no_cache():
        check(formats.get(name), tile(64, 640, "bf16"), 32, kinds="q")
