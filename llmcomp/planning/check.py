"""What can be said about options without a model: which format they mean, whether they contradict it."""

from __future__ import annotations

from llmcomp import formats
from llmcomp.errors import OptionError
from llmcomp.options import ExportOptions, explained
from llmcomp.options.rules import did_you_mean
from llmcomp.planning.scheme import FLOATS, KEEP, SCALE_ESTIMATION, SEARCH, STORED

SHORT = {"int8": ("int8_asym", "int8_sym"), "int4": ("int4_asym", "int4_sym")}
"""optimum-cli's names -> (without --sym, with --sym)."""
DATA_FREE, PREDICTED = "weight_quantization_error", "predicted_loss"
"""Sensitivity metrics: the one that needs no data, and the one that is no score but a loss under a scheme."""
NOT_BESIDE_KEEP = (
    *("sym", "ratio", "group_size", "all_layers", "scale_rule", "permutation", "awq", "scale_estimation", "gptq"),
    *("target_correction", "codebook_scope", "lora_correction", "target_size", "target_bpw", "max_loss"),
)
"""Fields that say how weights are rounded, or who gets which format."""
COMPRESSION_FIELDS = {
    "weight_format",
    "sym",
    "ratio",
    "group_size",
    "group_size_fallback",
    "all_layers",
    "backup_precision",
    "ignored_scope",
    "override",
    "sensitivity_metric",
    "scale_rule",
    "folds",
    "permutation",
    "awq",
    "scale_estimation",
    "gptq",
    "target_correction",
    "codebook_scope",
    "lora_correction",
    "lora_rank",
    "lora_adapters",
    "target_size",
    "target_bpw",
    "max_loss",
}


def resolve(name: str, sym: bool) -> str:
    """The exact name of a weight format.

    Raises:
        OptionError: no such format.
    """
    if name in SHORT:
        return SHORT[name][sym]
    if name in FLOATS or formats.exists(name):
        return name
    raise OptionError(f"weight format {name!r}", "no such format", did_you_mean(name, [*SHORT, *formats.names(), "fp16", "fp32"]))


def is_low(name: str) -> bool:
    """Whether a format is smaller than the backup, so that a ratio can mix the two."""
    return name not in FLOATS and formats.get(name).bits < 8


def group_of(options: ExportOptions, name: str) -> int:
    """The group size that a format gets under these options."""
    if name in FLOATS:
        return -1
    fmt = formats.get(name)
    if fmt.fixed_group or fmt.group_size == -1 or options.group_size is None:
        return fmt.group_size
    return options.group_size


def check_options(options: ExportOptions) -> None:
    """What can be refused without a model.

    Raises:
        OptionError: an unknown format in --weight-format or --override, or options that contradict it.
    """
    try:
        _check(options)
    except OptionError as error:
        raise explained(error, options.quality, options.recipe) from None


def _check(options: ExportOptions) -> None:
    main = resolve(options.weight_format, options.sym)
    for name in (main, *(resolve(override.format, options.sym) for override in options.overrides)):
        if name not in FLOATS:
            check_rounds(f"weight format {name!r}", name)
    if main == KEEP and options.plan is None:
        _check_keep(options)
    if options.sym and main.endswith("_asym"):
        raise OptionError("--sym", f"{main} is asymmetric by name", f"Use --weight-format {main.removesuffix('asym')}sym, or drop --sym")
    if not is_low(main) and options.ratio != 1:
        raise OptionError(f"--ratio {options.ratio:g}", f"{main} is no smaller than the backup, so nothing is to mix", "Use --ratio 1")
    if options.scale_rule not in ("auto", SEARCH) and main in FLOATS:
        raise OptionError(f"--scale-rule {options.scale_rule}", f"{main} has no scales", "Leave it out")
    if options.scale_rule != "auto" and main not in FLOATS:
        check_rule(f"--scale-rule {options.scale_rule}", main, options.scale_rule)
    asked = [flag for flag, on in calibrated_options(options).items() if on]
    if options.budget is not None and not is_low(main):
        raise OptionError(
            f"--{options.budget.replace('_', '-')}",
            f"it chooses from formats of few bits upwards, and {main} is none",
            "Name one with --weight-format, or leave it out",
        )
    if needs_data(options) and options.dataset is None and options.budget is None:
        raise OptionError(
            f"--sensitivity-metric {options.sensitivity_metric}",
            "it looks at data",
            "Name some with --dataset, or --sensitivity FILE, which `llmcomp measure` writes",
        )
    if options.sensitivity is not None and not needs_scores(options) and options.budget is None:
        raise OptionError(
            "--sensitivity",
            f"with ratio {options.ratio:g} and {main} no layers are ranked",
            "Give a --ratio between 0 and 1 or a budget, or leave it out",
        )
    if options.target_correction and not options.gptq:
        raise OptionError("--target-correction", "it changes what second-order rounding aims at", "Add --gptq, or leave it out")
    if options.dataset is not None and not asked and options.plan is None and not needs_data(options):
        raise OptionError(
            "--dataset",
            "nothing that was asked for looks at data",
            f"Add {' or '.join(calibrated_options(options))} or a --sensitivity-metric that does, or leave it out",
        )
    if asked and not is_low(main):
        raise OptionError(" ".join(asked), f"{main} loses too little for calibration to help", "Use a format of fewer than 8 bits")
    if options.awq and options.folds == "none":
        raise OptionError("--awq", "it moves factors between weights, which --folds none forbids", "Leave one of them out")
    if options.scale_estimation and options.scale_rule not in ("auto", SCALE_ESTIMATION):
        raise OptionError("--scale-estimation", f"--scale-rule {options.scale_rule} picks the scales", "Leave one of them out")
    named = {main, *(resolve(override.format, options.sym) for override in options.overrides)}
    if options.codebook_scope != "tensor" and formats.ADAPTIVE not in named:
        raise OptionError(
            "--codebook-scope", "nothing gets a table that is fitted", f"Use --weight-format {formats.ADAPTIVE}, or leave it out"
        )
    only = -1 if main in FLOATS else formats.get(main).group_size
    if options.group_size not in (None, only) and (only == -1 or formats.get(main).fixed_group):
        scales = "no scales" if main in FLOATS else "one scale for each output channel" if only == -1 else f"groups of {only} by definition"
        raise OptionError(f"--group-size {options.group_size}", f"{main} has {scales}", f"Use --group-size {only}, or leave it out")
    for override in options.overrides:
        name = resolve(override.format, options.sym)
        if override.group_size is None:
            continue
        if name in FLOATS:
            raise OptionError(f"override '{override.text}'", f"{override.format} has no groups", "Leave the group size out")
        check_group(f"override '{override.text}'", name, override.group_size)


def _check_keep(options: ExportOptions) -> None:
    """Codes that are kept leave nothing to choose. Of overrides all is said that could be."""
    given = [field for field in NOT_BESIDE_KEEP if getattr(options, field) != type(options).model_fields[field].default]
    if "backup_precision" in options.model_fields_set and not options.overrides:
        given.append("backup_precision")
    if given:
        flags = " ".join(f"--{field.replace('_', '-')}" for field in given)
        raise OptionError(
            flags, f"--weight-format {KEEP} takes codes and scales as they are stored, and float as it is", "Leave one of them out"
        )


def calibrated_options(options: ExportOptions) -> dict[str, bool]:
    """The options that look at data, and whether they are on."""
    return {
        "--awq": options.awq,
        "--scale-estimation": options.scale_estimation,
        "--gptq": options.gptq,
        "--lora-correction": options.lora_correction,
    }


def check_group(place: str, name: str, group_size: int) -> None:
    """Refuse another group size than the one that a format is defined with.

    Raises:
        OptionError: with `place` as the thing.
    """
    fmt = formats.get(name)
    if fmt.fixed_group and group_size != fmt.group_size:
        raise OptionError(place, f"{name} has groups of {fmt.group_size} by definition", "Leave the group size out")


def check_rounds(place: str, name: str) -> None:
    """Refuse a format that weights are not rounded to.

    Raises:
        OptionError: with `place` as the thing.
    """
    if not formats.get(name).rules:
        raise OptionError(place, f"{name} rounds nothing, it only holds what is stored so", f"Use --weight-format {KEEP}, or rule {STORED}")


def check_rule(place: str, name: str, rule: str) -> None:
    """Refuse a rule that a format does not have.

    Raises:
        OptionError: with `place` as the thing.
    """
    check_rounds(place, name)
    known = known_rules(name)
    if rule not in known:
        raise OptionError(place, f"{name} has no rule {rule!r}", did_you_mean(rule, known))


def known_rules(name: str) -> tuple[str, ...]:
    """What can pick the scales of a format."""
    return (*formats.get(name).rules, SEARCH, SCALE_ESTIMATION)


def looks_at_text(options: ExportOptions) -> dict[str, bool]:
    """The options that send text through the model, and whether they are on."""
    budget = options.budget
    return {
        **calibrated_options(options),
        "--sensitivity": options.sensitivity is not None,
        f"--{budget.replace('_', '-')}" if budget else "--target-size": budget is not None,
        "--sensitivity-metric": budget is None and needs_data(options),
        "--eval": options.eval,
    }


def needs_scores(options: ExportOptions) -> bool:
    """Whether a plan must know what layers suffer: only a ratio strictly between 0 and 1 ranks them."""
    return is_low(resolve(options.weight_format, options.sym)) and 0 < options.ratio < 1 and options.plan is None


def needs_data(options: ExportOptions) -> bool:
    """Whether a plan must see data first."""
    if options.sensitivity is not None or options.plan is not None:
        return False
    return options.budget is not None or (needs_scores(options) and options.sensitivity_metric != DATA_FREE)
