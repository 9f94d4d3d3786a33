"""`optimum-cli export llmcomp`: the same options, `-m` for the model. Imported at every start of optimum-cli: standard library only."""

from __future__ import annotations

import argparse
import sys

from optimum.commands.base import BaseOptimumCLICommand, CommandInfo

from llmcomp.cli.arguments import add_arguments
from llmcomp.options.table import EXPORT


class LLMCompExportCommand(BaseOptimumCLICommand):  # type: ignore[misc]
    """The command class that optimum-cli instantiates."""

    COMMAND = CommandInfo(name="llmcomp", help="Compress a checkpoint to an OpenVINO model with llmcomp, streaming.")

    @staticmethod
    def parse_args(parser: argparse.ArgumentParser) -> None:
        add_arguments(parser, EXPORT, model_flag=True)

    def run(self) -> None:
        from llmcomp.cli.export import run
        from llmcomp.cli.main import guarded

        code = guarded(run, self.args)
        if code:
            sys.exit(code)
