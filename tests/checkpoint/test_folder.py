"""What a folder may be, and what each damage is called. All of it from headers."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmcomp import checkpoint
from llmcomp.errors import CheckpointError, TokenizerError
from tests.tiny import tiny_llama


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_rows_are_what_was_stored(tmp_path: Path, dtype: str, shards: int) -> None:
    tensors = tiny_llama(tmp_path, shards=shards, torch_dtype=dtype)
    opened = checkpoint.open(tmp_path)
    assert set(opened.tensors) == set(tensors)
    for name, wanted in tensors.items():
        assert opened.read(name).dtype == wanted.dtype and np.array_equal(opened.read(name), wanted)
        assert np.array_equal(opened.rows(name, 3, 9), wanted[3:9])
    assert opened.config["hidden_size"] == 96 and opened.generation_config == {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}


def test_rows_map_no_more_than_they_show(tmp_path: Path) -> None:
    """A mapping of a whole shard would count against memory and stay; the runtime needs rows that it may call its own."""
    tensors = tiny_llama(tmp_path)
    name = "model.layers.1.mlp.down_proj.weight"
    opened = checkpoint.open(tmp_path)
    rows = opened.rows(name, 8, 16)
    base: Any = rows
    while isinstance(base.base, np.ndarray):
        base = base.base
    assert base.nbytes == 8 * 160 * 2 and rows.flags.writeable
    rows[:] = 0
    assert np.array_equal(opened.read(name), tensors[name])
    assert opened.rows(name, 90, 200).shape == (6, 160) and opened.rows(name, 50, 50).shape == (0, 160)


def test_a_file_that_goes_away_while_in_use(tmp_path: Path) -> None:
    tiny_llama(tmp_path)
    opened = checkpoint.open(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:3000])
    with pytest.raises(CheckpointError, match="can no longer be read"):
        opened.read("model.norm.weight")
    path.unlink()
    with pytest.raises(CheckpointError, match="can no longer be read"):
        opened.read("model.norm.weight")


def test_types_that_are_not_read_are_named(tmp_path: Path) -> None:
    tiny_llama(tmp_path)
    rewrite(tmp_path / "model.safetensors", lambda h: h[NORM].update(dtype="U16"))
    opened = checkpoint.open(tmp_path)
    with pytest.raises(CheckpointError, match="U16"):
        opened.read(NORM)


def test_a_child_opens_the_same_files(tmp_path: Path) -> None:
    tiny_llama(tmp_path)
    opened = checkpoint.open(tmp_path)
    assert checkpoint.open(**json.loads(json.dumps(opened.open_arguments))).tensors == opened.tensors


def test_the_fingerprint_knows_the_files(tmp_path: Path) -> None:
    tiny_llama(tmp_path / "a")
    tiny_llama(tmp_path / "b", rope_theta=5000.0)
    first = checkpoint.open(tmp_path / "a")
    assert first.fingerprint() == checkpoint.open(tmp_path / "a").fingerprint()
    assert first.fingerprint() != checkpoint.open(tmp_path / "b").fingerprint()


def test_the_digest_of_values_knows_the_weights_and_not_the_files(tmp_path: Path) -> None:
    tiny_llama(tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "copy")
    tiny_llama(tmp_path / "other", seed=1)
    digests = [checkpoint.open(tmp_path / name).values_digest() for name in ("a", "copy", "other")]
    assert digests[0] == digests[1] != digests[2]


def test_the_tokenizer_is_copied_or_missed(tmp_path: Path) -> None:
    tiny_llama(tmp_path / "with")
    out = tmp_path / "out"
    out.mkdir()
    checkpoint.open(tmp_path / "with").save_tokenizer(out)
    assert {p.name for p in out.iterdir()} == {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    tiny_llama(tmp_path / "without", tokenizer=False)
    with pytest.raises(TokenizerError, match="--no-tokenizer"):
        checkpoint.open(tmp_path / "without").check_tokenizer()


def rewrite(path: Path, change: Any) -> None:
    """Change the header of a safetensors file, leaving its data."""
    raw = path.read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])


NORM = "model.norm.weight"
LIES = {
    "unknown type": (lambda h: h[NORM].update(dtype="F17"), "F17"),
    "shape too large": (lambda h: h[NORM].update(shape=[97]), "takes 194 bytes"),
    "negative shape": (lambda h: h[NORM].update(shape=[-96]), "no list of sizes"),
    "offsets swapped": (lambda h: h[NORM].update(data_offsets=h[NORM]["data_offsets"][::-1]), "span"),
    "offsets beyond": (lambda h: h[NORM].update(data_offsets=[1 << 40, (1 << 40) + 192]), "hole"),
    "overlap": (lambda h: h[NORM].update(data_offsets=[0, 192]), "overlaps"),
    "no offsets": (lambda h: h[NORM].pop("data_offsets"), "missing"),
    "a hole": (lambda h: h.pop(NORM), "hole|follow"),
    "not an object": (lambda h: h.update({NORM: 3}), "missing"),
    "boolean shape": (lambda h: h[NORM].update(shape=[True]), "no list of sizes"),
    "escape sequence in a name": (lambda h: h.update({"\x1b[2J": h.pop(NORM)}), r"name '\\x1b\[2J'"),
    "half a character in a name": (lambda h: h.update({"\ud800": h.pop(NORM)}), r"name '\\ud800'"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_header_that_lies(tmp_path: Path, lie: str) -> None:
    tiny_llama(tmp_path)
    change, words = LIES[lie]
    rewrite(tmp_path / "model.safetensors", change)
    with pytest.raises(CheckpointError, match=words) as caught:
        checkpoint.open(tmp_path)
    assert "model.safetensors" in str(caught.value)


@pytest.mark.parametrize("keep", [0, 4, 100, 5000, -1])
def test_a_truncated_file(tmp_path: Path, keep: int) -> None:
    tiny_llama(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"truncated|too few") as caught:
        checkpoint.open(tmp_path)
    assert str(path) in str(caught.value)


def test_a_header_length_that_cannot_be(tmp_path: Path) -> None:
    tiny_llama(tmp_path)
    path = tmp_path / "model.safetensors"
    raw = path.read_bytes()
    path.write_bytes(struct.pack("<Q", 1 << 62) + raw[8:])
    with pytest.raises(CheckpointError, match="more than the format allows"):
        checkpoint.open(tmp_path)


def test_random_damage_raises_nothing_else(tmp_path: Path) -> None:
    """Bytes of the header changed at random: the file opens or CheckpointError says why; nothing else comes out."""
    tiny_llama(tmp_path)
    path = tmp_path / "model.safetensors"
    raw = path.read_bytes()
    rng = np.random.default_rng(0)
    refused = 0
    for _ in range(400):
        damaged = bytearray(raw)
        for at in rng.integers(0, 2000, rng.integers(1, 6)):
            damaged[at] = rng.integers(0, 256)
        path.write_bytes(damaged)
        try:
            checkpoint.open(tmp_path)
        except CheckpointError:
            refused += 1
    assert refused > 300


def test_index_and_shards(tmp_path: Path) -> None:
    tiny_llama(tmp_path, shards=3)
    index = tmp_path / "model.safetensors.index.json"
    good = json.loads(index.read_text())
    first, second = sorted(set(good["weight_map"].values()))[:2]

    def opened_with(change: Any, words: str) -> None:
        changed = json.loads(json.dumps(good))
        change(changed)
        index.write_text(json.dumps(changed))
        with pytest.raises(CheckpointError, match=words):
            checkpoint.open(tmp_path)

    opened_with(lambda i: i["weight_map"].update({"model.norm.weight": first}), "holds model.norm.weight")
    opened_with(lambda i: i["weight_map"].update(ghost=first), "expects ghost")
    opened_with(lambda i: i["weight_map"].pop("model.norm.weight"), "does not list")
    opened_with(lambda i: i["weight_map"].update({"model.norm.weight": "../../secret.safetensors"}), "outside the folder")
    opened_with(lambda i: i["weight_map"].update({"model.norm.weight": "..\\secret.safetensors"}), "outside the folder")
    opened_with(lambda i: i["weight_map"].update({"model.norm.weight": "C:secret.safetensors"}), "outside the folder")
    opened_with(lambda i: i.update(weight_map=[]), "no map")
    opened_with(lambda i: i["metadata"].update(total_size=i["metadata"]["total_size"] + 2), "total_size")
    index.write_text("{")
    with pytest.raises(CheckpointError, match="not JSON"):
        checkpoint.open(tmp_path)
    index.write_text(json.dumps(good))
    (tmp_path / second).unlink()
    with pytest.raises(CheckpointError, match=rf"index lists 3 files, 2 present: {second}"):
        checkpoint.open(tmp_path)


def test_what_the_system_does_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "folder"
    tiny_llama(folder)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").mkdir()
    with pytest.raises(CheckpointError, match="cannot be read") as caught:
        checkpoint.open(folder)
    assert "model.safetensors" in str(caught.value)
    with pytest.raises(CheckpointError, match=r"cannot be read|no such folder"):
        checkpoint.open("x" * 5000)
    forbidden = tmp_path / "forbidden"
    tiny_llama(forbidden)

    def refuse(self: Path, *_: Any, **__: Any) -> Any:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "read_text", refuse)
    with pytest.raises(CheckpointError, match=r"config\.json: it cannot be read .Permission denied"):
        checkpoint.open(forbidden)


def test_a_link_whose_target_is_gone(tmp_path: Path) -> None:
    tiny_llama(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    try:
        (tmp_path / "model.safetensors").symlink_to(tmp_path / "gone")
    except OSError:
        pytest.skip("this system lets us make no links")
    with pytest.raises(CheckpointError, match=r"model\.safetensors: it cannot be read.*its target"):
        checkpoint.open(tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", "m.gguf"])
def test_a_pointer_of_git_lfs(tmp_path: Path, name: str) -> None:
    tiny_llama(tmp_path)
    (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0000\nsize 269060552\n")
    with pytest.raises(CheckpointError, match=rf"{name}: it is a pointer of Git LFS.*git lfs pull"):
        checkpoint.open(tmp_path / name if name == "m.gguf" else tmp_path)


def test_what_is_no_checkpoint(tmp_path: Path) -> None:
    def refused(folder: Path | str, words: str) -> None:
        with pytest.raises(CheckpointError, match=words):
            checkpoint.open(folder)

    empty = tmp_path / "empty"
    empty.mkdir()
    refused(empty, "no config.json")
    refused(tmp_path / "absent", "no such folder")
    refused("not/a/hub/id", "not a hub id")
    (tmp_path / "file.bin").write_text("")
    refused(tmp_path / "file.bin", "not a .gguf")
    pickled = tmp_path / "pickled"
    tiny_llama(pickled)
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    refused(pickled, "pickled weights")
    ir = tmp_path / "ir"
    ir.mkdir()
    (ir / "openvino_model.xml").write_text("<net/>")
    refused(ir, "already an OpenVINO model")
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    refused(adapter, "merge it into its base model")
    (adapter / "m.gguf").write_bytes(b"GGUF")
    refused(adapter, "Give the file itself: .*m.gguf")
    two = tmp_path / "two"
    tiny_llama(two)
    (two / "other.safetensors").write_bytes((two / "model.safetensors").read_bytes())
    (two / "model.safetensors").rename(two / "another.safetensors")
    refused(two, "2 safetensors files")
    quantized = tmp_path / "quantized"
    tiny_llama(quantized, quantization_config={"quant_method": "aqlm"})
    refused(quantized, "config.json: it says that the weights are already quantized with aqlm")
    (quantized / "config.json").write_text("[")
    refused(quantized, "not JSON")
