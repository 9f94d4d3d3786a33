from __future__ import annotations

from pathlib import Path

import numpy as np
import openvino as ov
import pytest
from openvino import opset13 as ops
from openvino.op.util import Variable, VariableInfo

from llmcomp.calibration import Starts, self_text, starts_of
from llmcomp.calibration.self_text import sample
from llmcomp.errors import CalibrationError
from tests.calibration.helpers import rows, tokenizer_folder
from tests.tiny import tiny_config

VOCABULARY = 97
NONE = np.zeros(0, np.int64)


def inputs() -> dict[str, ov.Node]:
    kinds = {"input_ids": ov.Type.i64, "attention_mask": ov.Type.i64, "position_ids": ov.Type.i64, "beam_idx": ov.Type.i32}
    nodes = {}
    for name, kind in kinds.items():
        nodes[name] = ops.parameter([-1] if name == "beam_idx" else [-1, -1], kind, name=name)
        nodes[name].output(0).set_names({name})
    return nodes


def save(folder: Path, nodes: dict[str, ov.Node], logits: ov.Node, store: list[ov.Node]) -> Path:
    folder.mkdir()
    logits.output(0).set_names({"logits"})
    ov.save_model(ov.Model([ops.result(logits)], store, list(nodes.values())), folder / "openvino_model.xml", compress_to_fp16=False)
    return folder


def real(node: ov.Node) -> ov.Node:
    return ops.convert(node, "f32")


def counter(ids: ov.Node) -> tuple[ov.Node, ov.Node]:
    """How often the model was called since the last reset, [rows, 1], and the node that stores it."""
    info = VariableInfo()
    info.data_shape, info.data_type, info.variable_id = ov.PartialShape([-1, -1]), ov.Type.f32, "calls"
    variable = Variable(info)
    calls = ops.read_value(ops.multiply(real(ids), ops.constant(np.float32(0))), variable)
    return calls, ops.assign(ops.add(calls, ops.constant(np.float32(1))), variable)


def clockwork(folder: Path, infinite: bool = False) -> Path:
    """The next token is certain: id + 3 * position + 5 * length of the mask + 7 * calls + 11 * beam, by remainder."""
    nodes = inputs()
    calls, store = counter(nodes["input_ids"])
    beam = ops.unsqueeze(real(nodes["beam_idx"]), ops.constant(1))
    length = ops.reduce_sum(real(nodes["attention_mask"]), ops.constant([1]), keep_dims=True)
    total = real(nodes["input_ids"])
    for factor, term in ((3, real(nodes["position_ids"])), (5, length), (7, calls), (11, beam)):
        total = ops.add(total, ops.multiply(term, ops.constant(np.float32(factor))))
    token = ops.convert(ops.floor_mod(total, ops.constant(np.float32(VOCABULARY))), "i32")
    on, off = ops.constant(np.float32(np.inf if infinite else 1000)), ops.constant(np.float32(-np.inf))
    return save(folder, nodes, ops.one_hot(token, ops.constant(VOCABULARY), on, off, -1), [store])


def dice(folder: Path, state: bool = True) -> Path:
    """The logits of a token are a row of a table."""
    nodes = inputs()
    table = np.random.default_rng(0).normal(size=(VOCABULARY, VOCABULARY)).astype(np.float32)
    logits = ops.gather(ops.constant(table), nodes["input_ids"], ops.constant(0))
    if not state:
        return save(folder, {"input_ids": nodes["input_ids"]}, logits, [])
    calls, store = counter(nodes["input_ids"])
    nothing = ops.multiply(ops.unsqueeze(calls, ops.constant(2)), ops.constant(np.float32(0)))
    return save(folder, nodes, ops.add(logits, nothing), [store])


def follow(row: list[int], number: int, starts: dict[int, list[int]], eos: int | None = None) -> None:
    """Check a row of the clockwork in which the texts begin as `starts` says: position -> tokens."""
    t = 0
    while t < len(row):
        if t in starts:
            assert row[t : t + len(starts[t])] == starts[t][: len(row) - t]
            t += len(starts[t])
            continue
        # One call and one more token of the mask for each token so far; no reset in between.
        assert row[t] == (row[t - 1] + 3 * (t - 1) + 5 * t + 7 * (t - 1) + 11 * number) % VOCABULARY, t
        assert row[t] != eos or t == len(row) - 1 or t + 1 in starts
        t += 1


def test_the_model_gets_its_inputs_and_a_fresh_state_for_each_batch(tmp_path: Path) -> None:
    samples = self_text(clockwork(tmp_path / "m"), Starts(5, frozenset(), NONE), 5, 12, seed=1, batch=2)
    assert len(samples.rows) == 5 and samples.tokens == 60 and samples.warnings == ()
    for i, row in enumerate(rows(samples)):
        follow(row, i % 2, {0: [5]})
    assert str(samples) == "5 samples of 12 tokens: text that the model wrote itself, seed 1"


def test_a_text_that_ends_is_followed_by_the_next(tmp_path: Path) -> None:
    folder = clockwork(tmp_path / "m")
    (plain,) = rows(self_text(folder, Starts(5, frozenset(), NONE), 1, 12, seed=1))
    eos = plain[4]
    (row,) = rows(self_text(folder, Starts(5, frozenset({eos}), NONE), 1, 12, seed=1))
    assert row[:5] == plain[:5]
    ends = [t for t in range(12) if row[t] == eos]
    follow(row, 0, {0: [5]} | {t + 1: [5] for t in ends}, eos)
    # The same token begins and ends: once is enough.
    (row,) = rows(self_text(folder, Starts(eos, frozenset({eos}), NONE), 1, 40, seed=1))
    follow(row, 0, {0: [eos]})


def test_random_starts_where_nothing_begins_a_text(tmp_path: Path) -> None:
    folder = clockwork(tmp_path / "m")
    ordinary = np.arange(10, 90)
    texts = rows(self_text(folder, Starts(None, frozenset(), ordinary), 8, 9, seed=1))
    assert all(set(row[:3]) <= set(ordinary.tolist()) for row in texts) and len({tuple(row[:3]) for row in texts}) == 8
    for i, row in enumerate(texts):
        follow(row, i, {0: row[:3]})


def test_a_seed_gives_the_same_rows_in_any_batch(tmp_path: Path) -> None:
    folder, starts, told = dice(tmp_path / "m"), Starts(5, frozenset({7}), NONE), []
    texts = rows(self_text(folder, starts, 5, 30, seed=3, batch=5, advance=told.append))
    assert texts == rows(self_text(folder, starts, 5, 30, seed=3, batch=2))
    assert texts != rows(self_text(folder, starts, 5, 30, seed=4)) and len({tuple(row) for row in texts}) == 5
    assert texts[:2] == rows(self_text(folder, starts, 2, 30, seed=3))
    assert sum(told) == 150


def test_tokens_come_as_often_as_the_model_says() -> None:
    p = np.array([0.5, 0.0, 0.25, 0.25])
    with np.errstate(divide="ignore"):
        logits = np.log(np.broadcast_to(p, (8, 4)).astype(np.float32)) + 20
    u = np.array([0.0, 0.2, 0.499, 0.501, 0.749, 0.751, 0.9, np.nextafter(1, 0)])
    assert sample(logits, u).tolist() == [0, 0, 0, 2, 2, 3, 3, 3]


def test_how_texts_begin_and_end(tmp_path: Path) -> None:
    config = tiny_config(bos_token_id=1, eos_token_id=[2, 4])
    found = starts_of(config, {"bos_token_id": 0, "eos_token_id": 9}, None)
    assert (found.bos, found.eos) == (0, {2, 4, 9})
    assert starts_of(config, None, None).bos == 1
    config = tiny_config(bos_token_id=None, eos_token_id=3, pad_token_id=4)
    # The tokenizer's special tokens are 0 to 2; the model's table has more rows than the tokenizer tokens.
    assert starts_of(config, {}, tokenizer_folder(tmp_path)).ordinary.tolist() == list(range(5, 265))
    assert starts_of(config, {}, None).ordinary.tolist() == [0, 1, 2, *range(5, 320)]
    with pytest.raises(CalibrationError, match="no token to begin a text with"):
        starts_of({}, None, None)


def test_models_that_cannot_write(tmp_path: Path) -> None:
    def refused(folder: Path, words: str) -> None:
        with pytest.raises(CalibrationError, match=words):
            self_text(folder, Starts(5, frozenset(), NONE), 1, 4, seed=0)

    refused(tmp_path / "none", "openvino_model.xml: the runtime cannot load it")
    refused(dice(tmp_path / "stateless", state=False), r"its inputs \(input_ids\) are not those of a language model with a state")
    refused(clockwork(tmp_path / "infinite", infinite=True), "its logits are NaN or Inf")
