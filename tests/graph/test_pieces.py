from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from llmcomp import checkpoint as checkpoints
from llmcomp.checkpoint import Checkpoint
from llmcomp.graph.pieces import Piece, Pieces
from tests.tiny import tiny_llama

RNG = np.random.default_rng(0)
STORED = {"gate.0": (4, 6), "gate.1": (4, 6), "up.0": (3, 6), "up.1": (3, 6), "stack": (2, 7, 6), "turned": (2, 6, 7), "vector": (5,)}
VALUES = {name: RNG.normal(size=shape).astype(np.float32) for name, shape in STORED.items()}
FUSED = Pieces(tuple((Piece(f"gate.{e}", 4), Piece(f"up.{e}", 3)) for e in range(2)))
"""[2, 7, 6]: gates above ups."""
BELOW = np.stack([np.concatenate([VALUES[f"gate.{e}"], VALUES[f"up.{e}"]]) for e in range(2)])
TURNED = Pieces(tuple((Piece("turned", 7, index=e, transposed=True),) for e in range(2)))
CASES = {
    "a stored matrix": (Pieces.of("gate.0", (4, 6)), VALUES["gate.0"]),
    "a stored stack": (Pieces.of("stack", (2, 7, 6)), VALUES["stack"]),
    "matrices below each other, in a stack": (FUSED, BELOW),
    "a stack stored turned": (TURNED, VALUES["turned"].swapaxes(1, 2)),
    "the lower halves": (Pieces.of("stack", (2, 7, 6)).halves()[1], VALUES["stack"][:, 3:]),
    "the upper halves of two": (FUSED.halves()[0], BELOW[:, :3]),
}


@pytest.fixture
def stored(tmp_path: Path) -> Checkpoint:
    tiny_llama(tmp_path)
    for path in tmp_path.glob("*.safetensors*"):
        path.unlink()
    save_file(VALUES, tmp_path / "model.safetensors")
    return checkpoints.open(tmp_path)


@pytest.mark.parametrize("name", CASES)
def test_rows_are_read_from_where_they_are(stored: Checkpoint, name: str) -> None:
    pieces, wanted = CASES[name]
    assert pieces.shape(stored) == wanted.shape and Pieces.from_json(pieces.to_json()) == pieces
    np.testing.assert_array_equal(pieces.values(stored), wanted)
    flat = wanted.reshape(-1, wanted.shape[-1])
    turned = np.concatenate([matrix.T for matrix in wanted.reshape(-1, *wanted.shape[-2:])])
    for start in range(len(flat)):
        for stop in range(start + 1, len(flat) + 1):
            np.testing.assert_array_equal(pieces.read(stored, start, stop), flat[start:stop])
            pieces.prefetch(stored, start, stop)
    for start in range(len(turned)):
        for stop in range(start + 1, len(turned) + 1):
            np.testing.assert_array_equal(pieces.columns(stored, start, stop, wanted.shape[-1]), turned[start:stop])


def test_what_is_one_stored_matrix_as_it_is(stored: Checkpoint) -> None:
    assert Pieces.of("gate.0", (4, 6)).whole == "gate.0"
    assert Pieces.of("stack", (2, 7, 6)).whole is None and FUSED.halves()[0].whole is None
    assert FUSED.tensors == ("gate.0", "up.0", "gate.1", "up.1")


def test_vectors_and_their_stacks(stored: Checkpoint) -> None:
    one = Pieces.of("vector", (5,))
    np.testing.assert_array_equal(one.values(stored), VALUES["vector"])
    two = Pieces(((Piece("vector", 5),), (Piece("vector", 5),)))
    np.testing.assert_array_equal(two.values(stored), np.stack([VALUES["vector"]] * 2))
