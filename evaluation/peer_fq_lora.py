"""NNCF's FQ_LORA recipe on a language model, for `evaluation/distilled.py`: the peer's side of the comparison, in a process of its own.

    python evaluation/peer_fq_lora.py CHECKPOINT WORK --minutes 30

WORK holds `calibration.npy`, `rows.npy`, `held-out.npy` and `windows.npy`, token rows each. Initialisation, loss, optimizer and rates are those of NNCF's
example distillation_qat_with_lora: int4_asym in groups of 64 with AWQ and scale estimation, format FQ_LORA, final hidden states of the teacher kept
beforehand, logits of both by the student's head, KL per token, AdamW with 1e-4 for adapters and a tenth of that for ranges, weight decay as large as the
rate, constant rates. The rank is the largest that every layer holds, up to the example's 256. Batches are given, as the example's 32 x 1024 tokens would
be seven steps in half an hour of two cores. The clock stands still while the peer is judged. Writes `peer.json`.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import nncf
import numpy as np
import torch
from nncf.torch.function_hook import get_hook_storage
from torch.nn.functional import kl_div, log_softmax
from transformers import AutoModelForCausalLM

LARGEST_RANK = 256


def calibrated(model: Any, rows: Any, group: int) -> Any:
    smallest = min(min(m.weight.shape) for m in model.modules() if isinstance(m, torch.nn.Linear))
    samples = [{"input_ids": torch.from_numpy(row)[None], "attention_mask": torch.ones(1, len(row), dtype=torch.long)} for row in rows]
    return nncf.compress_weights(
        model,
        mode=nncf.CompressWeightsMode.INT4_ASYM,
        group_size=group,
        ratio=1.0,
        awq=True,
        scale_estimation=True,
        dataset=nncf.Dataset(samples),
        subset_size=len(samples),
        compression_format=nncf.CompressionFormat.FQ_LORA,
        advanced_parameters=nncf.AdvancedCompressionParameters(lora_adapter_rank=min(LARGEST_RANK, smallest)),
    )


def trainable(model: Any, rate: float) -> list[dict[str, Any]]:
    """Adapters and ranges of the 4-bit weights; all else is frozen."""
    model.requires_grad_(False)
    adapters: list[Any] = []
    ranges: list[Any] = []
    for _, hook in get_hook_storage(model).named_hooks():
        if getattr(hook, "num_bits", None) == 4:
            hook.enable_gradient()
            of_adapters = hook.get_adapters()
            adapters += of_adapters.values()
            ranges += [p for name, p in hook.get_trainable_params().items() if name not in of_adapters]
    return [{"params": adapters, "lr": rate}, {"params": ranges, "lr": rate / 10}]


@torch.no_grad()
def hidden_states(model: Any, rows: Any) -> torch.Tensor:
    return torch.cat([model.model(input_ids=torch.from_numpy(rows[i : i + 4])).last_hidden_state for i in range(0, len(rows), 4)])


@torch.no_grad()
def divergence(teacher: Any, student: Any, rows: Any) -> float:
    """KL(teacher || student) in nats a token, in float64, at every position of rows."""
    total = 0.0
    for row in rows:
        ids = torch.from_numpy(row)[None]
        p, q = (log_softmax(m(input_ids=ids).logits[0].double(), -1) for m in (teacher, student))
        total += float((p.exp() * (p - q)).sum())
    return total / rows.size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("work", type=Path)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--group", type=int, default=64)
    parser.add_argument("--rate", type=float, default=1e-4)
    parser.add_argument("--batch-rows", type=int, default=4)
    parser.add_argument("--microbatch-rows", type=int, default=4)
    parser.add_argument("--judge-minutes", type=float, default=3.0, help="Minutes of training between two looks at the held-out rows.")
    a = parser.parse_args()
    calibration, rows, held_out, windows = (np.load(a.work / f"{name}.npy") for name in ("calibration", "rows", "held-out", "windows"))
    torch.manual_seed(0)
    teacher = AutoModelForCausalLM.from_pretrained(a.checkpoint, dtype=torch.float32).eval()
    cached = hidden_states(teacher, rows)
    started = time.perf_counter()
    student = calibrated(AutoModelForCausalLM.from_pretrained(a.checkpoint, dtype=torch.float32).eval(), calibration, a.group)
    found: dict[str, Any] = {"calibration_seconds": time.perf_counter() - started, "start_kl": divergence(teacher, student, windows)}
    optimizer = torch.optim.AdamW(trainable(student, a.rate), weight_decay=a.rate)
    curve = [[0.0, divergence(teacher, student, held_out)]]
    generator, order = torch.Generator().manual_seed(0), []
    seconds, judged, steps = 0.0, 0.0, 0
    while seconds < 60 * a.minutes:
        started = time.perf_counter()
        if len(order) < a.batch_rows:
            order = torch.randperm(len(rows), generator=generator).tolist()
        batch, order = order[: a.batch_rows], order[a.batch_rows :]
        for i in range(0, len(batch), a.microbatch_rows):
            some = batch[i : i + a.microbatch_rows]
            with torch.no_grad():
                target = log_softmax(student.lm_head(cached[some]).flatten(0, 1), -1)
            logits = student(input_ids=torch.from_numpy(rows[some])).logits.flatten(0, 1)
            loss = kl_div(log_softmax(logits, -1), target, log_target=True, reduction="batchmean")
            (loss * len(some) / len(batch)).backward()
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
        seconds += time.perf_counter() - started
        if not math.isfinite(float(loss)):
            raise SystemExit(f"step {steps}: the loss is {float(loss)}")
        if seconds - judged > 60 * a.judge_minutes or seconds >= 60 * a.minutes:
            judged = seconds
            curve.append([seconds, divergence(teacher, student, held_out)])
            print(f"step {steps}, {seconds:.0f} s: loss {float(loss):.4f}, held-out KL {curve[-1][1]:.4f}", flush=True)
            found |= {"steps": steps, "seconds": seconds, "curve": curve}
            (a.work / "peer.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf8")
    found["kl"] = divergence(teacher, student, windows)
    found["rank"] = min(LARGEST_RANK, min(min(m.weight.shape) for m in teacher.modules() if isinstance(m, torch.nn.Linear)))
    (a.work / "peer.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf8")
    print(f"KL {found['start_kl']:.4f} -> {found['kl']:.4f}")


if __name__ == "__main__":
    main()
