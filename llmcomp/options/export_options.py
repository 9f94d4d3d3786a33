"""ExportOptions: everything that an export can be told, checked as far as it can be without the model."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    InstanceOf,
    PositiveInt,
    ValidationError,
    field_serializer,
    model_validator,
)

from llmcomp.errors import OptionError
from llmcomp.options.rules import Override, did_you_mean
from llmcomp.options.scope import IgnoredScope
from llmcomp.options.sizes import parse_size
from llmcomp.options.table import BY_FIELD, OPTIONS

BudgetKind = Literal["target_size", "target_bpw", "max_loss"]
BUDGETS: tuple[BudgetKind, ...] = get_args(BudgetKind)
Candidates = Annotated[tuple[str, ...], BeforeValidator(lambda value: _listed(value))]
Scope = Annotated[InstanceOf[IgnoredScope], BeforeValidator(IgnoredScope.parse)]


class ExportOptions(BaseModel):
    """Fields are the command line's options with underscores; `table.py` says what each means.

    OptionError, which names the option, for an unknown one, a value out of range and a combination that makes no sense.
    Whether a weight format exists is for `planning.check_options` to say.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str = Field(min_length=1)
    output: Path | None = None
    task: str = "auto"
    revision: str | None = None
    # A secret: neither printed nor written into a report.
    token: str | None = Field(default=None, repr=False, exclude=True)
    cache_dir: Path | None = None
    adapter: Path | None = None
    trust_remote_code: bool = False

    recipe: str | None = None
    quality: Literal["fast", "balanced", "high", "best"] | None = None
    plan: Path | None = None
    weight_format: str = "int4"
    sym: bool = False
    ratio: float = Field(default=1.0, ge=0.0, le=1.0, allow_inf_nan=False)
    target_size: Annotated[Literal["same"] | PositiveInt | None, BeforeValidator(parse_size)] = None
    target_bpw: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    max_loss: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    group_size: int | None = Field(default=None, ge=-1)
    group_size_fallback: Literal["error", "ignore", "adjust"] = "adjust"
    all_layers: bool = False
    backup_precision: Literal["none", "int8_sym", "int8_asym"] = "int8_asym"
    ignored_scope: Scope = IgnoredScope()
    override: tuple[str, ...] = ()
    scale_rule: str = "auto"
    folds: Literal["auto", "none"] = "auto"
    permutation: Literal["none", "sorted"] = "none"
    awq: bool = False
    scale_estimation: bool = False
    gptq: bool = False
    target_correction: bool = False
    codebook_scope: Literal["tensor", "blocks"] = "tensor"
    lora_correction: bool = False
    lora_rank: int = Field(default=8, ge=1)
    lora_adapters: Literal["int8_asym", "fp16"] = "int8_asym"
    sensitivity_metric: Literal[
        "weight_quantization_error",
        "hessian_input_activation",
        "mean_activation_variance",
        "max_activation_variance",
        "mean_activation_magnitude",
        "predicted_loss",
    ] = "weight_quantization_error"
    sensitivity: Path | None = None
    # Not of the compression: statistics of the data are of use beside a plan, too.
    dataset: str | tuple[str, ...] | None = None
    dataset_column: str | None = None
    dataset_config: str | None = None
    num_samples: int = Field(default=128, ge=1)
    sequence_length: int = Field(default=256, ge=1)
    candidates: Candidates = ()
    probe_tokens: int = Field(default=512, ge=1)
    seed: int = Field(default=0, ge=0)

    overwrite: bool = False
    resume: bool = False
    no_tokenizer: bool = False
    verify: Literal["none", "structure", "full", "auto"] = "auto"
    min_share: float = Field(default=0.9, ge=0.0, le=1.0, allow_inf_nan=False)
    eval: bool = False
    eval_dataset: Path | None = None
    dry_run: bool = False
    quiet: bool = False
    json_log: Path | None = None

    if not TYPE_CHECKING:  # a type checker sees the fields, a caller an error that names the option

        def __init__(self, **values: Any) -> None:
            try:
                super().__init__(**values)
            except ValidationError as error:
                raise _as_option_error(error) from None

    @property
    def overrides(self) -> tuple[Override, ...]:
        return tuple(Override(text) for text in self.override)

    @property
    def budget(self) -> BudgetKind | None:
        """The field that holds a budget, if one does."""
        return next((field for field in BUDGETS if getattr(self, field) is not None), None)

    @model_validator(mode="after")
    def _check_together(self) -> ExportOptions:
        if self.group_size == 0:
            raise OptionError(
                "--group-size 0", "a group holds at least one weight", "Give a positive size, or -1 for one scale per output channel"
            )
        _ = self.overrides  # parsed for its errors
        for field in type(self).model_fields:
            value = getattr(self, field)
            if isinstance(value, str | Path) and not _is_text(str(value)):
                raise OptionError(f"{_flag(field)} {str(value)!r}", "it is no UTF-8, in which reports are written", "Rename it")
        for field in ("lora_rank", "lora_adapters"):
            if not self.lora_correction and getattr(self, field) != BY_FIELD[field].default:
                raise OptionError(
                    _flag(field), "it says what --lora-correction adds, which is not asked for", "Ask for it, or leave it out"
                )
        self._check_dataset()
        self._check_budget()
        if self.adapter is not None and (self.eval or self.max_loss is not None):
            raise OptionError("--adapter", "nothing is judged against a model with an adapter", "Merge it with PEFT, and give the result")
        if self.plan is not None:
            idle = [option for option in OPTIONS if option.compression and option.field in self.model_fields_set]
            if self.recipe is not None or self.quality is not None or idle:
                names = ", ".join(option.flags[0] for option in idle) or ("--quality" if self.recipe is None else "--recipe")
                raise OptionError(names, "a plan file already says what becomes of every layer", "Edit the plan file, or leave --plan out")
        for flag, path in (("plan", self.plan), ("sensitivity", self.sensitivity)):
            if path is not None and not path.is_file():
                what = "measure MODEL -o FILE --dataset DATA" if flag == "sensitivity" else "plan MODEL -o FILE"
                raise OptionError(f"--{flag} {path}", "there is no such file", f"Write one with `llmcomp {what}`")
        return self

    def _check_dataset(self) -> None:
        given = [f for f in ("dataset_column", "dataset_config", "num_samples", "sequence_length") if f in self.model_fields_set]
        if self.dataset is None and given:
            raise OptionError(_flag(given[0]), "it says how to read --dataset, which is not given", "Give --dataset, or leave it out")
        if self.dataset is not None and not self.dataset:
            raise OptionError("--dataset", "it is empty", "Name data, or leave it out")
        if self.dataset == "auto":
            for field in ("dataset_column", "dataset_config"):
                if getattr(self, field) is not None:
                    raise OptionError(_flag(field), "with --dataset auto the model writes the text", "Leave it out")

    def _check_budget(self) -> None:
        given = [_flag(field) for field in BUDGETS if getattr(self, field) is not None]
        if len(given) > 1:
            raise OptionError(" ".join(given), "each of them says what every layer gets", "Keep one of them")
        if given and self.ratio != 1:
            raise OptionError(f"--ratio {self.ratio:g}", f"{given[0]} decides who gets which format", "Leave one of them out")
        if self.eval_dataset is None:
            return
        if not (self.eval or self.max_loss is not None):
            raise OptionError("--eval-dataset", "nothing is judged", "Add --eval or --max-loss, or leave it out")
        if isinstance(self.dataset, str) and Path(self.dataset).resolve() == self.eval_dataset.resolve():
            raise OptionError("--eval-dataset", "it is the calibration data, on which every loss looks small", "Judge on other text")

    @field_serializer("dataset", when_used="json")
    def _tell_dataset(self, dataset: str | tuple[str, ...] | None) -> str | None:
        """Reports hold what was said, not the texts themselves."""
        return f"{len(dataset)} texts" if isinstance(dataset, tuple) else dataset


def _is_text(value: str) -> bool:
    """Whether it can be written down: bytes of a file name that are no UTF-8 cannot."""
    return not any(0xD800 <= ord(letter) <= 0xDFFF for letter in value)


def _as_option_error(error: ValidationError) -> OptionError:
    """The first complaint of pydantic in the shape of ours."""
    first = error.errors()[0]
    name = str(first["loc"][0]) if first["loc"] else "options"
    if first["type"] == "extra_forbidden":
        return OptionError(f"option '{name}'", "no such option", did_you_mean(name, BY_FIELD))
    if first["type"] == "missing":
        return OptionError(f"option '{name}'", "it is missing", "Give it")
    return OptionError(f"{_flag(name)} {first['input']}", _lower(first["msg"]), "See --help")


def _listed(value: Any) -> Any:
    """Words between commas, in one text or several."""
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
        return value
    return tuple(word.strip() for text in texts for word in text.split(",") if word.strip())


def _flag(name: str) -> str:
    flags: Iterable[str] = BY_FIELD[name].flags
    return next(iter(flags), name.upper())


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]
