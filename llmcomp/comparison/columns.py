"""The columns of the table: each figure's name, unit, digits and meaning, in one place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

NOTHING = "-"


@dataclass(frozen=True)
class Column:
    key: str
    """Of the figure in a record's model."""
    title: str
    unit: str
    digits: int
    meaning: str
    error: str | None = None
    """Key of its standard error."""
    scale: float = 1.0
    """What the figure is divided by."""
    signed: bool = False

    @property
    def heading(self) -> str:
        return f"{self.title} ({self.unit})" if self.unit else self.title

    def cell(self, model: Mapping[str, Any]) -> str:
        """The figure with its standard error."""
        return " ".join(self.parts(model))

    def parts(self, model: Mapping[str, Any]) -> list[str]:
        """The figure, and ± its standard error if it has one."""
        value, error = model[self.key], model[self.error] if self.error else None
        if value is None:
            return [NOTHING]
        text = self._number(value, "+" if self.signed else "")
        return [text] if error is None else [text, f"± {self._number(error)}"]

    def _number(self, value: float, sign: str = "") -> str:
        # Adding zero turns the -0.0 of rounding noise into 0.0.
        return f"{round(value / self.scale, self.digits) + 0.0:{sign},.{self.digits}f}"


COLUMNS = (
    Column("bin_bytes", "size", "MiB", 1, "Size of openvino_model.bin, which holds the weights.", scale=2**20),
    Column(
        "bits_per_weight",
        "bits per weight",
        "",
        2,
        "Bytes of the weights with their scales and zero points, in bits, over the number of weights.",
    ),
    Column(
        "perplexity",
        "perplexity",
        "",
        3,
        "How uncertain the model is about the next token of the text, as a number of equally likely choices. Lower is better.",
        "perplexity_standard_error",
    ),
    Column(
        "kl",
        "KL",
        "nats per token",
        4,
        "KL(reference || model), how far the model's predictions of the next token are from the reference's, mean over all positions. 0 is the same "
        "model, lower is better.",
        "kl_standard_error",
    ),
    Column(
        "kl_difference",
        "ΔKL to 1",
        "nats per token",
        4,
        "KL minus that of model 1, window by window. As both were judged on the same tokens, its standard error is the one to compare "
        "models by: a difference of less than twice that may be chance.",
        "kl_difference_standard_error",
        signed=True,
    ),
    Column("top1", "top-1", "share", 4, "How often model and reference rate the same token highest. 1 is always."),
    Column("first_token_ms", "first token", "ms", 1, "From the prompt to the first token of an answer, median over repeats."),
    Column(
        "later_token_ms",
        "later token",
        "ms",
        2,
        "From each token of an answer to the next, mean over the answer, median over repeats. 1000 over it is the speed in tokens per second.",
    ),
    Column(
        "fdt",
        "fdt",
        "tokens",
        1,
        "How many tokens of a greedy answer are the reference's before the first that differs, mean over prompts. As who-what-benchmark defines it, "
        "on the tokens that the models chose, the one that ends an answer included.",
    ),
    Column("fdt_norm", "fdt norm", "share", 3, "The same over the mean length of the reference's answers. 1 if all answers are the same."),
)


def used(models: list[dict[str, Any]]) -> list[Column]:
    """Those in which any model has a figure."""
    return [column for column in COLUMNS if any(model[column.key] is not None for model in models)]
