"""A tokenizer.json of whatever files a tokenizer has, in a child process (`python -m llmcomp.calibration.convert FOLDER FILE TRUST`)."""

from __future__ import annotations

import sys

from llmcomp.imports import TELEMETRY, hide


def _main(folder: str, path: str, trust: bool) -> None:
    # As for the tokenizer's IR: its files need no torch, its own code may.
    hide(TELEMETRY, "sklearn", *(() if trust else ("torch", "torchvision")))
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust)
    if not tokenizer.is_fast:
        sys.exit(f"{type(tokenizer).__name__} is written in Python alone")
    tokenizer.backend_tokenizer.save(path)


if __name__ == "__main__":
    _main(sys.argv[1], sys.argv[2], sys.argv[3] == "1")
