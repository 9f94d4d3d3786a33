"""Plugs `optimum-cli export llmcomp -m MODEL OUT` in. optimum-cli imports this file at every start, so it is light and never raises.

There is no `__init__.py` on any level above: optimum's folders are namespace packages, and one of ours would hide its commands.
"""

try:
    from optimum.commands.export.base import ExportCommand

    from llmcomp.cli.optimum import LLMCompExportCommand

    REGISTER_COMMANDS = [(LLMCompExportCommand, ExportCommand)]
except Exception:  # whatever is missing or broken on our side, optimum-cli must go on
    REGISTER_COMMANDS = []
