"""Mixtures of experts of several families: traced without their weights, compressed in both storage layouts, run packed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import pytest
from safetensors.numpy import load_file, save_file

from llmcomp import checkpoint as checkpoints
from llmcomp.errors import ArchitectureError
from llmcomp.export import dry_run, export
from llmcomp.graph.model import ModelGraph, unused_tensors
from llmcomp.graph.skeleton import get_skeletons
from llmcomp.options import ExportOptions
from tests.calibration.architectures import EXPERTS, save
from tests.damage.sources import mixture
from tests.test_path import logits

STACKS = {"gpt_oss": ("gate_up_proj", "down_proj")}
"""Names of a block's stacks, where they are not gate_proj, up_proj and down_proj."""


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in ("qwen3_moe", "gpt_oss") else [pytest.mark.longest]) for n in EXPERTS])
def test_every_expert_is_compressed_and_runs_packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    import torch

    monkeypatch.setenv("LLMCOMP_CACHE", str(tmp_path / "cache"))
    model = save(name, tmp_path / "m")
    opened = checkpoints.open(str(tmp_path / "m"))
    skeleton = get_skeletons(opened)[0]
    graph = ModelGraph(skeleton, opened)
    assert skeleton.fallback is None and unused_tensors([graph]) == []
    stacks = {layer.name: layer for layer in graph.layers if len(layer.shape) == 3}
    wanted_names = STACKS.get(name, ("gate_proj", "up_proj", "down_proj"))
    assert sorted(stacks) == sorted(f"model.layers.{i}.mlp.experts.{stack}" for i in range(2) for stack in wanted_names)
    stored = sum(p.numel() for key, p in model.named_parameters() if "experts" in key and p.ndim == 3)
    assert sum(layer.size for layer in stacks.values()) == stored

    ids = np.random.default_rng(1).integers(1, 90, (1, 17))
    with torch.no_grad():
        wanted = model(torch.from_numpy(ids)).logits.numpy()
    found = {}
    for kind, options in {"fp32": {}, "int8": {}, "int4": {"group_size": 32}}.items():
        report = export(options_of(tmp_path, kind, options)).report
        found[kind] = logits(tmp_path / kind / "openvino_model.xml", ids)
        if kind == "int4":
            experts = [layer for layer in report["layers"] if "experts" in layer["name"] and len(layer["shape"]) == 3]
            assert {layer["format"] for layer in experts} == {"int4_asym"} and all(layer["runs_packed"] for layer in experts)
            routers = [layer["format"] for layer in report["layers"] if layer["reason"] == "router"]
            assert set(routers) == {"int8_asym"} and len(routers) >= 2
            written = (tmp_path / kind / "openvino_model.bin").stat().st_size
            assert written == dry_run(options_of(tmp_path, "forecast", {**options, "weight_format": kind})).bin_bytes
    error = {kind: np.abs(one - wanted).max() / np.abs(wanted).max() for kind, one in found.items()}
    # Float rounding; then 8 bits, a step of 1/255 of a row's range, through two blocks.
    assert error["fp32"] < 1e-4 and error["int8"] < 0.05 and error["int8"] < error["int4"]
    kinds = packed_products(tmp_path / "int4" / "openvino_model.xml")
    assert kinds.count("GatherMatmul") == 2 * len(wanted_names)


def options_of(folder: Path, kind: str, options: dict[str, Any]) -> ExportOptions:
    return ExportOptions(**{"model": str(folder / "m"), "output": folder / kind, "no_tokenizer": True, "weight_format": kind, **options})


def packed_products(xml: Path) -> list[str]:
    """Kinds of the operations that the CPU runs, those of experts only if their weights are as small as they are stored."""
    compiled = ov.Core().compile_model(xml, "CPU")
    found = []
    for node in compiled.get_runtime_model().get_ops():
        info = node.get_rt_info()
        kind = info["layerType"].astype(str) if "layerType" in info else ""
        if kind == "GatherMatmul":
            types = [node.input(i).get_element_type().get_type_name() for i in range(node.get_input_size())]
            assert "u4" in types, types
        found.append(kind)
    return found


@pytest.mark.parametrize("damage", ["missing", "turned"])
def test_experts_that_do_not_fit_together_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str) -> None:
    """Of two experts that a checkpoint stores one by one."""
    monkeypatch.setenv("LLMCOMP_CACHE", str(tmp_path / "cache"))
    mixture(tmp_path / "m")
    file = tmp_path / "m" / "model.safetensors"
    tensors, name = load_file(file), "model.layers.0.mlp.experts.1.down_proj.weight"
    turned = tensors.pop(name).T
    save_file(tensors if damage == "missing" else {**tensors, name: np.ascontiguousarray(turned)}, file)
    told = (
        r"down_proj \[2, 16, 32\] cannot be made of 1 like model\." if damage == "missing" else rf"tensor {name}: its shape is \[32, 16\]"
    )
    with pytest.raises(ArchitectureError, match=told):
        dry_run(options_of(tmp_path, "plan", {"weight_format": "int8"}))
