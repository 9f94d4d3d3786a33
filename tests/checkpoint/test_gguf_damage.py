"""A .gguf file is untrusted: whatever it says, it opens and decodes, or an error names the file and what is wrong."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import gguf
import pytest

from llmcomp import checkpoint
from llmcomp.checkpoint import gguf as module
from llmcomp.checkpoint.gguf_header import GGUFTensor, read_gguf
from llmcomp.errors import CheckpointError
from tests.checkpoint.gguf_file import raw_gguf, write_gguf

HOSTILE: list[Any] = [
    None,
    0,
    -1,
    1,
    7,
    1 << 62,
    0.0,
    1e30,
    float("nan"),
    float("inf"),
    True,
    "",
    "x",
    "none",
    [],
    [1, 2],
    ["a", 3],
    [None],
]


def use(path: Path, out: Path) -> None:
    """Open and read all of it."""
    opened = checkpoint.open(path)
    for name in opened.tensors:
        opened.read(name)
    out.mkdir(exist_ok=True)
    opened.save_tokenizer(out)


def refused(path: Path, words: str) -> None:
    with pytest.raises(CheckpointError, match=words) as caught:
        checkpoint.open(path)
    assert path.name in str(caught.value)


def test_no_value_of_the_metadata_raises_anything_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, add_bos_token=True, add_eos_token=True)
    good, stored = read_gguf(path)
    refusals = 0
    for key in good:
        for value in HOSTILE:
            monkeypatch.setattr(module, "read_gguf", lambda _, key=key, value=value: (good | {key: value}, stored))
            try:
                use(path, tmp_path / "out")
            except CheckpointError as error:
                assert "m.gguf" in str(error)
                refusals += 1
    assert refusals > len(good) * len(HOSTILE) / 2


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("llama.rope.scaling.type", "yarn", r"scaled \(yarn\)"),
        ("llama.rope.dimension_count", 15, "rotates 15"),
        ("llama.attention.key_length", 32, "rotates 16 of the 32"),
        ("llama.attention.value_length", 32, "another size"),
        ("llama.attention.head_count_kv", [2, 1], "differs from layer to layer"),
        ("llama.attention.head_count", 0, "head_count of its metadata is '?0"),
        ("llama.block_count", 3, "3 blocks and it holds 2"),
        ("llama.embedding_length", None, "lacks llama.embedding_length"),
        ("general.architecture", "mamba", "'mamba'"),
        ("general.architecture", None, "'None'"),
    ],
)
def test_a_model_that_is_not_plain_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, value: Any, words: str) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path)
    good, stored = read_gguf(path)
    monkeypatch.setattr(module, "read_gguf", lambda _: (good | {key: value}, stored))
    refused(path, words)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("tokens", ["a", "a"], "token types are missing or disagree"),
        ("merges", ["t zz"], "merge 't zz'"),
        ("merges", ["th"], "merge 'th'"),
        ("eos_token_id", 4000, "eos token 4000"),
        ("pre", "default", "'default'"),
        ("model", None, "no tokenizer"),
    ],
)
def test_a_tokenizer_that_cannot_be_rebuilt_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, value: Any, words: str
) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path)
    good, stored = read_gguf(path)
    monkeypatch.setattr(module, "read_gguf", lambda _: (good | {f"tokenizer.ggml.{key}": value}, stored))
    with pytest.raises(CheckpointError, match=words):
        checkpoint.open(path).check_tokenizer()


def test_a_token_that_stands_twice_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path)
    good, stored = read_gguf(path)
    tokens = list(good["tokenizer.ggml.tokens"])
    tokens[0] = tokens[1]
    monkeypatch.setattr(module, "read_gguf", lambda _: (good | {"tokenizer.ggml.tokens": tokens}, stored))
    with pytest.raises(CheckpointError, match="1 entries of its vocabulary stand in it twice"):
        checkpoint.open(path).check_tokenizer()


F32 = int(gguf.GGMLQuantizationType.F32)


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ([("a", [8], F32, 0), ("b", [8], F32, 16)], "b overlaps a"),
        ([("a", [8], F32, 0), ("a", [8], F32, 32)], "named twice"),
        ([("a", [0], F32, 0)], "does not fit"),
        ([("a", [], F32, 0)], "does not fit"),
        ([("a", [8, 0], F32, 0)], "does not fit"),
        ([("a", [9], int(gguf.GGMLQuantizationType.Q4_0), 0)], "does not fit"),
        ([("a", [1 << 39, 1 << 39], F32, 0)], "truncated"),
        ([("a", [8], F32, 1 << 63)], "truncated"),
        ([("a", [8], 999, 0)], "unknown type 999"),
        ([("a", [1, 1, 1, 1, 1], F32, 0)], "5 dimensions"),
    ],
)
def test_tensors_that_cannot_be(tmp_path: Path, tensors: list[tuple[str, list[int], int, int]], words: str) -> None:
    raw_gguf(tmp_path / "m.gguf", tensors)
    refused(tmp_path / "m.gguf", words)


def test_a_part_of_a_model_is_refused(tmp_path: Path) -> None:
    raw_gguf(tmp_path / "m.gguf", [], {"split.count": 3})
    refused(tmp_path / "m.gguf", "one of 3 parts")


@pytest.mark.parametrize("alignment", [0, 1 << 30])
def test_an_alignment_that_cannot_be(tmp_path: Path, alignment: int) -> None:
    raw_gguf(tmp_path / "m.gguf", [], {"general.alignment": alignment})
    refused(tmp_path / "m.gguf", "alignment")


@pytest.mark.parametrize(
    ("name", "kind", "shape", "words"),
    [
        ("token_embd.weight", "I32", (320, 96), "stored as I32"),
        ("output_norm.weight", "Q8_0", (96,), "not a matrix"),
        ("blk.0.attn_q.weight", "F32", (90, 96), "no heads of 16"),
        ("blk.0.ffn_gate_inp.weight", "F32", (4, 96), "ffn_gate_inp.weight is not one of a plain llama"),
        ("blk.00.attn_q.weight", "F32", (96, 96), "not one of a plain llama"),
        ("rope_freqs.weight", "F32", (8,), "not one of a plain llama"),
    ],
)
def test_tensors_that_are_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, kind: str, shape: tuple[int, ...], words: str
) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path)
    good, stored = read_gguf(path)
    tensor = GGUFTensor(name, int(gguf.GGMLQuantizationType[kind]), shape, 0, 0)
    monkeypatch.setattr(module, "read_gguf", lambda _: (good, stored | {name: tensor}))
    refused(path, words)


def test_random_damage_raises_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path)
    raw = path.read_bytes()
    header = next(iter(sorted(t.begin for t in read_gguf(path)[1].values())))
    rng = random.Random(0)
    refusals = 0
    for _ in range(300):
        damaged = bytearray(raw)
        for _ in range(rng.randint(1, 6)):
            damaged[rng.randrange(header)] = rng.randrange(256)
        path.write_bytes(damaged)
        try:
            use(path, tmp_path / "out")
        except CheckpointError as error:
            assert "m.gguf" in str(error)
            refusals += 1
    assert refusals > 150
