"""What a user can say of training, beside what it starts from."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, ValidationError

from llmcomp.errors import OptionError


class TrainOptions(BaseModel):
    """Of `llmcomp distill`; values are checked here, against a model later."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    train_tokens: PositiveInt = Field(262144)
    """Tokens of text that the teacher answers to, once each, whatever the number of passes."""
    train_length: PositiveInt = 256
    """Tokens of a row."""
    passes: PositiveFloat = 1.0
    """Times that the text is gone through, without `minutes`."""
    minutes: PositiveFloat | None = None
    """Of training, instead of passes; such a run cannot be repeated to the bit."""
    train: Literal["lora", "weights", "scales"] = "lora"
    """lora: adapters, scales and norms; weights: the float weights themselves in place of adapters; scales: scales and norms under frozen codes."""
    rank: PositiveInt = 64
    """Of adapters; at most what each layer can hold."""
    lr: PositiveFloat | None = None
    """Highest rate of adapters or weights."""
    scale_lr: NonNegativeFloat | None = None
    """Of scales, relative to each one's own size."""
    norm_lr: NonNegativeFloat | None = None
    """Of norms and biases; 0: they stand still."""
    batch_rows: PositiveInt = 8
    microbatch_rows: PositiveInt = 4
    held_out_rows: PositiveInt = 16
    """Rows that nothing is trained on, by which the best state is chosen."""
    eval_every: PositiveInt = 20
    patience: PositiveInt | None = None
    save_every: PositiveInt | None = 20
    top_k: PositiveInt = 64
    """Likeliest tokens of the teacher that are kept for each position."""
    dtype: Literal["f32", "bf16"] = "f32"
    gradient_checkpointing: bool = False
    tensorboard: bool = False
    train_seed: NonNegativeInt = 0
    train_dataset: str | None = None
    """Other text to train on than calibration's."""
    adapter_start: Path | None = None
    """Adapters of an earlier training of the same model to go on from."""

    @classmethod
    def of(cls, values: dict[str, Any]) -> TrainOptions:
        """
        Raises:
            OptionError: an unknown name or a value out of range.
        """
        try:
            return cls(**values)
        except ValidationError as error:
            first = error.errors()[0]
            raise OptionError("--" + str(first["loc"][0]).replace("_", "-"), first["msg"], "See llmcomp distill --help") from None
