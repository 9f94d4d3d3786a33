"""`llmcomp COMMAND ...`."""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from collections.abc import Callable, Sequence

from llmcomp import __version__
from llmcomp.errors import LlmcompError
from llmcomp.imports import TELEMETRY, hide


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code. An error of ours is one message on stderr, anything else a traceback."""
    from llmcomp.cli import compare, distill, eval, export, inspect, measure, plan

    hide(TELEMETRY)
    parser = argparse.ArgumentParser(prog="llmcomp", description="Compress Hugging Face checkpoints to small OpenVINO models.")
    parser.add_argument("--version", action="version", version=f"llmcomp {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in (export, measure, plan, inspect, eval, compare, distill):
        command.add_parser(commands)
    parsed = parser.parse_args(arguments)
    if threading.current_thread() is not threading.main_thread():
        return guarded(parsed.run, parsed)
    # A polite kill unwinds as Ctrl-C does.
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        return guarded(parsed.run, parsed)
    finally:
        # None: one that was not set from Python.
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)


def _terminate(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


def _left(error: BaseException) -> str:
    kept = getattr(error, "kept", None)
    return f"what is finished is in {kept}: repeat with --resume to go on" if kept else "nothing was left behind"


def guarded(run: Callable[[argparse.Namespace], int], parsed: argparse.Namespace) -> int:
    """Turn what a command raises into a message and an exit code."""
    try:
        return run(parsed)
    except LlmcompError as error:
        print(f"llmcomp: error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt as error:
        print(f"llmcomp: interrupted; {_left(error)}", file=sys.stderr)
        return 130
    except SystemExit as error:
        if error.code != 128 + signal.SIGTERM:
            raise
        print(f"llmcomp: terminated; {_left(error)}", file=sys.stderr)
        return 128 + signal.SIGTERM
    except BrokenPipeError:
        # The reader of our output has gone, as `| head` does.
        sys.stderr.close()
        return 141
    except (OSError, MemoryError) as error:
        if getattr(error, "kept", None):
            print(f"llmcomp: broken off; {_left(error)}", file=sys.stderr)
        raise
