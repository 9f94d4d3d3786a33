"""A new number format is one new file: the package is copied, one file is added, and everything else takes it from there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import llmcomp

ROOT = Path(__file__).parents[2]
FORMAT = '''
"""Integers -7 .. 7 times a power of two."""

from dataclasses import dataclass

import numpy as np

from llmcomp.formats.array import floor_power, guard
from llmcomp.formats.format import Format, register


@dataclass(frozen=True)
class Shifted(Format):
    rules: tuple[str, ...] = ("minmax", "wide")
    """minmax: no weight is cut. wide: steps of half the size, and what is beyond them is."""

    def ranges(self, xp, w, rule="minmax"):
        scale = guard(xp, xp.divide(xp.max(xp.abs(w)), 7.0))
        below = floor_power(xp, scale)
        if self.check_rule(rule) == "wide":
            return {"scale": below}
        return {"scale": xp.where(xp.less(below, scale), xp.multiply(below, 2.0), below)}

    def encode(self, xp, w, scale, zero_point=None):
        return xp.clip(xp.round(xp.divide(w, scale)), -7.0, 7.0)

    def decode(self, xp, codes, scale, zero_point=None):
        return xp.multiply(codes, scale)

    def store_scale(self, scale, scale_type, rule="minmax"):
        return {"scale": (np.frexp(scale)[1] + 126).astype(np.uint8)}

    def load_scale(self, parts):
        return np.ldexp(np.float32(1), parts["scale"].astype(np.int32) - 127)


register(Shifted("toy4", 4, "i4", group_size=32, scale_type="f8e8m0"))
'''
EXPORT = """
import sys
from pathlib import Path

import numpy as np
import openvino as ov

import llmcomp
from llmcomp import formats, kernels, planning
from llmcomp.kernels import quantize as module
from llmcomp.options import ExportOptions
from llmcomp.writing.ir import write_ir
from llmcomp.writing.journal import Journal
from llmcomp.writing.layout import make_layout
from llmcomp.writing.stream import stream
from llmcomp.writing.verify import verify
from tests.hand import VOCABULARY, hand_graph, logits

folder = Path(sys.argv[1])
assert Path(llmcomp.__file__).is_relative_to(folder), llmcomp.__file__
assert "toy4" in formats.names()
module.NUMPY_BELOW = 0
graph = hand_graph(folder / "skeleton")
options = ExportOptions(model="hand", weight_format="toy4")
planning.check_options(options)
plan = planning.make_plan(graph.layers, options, None)
schemes = {entry.name: entry.scheme for entry in plan.layers}
assert [s.format for s in schemes.values()].count("toy4") == 6
layout, xml = make_layout(graph, schemes), folder / "openvino_model.xml"


def quantize(layer, scheme, w, start):
    return kernels.quantize_rows(formats.get(scheme.format), w, scheme.group_size, scheme.rule)


with Journal(folder / "journal.jsonl") as journal:
    _, tail = stream(graph, schemes, layout, xml.with_suffix(".bin"), quantize, kernels.non_finite, journal, 2)
write_ir(graph, schemes, layout, tail, xml, {"version": "test"})
assert "the whole model ran" in verify("full", xml, folder / "journal.jsonl", graph.layers, layout, tail, VOCABULARY)

arrays = {}
for layer in graph.layers:
    scheme, stored = schemes[layer.name], graph.checkpoint.read(layer.tensor)
    w = np.ascontiguousarray(stored.T) if layer.transposed else stored
    for rule in formats.get(scheme.format).rules:
        tile = kernels.quantize_rows(formats.get(scheme.format), w, scheme.group_size, rule)
        wanted = formats.quantize(formats.get(scheme.format), w, scheme.group_size, rule)
        assert np.array_equal(tile.codes, wanted.packed()["codes"]) and np.array_equal(tile.scale, wanted.scale)
    back = formats.quantize(formats.get(scheme.format), w, scheme.group_size).stored().dequantize()
    arrays[layer.tensor] = back.T if layer.transposed else back
ids = np.random.default_rng(2).integers(0, VOCABULARY, (2, 7))
found = ov.Core().compile_model(xml, "CPU", {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"})([ids])[0]
# f32 against float64 over sums of 96 terms; products with powers of two are exact.
np.testing.assert_allclose(found, logits(arrays, ids), rtol=3e-5, atol=3e-5)
print("same")
"""


def test_one_file_is_enough(tmp_path: Path) -> None:
    package = tmp_path / "llmcomp"
    shutil.copytree(Path(llmcomp.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    (package / "formats" / "toy.py").write_text(FORMAT)
    (tmp_path / "run.py").write_text(EXPORT)
    # A module's own folder comes first on the path, so the copy is found before the package that is tested here.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    run = [sys.executable, str(tmp_path / "run.py"), str(tmp_path)]
    result = subprocess.run(run, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert result.stdout.endswith("same\n"), result.stderr
