"""What distillation can be told."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)

from llmcomp.errors import OptionError


class Elastic(BaseModel):
    """Adapters whose ranks are drawn in every step and searched for."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    ranks: tuple[NonNegativeInt, ...]
    """That a layer can have; the adapters have the largest."""
    budget: PositiveInt | None = None
    """Parameters of the adapters that are left. Default: what the middle rank costs everywhere."""
    evaluations: PositiveInt = 64
    """Looks at the held-out rows that the search may take."""
    share: float = Field(0.3, gt=0, le=1)
    """Of the budget, after which the search is; the rest trains what it found. Early, since steps with drawn ranks teach the found ones less
    (evaluation/LOG.md)."""


class Settings(BaseModel):
    """Of one run; exactly one of `steps`, `tokens` and `seconds` ends it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    learning_rates: dict[str, PositiveFloat] = Field(min_length=1)
    """The highest rate of each group of parameters."""
    weight_decays: dict[str, NonNegativeFloat] = {}
    """Of groups that decay (AdamW)."""
    betas: tuple[float, float] = (0.9, 0.999)
    steps: PositiveInt | None = None
    """Optimizer steps."""
    tokens: PositiveInt | None = None
    """Of all processes; rounded up to whole steps."""
    seconds: PositiveFloat | None = None
    """On the clock, evaluations included. How many steps they hold depends on the machine, so a run with this budget cannot be repeated, or resumed,
    to the bit."""
    batch_rows: PositiveInt = 8
    """Rows of a step in each process; fewer where there are fewer."""
    microbatch_rows: PositiveInt = 1
    """Rows in memory at once."""
    schedule: Literal["cosine", "linear", "constant_with_warmup"] = "cosine"
    warmup_share: float = Field(0.05, ge=0, lt=1)
    """Of the budget, in which rates rise from zero."""
    eval_every: PositiveInt = 50
    """Steps between two evaluations on the held-out rows."""
    patience: PositiveInt | None = None
    """Evaluations in a row without improvement after which training stops."""
    save_every: PositiveInt | None = None
    """Steps between two states that a killed run resumes from."""
    clip_norm: PositiveFloat | None = 1.0
    seed: int = Field(0, ge=0)
    dtype: Literal["f32", "bf16"] = "f32"
    """Of the student's products; its trainable parameters and the loss are f32 always."""
    gradient_checkpointing: bool = False
    elastic: Elastic | None = None
    """Ranks as they are unless said."""
    tensorboard: bool = False
    """Its files beside the log."""

    @model_validator(mode="after")
    def _one_budget(self) -> Settings:
        if sum(x is not None for x in (self.steps, self.tokens, self.seconds)) != 1:
            raise ValueError("exactly one of steps, tokens and seconds is needed")
        unknown = sorted(set(self.weight_decays) - set(self.learning_rates))
        if unknown:
            raise ValueError(f"weight_decays has the group {unknown[0]}, learning_rates has not")
        return self

    @classmethod
    def of(cls, values: dict[str, Any]) -> Settings:
        """
        Raises:
            OptionError: an unknown key, a value of the wrong kind, no budget or two.
        """
        try:
            return cls(**values)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(str(p) for p in first["loc"]) or "its budget and groups"
            raise OptionError(f"distillation settings, {place}", first["msg"].removeprefix("Value error, "), "Mend the settings") from None
