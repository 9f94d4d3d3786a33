"""Every text-generation architecture that optimum-intel lists, as a tiny random model: our 8-bit export beside optimum's own float export; into
evaluation/results/architectures.json.

    python evaluation/architectures.py WORK [--only NAME ...] [--seconds 300]

For each: whether transformers can build it offline, whether optimum exports it, whether we trace it as a skeleton or over mapped weights and why, and how
far logits on random tokens are from those of optimum's export, over the largest of these: of our float export, and of our 8-bit one. Each runs in processes
of its own. What is in the results already is not made again; `--only` makes it again.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import tempfile
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "architectures.json"
SMALL: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim", "moe_intermediate_size"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim"), 128),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), 64),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "v_head_dim", "sliding_window"), 16),
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace"), 1),
    **{"num_key_value_heads": 2, "vocab_size": 96, "head_dim": 16, "num_experts_per_tok": 2, "qk_rope_head_dim": 8},
}
"""Sizes of a tiny model, by the names that configs have for them."""
OWN: dict[str, dict[str, Any]] = {
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 128, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 64},
    },
    "codegen": {"rotary_dim": 8},
    "gptj": {"rotary_dim": 8},
    "phi": {"num_key_value_heads": 4},
    "falcon": {"head_dim": None},
    "falcon_mamba": {"layer_types": None},
    "mamba": {"layer_types": None},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "gemma4_text": {"global_head_dim": 16, "num_global_key_value_heads": 2, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0},
    "gemma3n_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "vocab_size_per_layer_input": 96,
        "hidden_size_per_layer_input": 16,
        "num_kv_shared_layers": 0,
        "activation_sparsity_pattern": [0.0, 0.0],
        "laurel_rank": 8,
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "qwen3_next": {"layer_types": ["linear_attention", "full_attention"], "shared_expert_intermediate_size": 64},
    "qwen2_moe": {"decoder_sparse_step": 1, "shared_expert_intermediate_size": 64},
    "qwen3_moe": {"head_dim": 16, "decoder_sparse_step": 1},
}
"""Where these names are not enough; None leaves a name out."""


def kinds() -> list[str]:
    """Model types that optimum-intel has a text-generation exporter for."""
    import optimum.exporters.openvino  # noqa: F401  registers them
    from optimum.exporters.tasks import TasksManager

    listed = TasksManager._LIBRARY_TO_SUPPORTED_MODEL_TYPES["transformers"]
    return sorted(k for k, by in listed.items() if any(task.startswith("text-generation") for task in by.get("openvino", {})))


def build(kind: str, folder: Path) -> None:
    """Write a tiny random model. Exits with 3 and a line if transformers cannot."""
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    try:
        maker = CONFIG_MAPPING[kind]
        default, own = maker(), OWN.get(kind, {})
        sizes = {name: value for name, value in SMALL.items() if hasattr(default, name)}
        names = getattr(default, "layer_types", None)
        if names:
            sizes["layer_types"] = (list(dict.fromkeys(names)) * 2)[:2]
        config = maker(**{name: value for name, value in {**sizes, **own}.items() if value is not None})
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).eval()
    except Exception as error:
        print(f"{type(error).__name__}: {' '.join(str(error).split())[:150]}")
        sys.exit(3)
    with torch.no_grad():
        for parameter in model.parameters():
            # Off their starting values: an exporter drops a product with ones and a sum with zeros.
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)


def logits(xml: Path, ids: Any) -> Any:
    import numpy as np
    import openvino as ov

    properties = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"}
    request = ov.Core().compile_model(xml, "CPU", properties).create_infer_request()
    feed: dict[str, Any] = {}
    for port in request.model_inputs:
        name, shape = port.get_any_name(), port.get_partial_shape()
        if "input_ids" in name:
            feed[name] = ids
        elif name == "position_ids":
            feed[name] = np.broadcast_to(np.arange(ids.shape[1]), [*(d.get_length() for d in list(shape)[:-2]), *ids.shape]).copy()
        elif name == "beam_idx":
            feed[name] = np.zeros(len(ids), np.int32)
        elif "mask" in name:
            feed[name] = np.ones_like(ids)
        else:
            feed[name] = np.zeros([d.get_length() if d.is_static else 1 for d in shape], port.get_element_type().to_dtype())
    request.infer(feed)
    return request.get_tensor("logits").data.copy()


def compare(folder: Path) -> None:
    """Print the figures of one model, whose exports are in this folder."""
    import numpy as np

    ids = np.random.default_rng(0).integers(1, 90, (1, 24))
    wanted = logits(folder / "peer" / "openvino_model.xml", ids)
    largest = float(np.abs(wanted).max())
    error = {name: float(np.abs(logits(folder / name / "openvino_model.xml", ids) - wanted).max()) / largest for name in ("fp32", "int8")}
    print(json.dumps(error))


def last_line(text: str) -> str:
    return next((" ".join(line.split())[:200] for line in reversed(text.splitlines()) if line.strip()), "")


def examine(kind: str, folder: Path, seconds: int) -> dict[str, Any]:
    """What comes of one architecture."""

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        try:
            return subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=seconds)
        except subprocess.TimeoutExpired:
            return subprocess.CompletedProcess(command, 124, "", f"no end within {seconds} s")

    built = run(__file__, str(folder), "--build", kind)
    if built.returncode:
        return {"built": last_line(built.stdout or built.stderr)}
    model, task = str(folder / "model"), "text-generation-with-past"
    found: dict[str, Any] = {"built": True}
    peer = run(
        "-m",
        "optimum.commands.optimum_cli",
        "export",
        "openvino",
        "-m",
        model,
        "--task",
        task,
        "--weight-format",
        "fp32",
        str(folder / "peer"),
    )
    found["peer"] = True if peer.returncode == 0 and (folder / "peer" / "openvino_model.xml").exists() else last_line(peer.stderr)
    for name in ("fp32", "int8"):
        own = run("-m", "llmcomp", "export", model, str(folder / name), "--weight-format", name, "--no-tokenizer", "--quiet")
        if own.returncode:
            return {**found, "ours": last_line(own.stderr).replace(str(folder), "WORK")}
    report = json.loads((folder / "int8" / "report.json").read_text(encoding="utf8"))
    found |= {
        "ours": True,
        "mapped": report["fallback"],
        "layers": len(report["layers"]),
        "int8": sum(f["layers"] for f in report["formats"] if f["format"] == "int8_asym"),
    }
    if found["peer"] is True:
        compared = run(__file__, str(folder), "--compare")
        found["error"] = json.loads(last_line(compared.stdout)) if compared.returncode == 0 else last_line(compared.stderr)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--only", nargs="+", default=[])
    parser.add_argument("--seconds", type=int, default=300, help="for each process")
    parser.add_argument("--build", help=argparse.SUPPRESS)
    parser.add_argument("--compare", action="store_true", help=argparse.SUPPRESS)
    a = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    if a.build:
        return build(a.build, a.work / "model")
    if a.compare:
        return compare(a.work)
    a.work.mkdir(parents=True, exist_ok=True)
    os.environ["LLMCOMP_CACHE"] = str(a.work / "cache")
    table: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf8")) if RESULTS.exists() else {}
    table["versions"] = {name: version(name) for name in ("transformers", "optimum-intel", "openvino", "torch")}
    found = table.setdefault("architectures", {})
    for kind in a.only or kinds():
        if kind in found and not a.only:
            continue
        with tempfile.TemporaryDirectory(dir=a.work) as folder:
            found[kind] = examine(kind, Path(folder), a.seconds)
        print(kind, found[kind], flush=True)
        RESULTS.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n", encoding="utf8")
    return None


if __name__ == "__main__":
    main()
