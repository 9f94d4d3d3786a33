"""An export that is killed at its Nth write: `python -m tests.killed N OPTIONS`, or with N = 0 one that tells how many writes there are."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from llmcomp import calibrating
from llmcomp.export import export
from llmcomp.options import ExportOptions
from llmcomp.writing.journal import Journal
from llmcomp.writing.resume import Unfinished
from llmcomp.writing.stream import BinWriter

WRITES = ((BinWriter, "_write"), (BinWriter, "finish"), (Journal, "add"), (Unfinished, "keep_state"), (Unfinished, "keep_text"))


def main(number: int, options: dict[str, Any]) -> None:
    count = 0

    def counted(write: Callable[..., Any]) -> Callable[..., Any]:
        def replacement(*given: Any) -> Any:
            nonlocal count
            count += 1
            if count == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return write(*given)

        return replacement

    for owner, name in WRITES:
        setattr(owner, name, counted(getattr(owner, name)))
    calibrating.KEEP_SECONDS = 0.0
    export(ExportOptions(**options))
    print(count)


if __name__ == "__main__":
    main(int(sys.argv[1]), json.loads(sys.argv[2]))
