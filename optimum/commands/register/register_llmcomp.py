"""Plugs `optimum-cli export llmcomp -m MODEL OUT` in. optimum-cli imports this file at every start, so it is light and never raises.

There is no `__init__.py` on any level above: optimum's folders are namespace packages, and one of ours would hide its commands.
"""

try:
    from optimum.commands.export.base import ExportCommand

    from llmcomp.cli.optimum import LLMCompExportCommand

    # An iterator gives its entry once, even where two folders of the path (a wheel and a checkout) hold this file: registering twice would
    # end every optimum-cli command.
    REGISTER_COMMANDS = iter([(LLMCompExportCommand, ExportCommand)])
except Exception:  # whatever is missing or broken on our side, optimum-cli must go on
    REGISTER_COMMANDS = iter([])
