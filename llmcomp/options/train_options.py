"""What a user can say of training, beside what it starts from."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, ValidationError

from llmcomp.errors import OptionError

OF_ONE_KIND = (
    ("train", ("lora",), ("rank",)),
    ("train", ("nls",), ("ranks", "rank_budget", "search_evaluations", "search_share")),
    ("loss", ("kl",), ("top_k",)),
    ("loss", ("task",), ("prompt_column", "completion_column", "chat_template")),
)
"""(option, its values, the options that mean something with these alone)."""


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
    train: Literal["lora", "nls", "weights", "scales"] = "lora"
    """lora: adapters, scales and norms; nls: the same, the adapters' ranks searched for; weights: the float weights themselves in
    place of adapters; scales: scales and norms under frozen codes."""
    rank: PositiveInt = 64
    """Of adapters; at most what each layer can hold."""
    ranks: tuple[NonNegativeInt, ...] = (32, 24, 16, 8)
    """That nls chooses from, for each layer."""
    rank_budget: PositiveInt | None = None
    """Parameters of the adapters that nls leaves. Default: what the middle rank costs everywhere."""
    search_evaluations: PositiveInt = 64
    """Looks at the held-out rows that its search may take."""
    search_share: float = Field(0.3, gt=0, le=1)
    """Of the training, after which it searches; the rest trains what it found."""
    loss: Literal["kl", "task"] = "kl"
    """kl: to the teacher, of every token of a text; task: cross-entropy of completions."""
    prompt_column: str = "prompt"
    completion_column: str = "completion"
    chat_template: bool = False
    """Prompts and completions are written by it."""
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

    @property
    def largest_rank(self) -> int:
        """Of adapters in training, 0 where there are none."""
        return {"lora": self.rank, "nls": max(self.ranks, default=0)}.get(self.train, 0)

    @classmethod
    def of(cls, values: dict[str, Any]) -> TrainOptions:
        """
        Raises:
            OptionError: an unknown name or a value out of range.
        """
        try:
            found = cls(**values)
        except ValidationError as error:
            first = error.errors()[0]
            raise OptionError(_flag(str(first["loc"][0])), first["msg"], "See llmcomp distill --help") from None
        for option, kinds, names in OF_ONE_KIND:
            stray = next((name for name in names if name in values), None)
            if stray is not None and getattr(found, option) not in kinds:
                reason = f"it is of --{option} {' or '.join(kinds)}, and --{option} is {getattr(found, option)}"
                raise OptionError(_flag(stray), reason, "Leave it out")
        return found


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
