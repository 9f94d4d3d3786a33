"""One class per kind of trouble. A message names the thing, the reason and the remedy.

comes in: nothing; goes out: exceptions with an exit code; may import: nothing; read first: this file.
"""

from __future__ import annotations


class LlmcompError(Exception):
    """Base of every error that llmcomp raises on purpose.

    `thing` is what is wrong, `reason` why, `remedy` what the user can do. `exit_code` is what the command line returns.
    """

    exit_code = 1

    def __init__(self, thing: str, reason: str, remedy: str) -> None:
        self.thing, self.reason, self.remedy = thing, reason, remedy
        end = "" if remedy.endswith(("?", "!")) else "."
        super().__init__(f"{thing}: {reason.rstrip('.')}. {remedy.rstrip('.')}{end}")


class OptionError(LlmcompError):
    """An option, recipe key or combination that makes no sense."""

    exit_code = 2


class RuleError(OptionError):
    """An ignore or override rule that matches nothing, or everything."""


class GroupSizeError(OptionError):
    """Layers whose channel size the asked group does not divide, under `--group-size-fallback error`."""


class OutputError(LlmcompError):
    """The output folder exists, is the input, or cannot be written."""

    exit_code = 3


class DiskSpaceError(LlmcompError):
    """Less free disk than the output needs."""

    exit_code = 11


class CheckpointError(LlmcompError):
    """A file of the source is missing, truncated, or says what is not so."""

    exit_code = 4


class TokenizerError(CheckpointError):
    """The source has no tokenizer, or one that cannot be converted."""


class HubError(LlmcompError):
    """The hub cannot be reached, or refuses."""

    exit_code = 4


class CalibrationError(LlmcompError):
    """Calibration data that is missing, broken, or not what its name says."""

    exit_code = 4


class ArchitectureError(LlmcompError):
    """An architecture that the exporter does not know, or whose tensors are not those of the checkpoint."""

    exit_code = 5


class NonFiniteWeightError(LlmcompError):
    """NaN or Inf in a weight."""

    exit_code = 6


class VerificationError(LlmcompError):
    """The written model is not what was meant to be written."""

    exit_code = 7


class PrecisionError(LlmcompError):
    """A layer of which the format that was asked for keeps nothing."""

    exit_code = 10


class NothingCompressedError(LlmcompError):
    """No weight at all can get the format that was asked for."""

    exit_code = 12


class BudgetError(LlmcompError):
    """A size or a loss that no plan, or no model that was made, keeps to."""

    exit_code = 9


class TrainingError(LlmcompError):
    """Training that left the numbers, or cannot go on from where it stopped."""

    exit_code = 14


NOT_JUDGED, PARTLY = 8, 13
"""Exit codes of what is no error of ours to raise: the judge could not do its work; and a model that is complete, of which fewer weights than `--min-share`
says have got their format."""
