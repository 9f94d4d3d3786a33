"""The tokenizer and detokenizer IRs, converted in a child process (`python -m llmcomp.writing.tokenizer FOLDER TASK`): transformers stays out of ours.

Unlike the exporter, which logs a failed conversion at debug level and goes on, a failure here is an error.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

from llmcomp.errors import TokenizerError

MARK = "llmcomp-tokenizer-result:"


def convert_tokenizer(folder: Path, task: str, trust_remote_code: bool) -> None:
    """Write openvino_tokenizer and openvino_detokenizer (.xml, .bin) beside the Hugging Face tokenizer files in `folder`.

    Raises:
        TokenizerError: it cannot be loaded or converted, or the converted one disagrees with it.
    """
    command = [sys.executable, "-m", "llmcomp.writing.tokenizer", str(folder), task, str(int(trust_remote_code))]
    env = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": ""}
    child = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    answers = [line[len(MARK) :] for line in child.stdout.splitlines() if line.startswith(MARK)]
    answer = json.loads(answers[-1]) if answers else {"reason": child.stdout[-2000:] or f"exit code {child.returncode}"}
    if child.returncode or "reason" in answer:
        raise TokenizerError(
            "the tokenizer",
            answer.get("reason", child.stdout[-2000:]),
            "Use --no-tokenizer to export the model without it, or report the tokenizer",
        )


def _hide_torch() -> None:
    """Let transformers think that there is no torch, which its tokenizers do not need: importing it takes 6 s and 440 MB (measured)."""
    find = importlib.util.find_spec

    def find_spec(name: str, package: str | None = None) -> ModuleSpec | None:
        return None if name.split(".")[0] in ("torch", "torchvision") else find(name, package)

    importlib.util.find_spec = find_spec


def _main(folder: Path, task: str, trust: bool) -> dict[str, str]:
    if not trust:
        _hide_torch()
    import openvino as ov
    from openvino_tokenizers import convert_tokenizer as convert
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust)
    except Exception as error:
        return {"reason": f"transformers cannot load it: {type(error).__name__}: {error}"}
    if task.startswith(("text-generation", "image-text-to-text")):
        # A batch of prompts is padded on the left, so that generation goes on where each one ends.
        tokenizer.padding_side = tokenizer.truncation_side = "left"
    try:
        parts = convert(tokenizer, with_detokenizer=True)
    except Exception as error:
        return {"reason": f"openvino_tokenizers cannot convert it: {type(error).__name__}: {error}"}
    for model, name in zip(parts, ("openvino_tokenizer", "openvino_detokenizer"), strict=True):
        ov.save_model(model, folder / f"{name}.xml", compress_to_fp16=False)
    text = "Hello, world! 12 + 30 = 42."
    wanted = tokenizer(text).input_ids
    got = ov.compile_model(parts[0], "CPU")([text])["input_ids"][0].tolist()
    if got != wanted:
        return {"reason": f"the converted one splits {text!r} into {got}, the original into {wanted}"}
    return {}


if __name__ == "__main__":
    print(MARK + json.dumps(_main(Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "1")))
