"""The teacher's cache: exact size, its numbers, going on after a kill, and what it refuses."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from llmcomp.errors import DiskSpaceError, OptionError, OutputError
from llmcomp.training import teacher
from llmcomp.training.teacher import TeacherCache, cache_bytes, open_cache, write_cache
from tests.reference.divergence import log_softmax
from tests.training.apart import apart
from tests.training.killed import caching
from tests.training.models import LENGTH, VOCABULARY, llama, rows


def arrays(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix != ".json"}


@pytest.mark.parametrize("k", [4, VOCABULARY, 1000])
def test_the_size_is_known_before(tmp_path: Path, k: int) -> None:
    write_cache(tmp_path, llama(), rows(3), "t", k)
    assert sum(map(len, arrays(tmp_path).values())) == cache_bytes(3, LENGTH, k, VOCABULARY)


def test_ids_of_a_large_vocabulary_take_four_bytes() -> None:
    assert cache_bytes(3, 5, 7, 65536) == 3 * 5 * (7 * 4 + 4)
    assert cache_bytes(3, 5, 7, 65537) == 3 * 5 * (7 * 6 + 4)


def test_wide_ids_come_back(tmp_path: Path) -> None:
    model = llama(vocab_size=65540)
    cache = write_cache(tmp_path, model, rows(1), "t", 3)
    assert cache.ids.dtype == np.int32
    z = model(input_ids=torch.from_numpy(rows(1))).logits[0]
    np.testing.assert_array_equal(cache.targets([0]).ids, z.topk(3).indices)


@pytest.mark.parametrize("batch_rows", [1, 2, 5])
@pytest.mark.parametrize("chunk", [3, 1000])
def test_the_numbers(tmp_path: Path, batch_rows: int, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(teacher.logits, "CHUNK_BYTES", 4 * VOCABULARY * chunk)
    r, told = rows(5), list[Any]()
    cache = write_cache(tmp_path, llama(), r, "t", 8, batch_rows, lambda *x: told.append(x))
    assert told[-1] == (5, 5)
    with torch.no_grad():
        log_p = log_softmax(llama()(input_ids=torch.from_numpy(r)).logits.numpy())
    order = np.argsort(-log_p, -1, kind="stable")
    np.testing.assert_array_equal(cache.ids, order[..., :8])
    # f16 has 11 bits.
    np.testing.assert_allclose(cache.log_p, np.take_along_axis(log_p, order[..., :8], -1), rtol=2**-11, atol=1e-4)
    rest = np.logaddexp.reduce(np.take_along_axis(log_p, order[..., 8:], -1), axis=-1)
    np.testing.assert_allclose(cache.log_tail, rest, rtol=1e-4, atol=1e-5)
    found = cache.targets([3, 1])
    np.testing.assert_array_equal(found.ids, order[[3, 1], :, :8].reshape(-1, 8))
    assert found.log_tail.shape == (2 * LENGTH,)


def test_a_teacher_in_bf16(tmp_path: Path) -> None:
    exact = write_cache(tmp_path / "f32", llama(), rows(3), "t", VOCABULARY)
    half = write_cache(tmp_path / "bf16", llama().bfloat16(), rows(3), "t", VOCABULARY)
    difference = np.abs(exact.log_p.astype(np.float64) - half.log_p).mean()
    # 8 bits of logits up to 10.
    assert 0 < difference < 0.1


def test_a_model_of_its_own_way_is_read_by_its_own_forward_pass(tmp_path: Path) -> None:
    model = llama()
    model.lm_head.register_forward_hook(lambda module, given, out: out * 0.5)
    cache = write_cache(tmp_path, model, rows(3), "t", 4, batch_rows=2)
    z = model(input_ids=torch.from_numpy(rows(3))).logits
    np.testing.assert_allclose(cache.log_p, z.log_softmax(-1).topk(4).values.detach(), rtol=2**-11, atol=1e-4)


def test_a_killed_one_goes_on_behind_the_finished_rows(tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    write_cache(whole, llama(), rows(6), "t", 8)
    cut = tmp_path / "cut"
    assert apart(caching, cut, 3) == -signal.SIGKILL
    with pytest.raises(OutputError, match="3 of 6 rows are finished"):
        open_cache(cut, rows(6), "t", 8)
    seen: list[int] = []
    write_cache(cut, llama(), rows(6), "t", 8, 1, lambda done, total: seen.append(done))
    assert seen == [4, 5, 6]
    assert arrays(cut) == arrays(whole)
    open_cache(cut, rows(6), "t", 8)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"identity": "another"}, "its teacher is t, not another"),
        ({"k": 9}, "its k is 8, not 9"),
        ({"rows": rows(3, 7)}, "its digest of the rows"),
    ],
)
def test_what_is_of_something_else_is_refused(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    write_cache(tmp_path, llama(), rows(3), "t", 8)
    given: dict[str, Any] = {"rows": rows(3), "identity": "t", "k": 8, **change}
    with pytest.raises(OutputError, match=said):
        write_cache(tmp_path, llama(), **given)
    with pytest.raises(OutputError, match=said):
        open_cache(tmp_path, **given)


def test_a_truncated_array_is_named(tmp_path: Path) -> None:
    write_cache(tmp_path, llama(), rows(3), "t", 8)
    (tmp_path / "ids").write_bytes(b"short")
    with pytest.raises(OutputError, match="ids is missing or not of 768 bytes"):
        open_cache(tmp_path, rows(3), "t", 8)


def test_none_there(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="there is none"):
        open_cache(tmp_path, rows(3), "t", 8)


@pytest.mark.parametrize(
    ("given", "said"),
    [(rows(0), r"shape \(0, 16\)"), (rows(2)[0], r"shape \(16,\)"), (rows(2) + 90, "the teacher has 96 tokens"), (-1 - rows(2), "to -1")],
)
def test_rows_that_cannot_be(tmp_path: Path, given: np.ndarray, said: str) -> None:
    with pytest.raises(OptionError, match=said):
        write_cache(tmp_path / "c", llama(), given, "t", 8)
    assert not (tmp_path / "c").exists()


def test_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(teacher.shutil, "disk_usage", lambda folder: type("Usage", (), {"free": 100}))
    with pytest.raises(DiskSpaceError, match="1,152 bytes, 100 are free"):
        write_cache(tmp_path, llama(), rows(2), "t", 8)


def test_a_cache_is_read_through_a_map(tmp_path: Path) -> None:
    cache = write_cache(tmp_path, llama(), rows(2), "t", 8)
    assert isinstance(cache, TeacherCache) and isinstance(cache.log_p, np.memmap) and cache.log_p.mode == "r"
