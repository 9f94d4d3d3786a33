"""Sources with one file damaged: what comes out is an error of ours that names it, in bounded time and memory, or what the source says.

That a source is damaged is not always seen: bits of metadata, of fields that an architecture does not have, of values that are as good as others.
"""

from __future__ import annotations

import json
import re
import shutil
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterator
from math import prod
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import openvino as ov
import pytest

from tests.damage import configs, ggufs, headers, indexes, sources
from tests.damage.change import Damage
from tests.damage.read import tensors
from tests.damage.worker import run
from tests.judge.llama import llama
from tests.reference.minmax import asymmetric

KINDS = {
    "header": headers.header,
    "survived": headers.survived,
    "index": indexes.index,
    "config": configs.config,
    "quantization": configs.quantization,
    "generation": configs.generation,
    "tokenizer": configs.tokenizer,
    "gguf": ggufs.gguf,
}
PLANS = {"header": 8, "index": 12, "config": 2, "quantization": 1, "generation": 1, "gguf": 8}
EXPORTS = {"survived": 3, "config": 1, "tokenizer": 1}
ALL_PLANS = {"header": 600, "index": 200, "config": 800, "quantization": 150, "generation": 50, "gguf": 200}
ALL_EXPORTS = {"survived": 24, "index": 4, "config": 12, "generation": 2, "tokenizer": 8}
MEMORY = 2 << 20
"""KiB that a damaged source may take beyond an undamaged one."""
LONGEST_MESSAGE, LONGEST_PROBLEM = 3000, 600


class Case:
    """A damaged copy of a source, in a folder of its own."""

    def __init__(self, kind: str, number: int, damage: Damage, good: Path, home: Path, seed: int) -> None:
        self.name = f"{kind} {number}: {damage.source}/{damage.file}: {damage.what}"[:150]
        self.damage, self.home, self.folder, self.out = damage, home, home / "m", home / "out"
        # What a message may name: also a tensor that is missed or has another shape.
        names = {*tensors(good / damage.source)}
        # Experts that are stored one by one are parameters of one stack, of two kinds below each other.
        names |= {re.sub(r"\.experts\.\d+\.(\w+)\.weight$", r".experts.\1", name) for name in names}
        names |= {name.replace(".experts.gate_proj", ".experts.gate_up_proj") for name in names}
        shutil.copytree(good / damage.source, self.folder)
        damage.apply(self.folder, seed)
        self.words = (damage.file, *damage.words, *names, *(tensors_named(self.folder)))

    def request(self, export: bool) -> dict[str, Any]:
        model = self.folder / "m.gguf" if self.damage.source == "gguf" else self.folder
        options: dict[str, Any] = {"model": str(model), "no_tokenizer": self.damage.source != "tokenized"}
        if export:
            options |= {"output": str(self.out), "weight_format": "int8", "folds": "none"}
        return {"name": self.name, "answer": str(self.home / "answer"), "cache": str(self.home / "cache"), "options": options}


def tensors_named(folder: Path) -> list[str]:
    """Names that a header has now: damage may be what is told of."""
    found = [re.findall(rb'"([^"\\]{3,80})": ?\{', path.read_bytes()) for path in folder.glob("*.safetensors")]
    return [name.decode("utf8", "replace") for names in found for name in names]


def made(root: Path, counts: dict[str, int], seed: int) -> Iterator[Case]:
    good = root / "good"
    sources.write_all(good)
    for kind, count in counts.items():
        random = Random(f"{seed} {kind}")
        for number in range(count):
            yield Case(kind, number, KINDS[kind](random), good, root / f"{kind}-{number}", random.getrandbits(64))


def answers(root: Path, counts: dict[str, int], export: bool, seed: int = 0) -> Iterator[tuple[Case, dict[str, Any]]]:
    """Each case and what became of it, checked as far as a message and a process go."""
    cases = {case.name: case for case in made(root, counts, seed)}
    assert len(cases) == sum(counts.values())
    least = {
        "name": "good",
        "answer": str(root / "answer"),
        "cache": str(root / "cache"),
        "options": {"model": str(root / "good" / "plain")},
    }
    least["options"]["no_tokenizer"] = True
    usual, problems = None, []
    for answer in run([least, *(case.request(export) for case in cases.values())], 2):
        if answer["name"] == "good":
            usual = answer
            assert answer["kind"] == "done", answer["told"]
            continue
        case = cases[answer["name"]]
        problem = trouble(case, answer)
        if problem is None:
            yield case, answer
        else:
            problems.append(f"{case.name}: {problem}"[:LONGEST_PROBLEM])
        shutil.rmtree(case.home)
        if usual is not None and answer["kib"] > usual["kib"] + MEMORY:
            problems.append(f"{case.name}: {answer['kib']} KiB")
    assert usual is not None and not problems, "\n".join(problems)


def trouble(case: Case, answer: dict[str, Any]) -> str | None:
    """What is wrong with an answer, as far as a message and a process go."""
    told = answer["told"]
    if answer["kind"] not in ("done", "refused"):
        return f"{answer['kind']}: {told}"
    if (case.folder / "RAN").exists():
        return "code of the source has been run"
    if answer["kind"] == "done":
        return None
    if not told.isprintable() or len(told) > LONGEST_MESSAGE or "Traceback" in told:
        return f"no message for people: {told!r}"
    if not any(word in told for word in case.words):
        return f"it names neither file nor field: {told}"
    return "there is an output" if case.out.exists() else None


def check_plan(case: Case, answer: dict[str, Any]) -> None:
    """Every layer is one of the tensors of an independent read, with its shape; what is decoded or from a .gguf has other tests."""
    if case.damage.source in ("gptq", "gguf"):
        assert answer["layers"]
        return
    held = tensors(case.folder)
    for name, shape, _ in answer["layers"]:
        if name in held:
            assert sorted(held[name].shape) == sorted(shape), (case.name, name)
        else:
            assert stack(held, name).shape == tuple(shape), (case.name, name)


def stack(held: dict[str, np.ndarray], name: str) -> np.ndarray:
    """What transformers makes of experts that are stored one by one."""
    stem, _, part = name.rpartition(".")
    experts = [held[f"{stem}.{i}.{part}.weight"] for i in range(2)]
    return np.stack(experts)


def test_a_sample_of_plans(tmp_path: Path) -> None:
    """32 of the kinds that all are made of in the longest run; most damage is found without a trace, which takes seconds."""
    found: Counter[str] = Counter()
    for case, answer in answers(tmp_path, PLANS, False):
        found[answer["kind"]] += 1
        found["traced"] += bool(answer["traced"])
        if answer["kind"] == "done":
            check_plan(case, answer)
    assert found["refused"] > 14 and found["done"] > 1, found


@pytest.mark.longest
def test_all_plans(tmp_path: Path) -> None:
    found: Counter[str] = Counter()
    for case, answer in answers(tmp_path, ALL_PLANS, False, seed=1):
        found[answer["kind"]] += 1
        if answer["kind"] == "done":
            check_plan(case, answer)
    assert found["refused"] > 1000 and found["done"] > 200, found


def test_a_sample_of_exports(tmp_path: Path) -> None:
    found = Counter(check_export(case, answer) for case, answer in answers(tmp_path, EXPORTS, True))
    assert found["written"] >= 1 and found["refused"] >= 1, found


@pytest.mark.longest
def test_all_exports(tmp_path: Path) -> None:
    found = Counter(check_export(case, answer) for case, answer in answers(tmp_path, ALL_EXPORTS, True, seed=1))
    assert found["written"] >= 15 and found["refused"] >= 10, found


def check_export(case: Case, answer: dict[str, Any]) -> str:
    """The folder holds the textbook's rounding of what an independent read finds in the damaged source, under the names that it has there."""
    if answer["kind"] == "refused":
        return "refused"
    held, constants = tensors(case.folder), written(case.out / "openvino_model.xml")
    report = json.loads((case.out / "report.json").read_text())
    matrices = {name: values for name, values in held.items() if values.ndim > 1 and name not in report["unused_tensors"]}
    codes = {name: values for name, values in constants.items() if values.dtype == np.uint8 and not name.endswith("/zero_point")}
    experts = {name: values for name, values in matrices.items() if ".experts." in name}
    wanted: dict[str, np.ndarray] = {}
    for name, values in matrices.items():
        # gpt2 stores (in, out), but for its tables.
        turned = case.damage.source == "gpt2" and not name.startswith(("wte", "wpe", "transformer.w"))
        rows = values.T if turned else values
        integers, scale, zero = asymmetric(rows, 8)
        wanted[name] = (integers - zero[:, None]) * np.float32(np.float16(scale))[:, None]
        if name in experts:
            assert any((one == integers).all() for stacked in codes.values() if stacked.ndim == 3 for one in stacked), (case.name, name)
            continue
        stem = name.removesuffix(".weight")
        (there,) = (one for one in codes if re.search(rf"(^|\.){re.escape(stem)}(\._openvino_orig_weight|\.weight|$)", one))
        np.testing.assert_array_equal(codes[there], integers, err_msg=f"{case.name}: {name}")
        np.testing.assert_array_equal(constants[f"{there}/scale"].reshape(-1), np.float16(scale), err_msg=f"{case.name}: {name}")
        stored = constants.get(f"{there}/zero_point")
        np.testing.assert_array_equal(zero if stored is None else stored.reshape(-1), zero, err_msg=f"{case.name}: {name}")
    counted = sum(prod(values.shape) for values in codes.values())
    assert counted == sum(values.size for values in matrices.values()), case.name
    vectors = {name: values for name, values in held.items() if values.ndim == 1 and name not in report["unused_tensors"]}
    floats = {values.tobytes() for values in constants.values() if values.dtype == np.float32}
    for name, values in vectors.items():
        assert values.tobytes() in floats, (case.name, name)
    if case.damage.source in ("plain", "sharded"):
        check_logits(case, {**wanted, **vectors})
    if case.damage.source == "tokenized":
        assert (case.out / "openvino_tokenizer.xml").is_file()
    return "written"


def written(xml: Path) -> dict[str, np.ndarray]:
    """Constants of an IR by name, by the XML and the bytes of the .bin alone."""
    kinds = {"u8": "u1", "f16": "<f2", "f32": "<f4"}
    data, found = xml.with_suffix(".bin").read_bytes(), {}
    for layer in ET.parse(xml).iterfind("layers/layer"):
        told = layer.find("data")
        if layer.get("type") == "Const" and told is not None and told.get("element_type") in kinds:
            begin, size = int(told.attrib["offset"]), int(told.attrib["size"])
            shape = [int(d) for d in told.attrib["shape"].split(",") if d.strip()]
            name = layer.attrib["name"]
            while name in found:
                name += "'"
            found[name] = np.frombuffer(data[begin : begin + size], kinds[told.attrib["element_type"]]).reshape(shape)
    return found


def check_logits(case: Case, weights: dict[str, np.ndarray]) -> None:
    """Norms have no names in the file: that none has another's place shows in what the model computes."""
    config = json.loads((case.folder / "config.json").read_text())
    ids = np.arange(9)
    compiled = ov.Core().compile_model(
        case.out / "openvino_model.xml", "CPU", {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"}
    )
    feed = {
        "input_ids": ids[None],
        "attention_mask": np.ones((1, 9), np.int64),
        "position_ids": ids[None],
        "beam_idx": np.zeros(1, np.int32),
    }
    names = {name for port in compiled.inputs for name in port.get_names()}
    got = compiled({name: value for name, value in feed.items() if name in names})[0][0]
    # f32 against float64, over sums of some dozens of terms.
    np.testing.assert_allclose(got, llama(config, weights, ids), rtol=1e-3, atol=1e-4, err_msg=case.name)
