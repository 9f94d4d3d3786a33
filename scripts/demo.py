"""The main job on a real model, from a GGUF: export to int4, judge before and after, generate a sentence.

    python scripts/demo.py MODEL.gguf FOLDER

Writes FOLDER/fp32 (the reference) and FOLDER/int4; both are made anew each time.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROMPT = "What is the capital of France?"


def llmcomp(*arguments: str) -> None:
    print("$ llmcomp " + " ".join(arguments), flush=True)
    subprocess.run([sys.executable, "-m", "llmcomp", *arguments], check=True)
    print(flush=True)


def main(model: str, folder: str) -> None:
    reference, small = str(Path(folder, "fp32")), str(Path(folder, "int4"))
    llmcomp("export", model, reference, "--weight-format", "fp32", "--overwrite", "--quiet")
    llmcomp("export", model, small, "--overwrite")
    llmcomp("inspect", small)
    llmcomp("eval", small, "--reference", reference, "--windows", "8")

    import openvino_genai

    pipeline = openvino_genai.LLMPipeline(small, "CPU")
    print(f"> {PROMPT}\n{pipeline.generate(PROMPT, max_new_tokens=40, do_sample=False)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
