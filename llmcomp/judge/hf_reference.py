"""The child process of a Hugging Face reference (`python -m llmcomp.judge.hf_reference SOURCE FILE LENGTH TRUST`).

Reads token ids, one window a line, from standard input; writes its logits as f32 into FILE and says so on standard output.
"""

from __future__ import annotations

import os
import sys


def main(source: str, path: str, length: int, trust: bool) -> None:
    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM

    try:
        model, info = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, trust_remote_code=trust, output_loading_info=True)
    except Exception as error:
        print(f"llmcomp:error {source}: transformers cannot load it ({type(error).__name__}: {str(error).splitlines()[0]})", flush=True)
        return
    if info["missing_keys"]:
        print(
            f"llmcomp:error {source}: {len(info['missing_keys'])} tensors are missing, {sorted(info['missing_keys'])[0]} for one",
            flush=True,
        )
        return
    vocabulary = model.get_output_embeddings().weight.shape[0]
    window = np.memmap(path, np.float32, "w+", shape=(length, vocabulary))
    print(f"llmcomp:ready {vocabulary}", flush=True)
    with torch.inference_mode():
        for line in sys.stdin:
            ids = torch.tensor([[int(x) for x in line.split()]])
            window[: ids.shape[1]] = model(ids, use_cache=False).logits[0].numpy()
            window.flush()
            print("llmcomp:done 0", flush=True)


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4] == "1")
