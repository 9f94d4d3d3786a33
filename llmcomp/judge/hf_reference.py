"""The child process of a Hugging Face reference (`python -m llmcomp.judge.hf_reference SOURCE FILE LENGTH TRUST`).

Says `llmcomp:ready VOCABULARY` on standard output, then reads requests from standard input, one JSON object a line, and answers each:
`{"ids": [...]}` with `llmcomp:done`, once the window's logits are in FILE as f32 [LENGTH, vocabulary];
`{"ids": [...], "greedy": COUNT, "stop": [...]}` with `llmcomp:done TOKEN ...`, the greedy answer. `llmcomp:error REASON` instead of any of these.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any


class Refused(Exception):
    """The reason is for the user."""


def main(source: str, path: Path, length: int, trust: bool) -> None:
    try:
        import numpy as np
        import torch

        with torch.inference_mode():
            model = _load(source, trust)
            # What the head gives, which padding or pruning may have made another number than the config's.
            vocabulary = _logits(model, [0]).shape[-1]
            _reserve(path, 4 * length * vocabulary)
            window = np.memmap(path, np.float32, "r+", shape=(length, vocabulary))
            _say("ready", str(vocabulary))
            for line in sys.stdin:
                asked = json.loads(line)
                if "greedy" in asked:
                    _say("done", " ".join(map(str, _greedy(model, asked["ids"], asked["greedy"], asked["stop"]))))
                    continue
                window[: len(asked["ids"])] = _logits(model, asked["ids"]).numpy()
                window.flush()
                _say("done")
    except Refused as error:
        _say("error", str(error))


def _load(source: str, trust: bool) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    try:
        model, info = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, trust_remote_code=trust, output_loading_info=True)
    except Exception as error:  # a library of many errors; each means that there is no model
        raise Refused(f"transformers cannot load it ({_first_line(error)}). Check the folder.") from None
    bad = sorted(info["missing_keys"]) + sorted(str(key[0]) for key in info.get("mismatched_keys", ()))
    if bad:
        raise Refused(
            f"{len(bad)} tensors are missing or have another shape, {bad[0]} for one. A model with random weights is no reference."
        )
    return model.eval()


def _logits(model: Any, ids: list[int]) -> Any:
    import torch

    try:
        return model(torch.tensor([ids]), use_cache=False).logits[0].float()
    except (RuntimeError, IndexError, ValueError) as error:
        raise Refused(f"it does not run on {len(ids)} tokens ({_first_line(error)}). Try a smaller --window.") from None


def _greedy(model: Any, ids: list[int], count: int, stop: list[int]) -> list[int]:
    import torch
    from transformers import GenerationConfig

    # The checkpoint's own may sample, or punish repetition.
    model.generation_config = GenerationConfig()
    prompt = torch.tensor([ids])
    try:
        out = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=count,
            eos_token_id=stop or None,
            pad_token_id=0,
        )
    except (RuntimeError, IndexError, ValueError) as error:
        raise Refused(f"it gives no answer to {len(ids)} tokens ({_first_line(error)}). Do without answers: --answer-tokens 0.") from None
    return out[0, len(ids) :].tolist()


def _reserve(path: Path, size: int) -> None:
    """Bytes that are really there: writing into a map of a full disk would kill the process."""
    free = shutil.disk_usage(path.parent).free
    if free < size:
        raise Refused(
            f"a window of its logits takes {size >> 20} MiB in {path.parent}, {free >> 20} MiB are free. Ask for a smaller --window."
        )
    block = bytes(1 << 20)
    with path.open("wb") as file:
        for start in range(0, size, len(block)):
            file.write(block[: size - start])


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _say(kind: str, rest: str = "") -> None:
    print(f"llmcomp:{kind} {rest}", flush=True)


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "1")
