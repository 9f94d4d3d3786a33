"""The option table: every option once. `llmcomp export`, `plan` and `measure`, `optimum-cli export llmcomp` and recipes all read it.

Standard library only, and light: optimum-cli imports it at every start. Values are checked later, by ExportOptions; the
spelling of weight formats by `planning.check_options`, so that a new number format needs no line here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["text", "path", "number", "integer", "switch", "list"]

EXPORT, PLAN, MEASURE = "export", "plan", "measure"
ALL = (EXPORT, PLAN, MEASURE)


@dataclass(frozen=True)
class Option:
    """One option. `default` is what ExportOptions has (a test compares); `compression` ones have no effect beside a plan file."""

    field: str
    flags: tuple[str, ...]
    """No flag: given by position."""
    group: str
    help: str
    kind: Kind = "text"
    default: object = None
    default_text: str = ""
    """Shown in the help instead of `default`."""
    choices: tuple[str, ...] = ()
    metavar: str | None = None
    commands: tuple[str, ...] = (EXPORT, PLAN)
    in_recipe: bool = True
    compression: bool = False


SOURCE, COMPRESSION, CALIBRATION, OUTPUT, RUN = "source", "compression", "calibration", "output", "run"

OPTIONS: tuple[Option, ...] = (
    Option(
        "model",
        (),
        SOURCE,
        "Hub id, folder with safetensors, or .gguf file.",
        metavar="MODEL",
        in_recipe=False,
        commands=ALL,
    ),
    Option(
        "output",
        (),
        SOURCE,
        "Folder to write. It appears complete or not at all.",
        kind="path",
        metavar="OUT",
        commands=(EXPORT,),
        in_recipe=False,
    ),
    Option(
        "task",
        ("--task",),
        SOURCE,
        "Task to export for, as optimum-cli names it; auto reads it from the model's config.",
        default="auto",
        commands=ALL,
    ),
    Option(
        "revision", ("--revision",), SOURCE, "Branch, tag or commit of a hub model.", default_text="the hub's main branch", commands=ALL
    ),
    Option(
        "token",
        ("--token",),
        SOURCE,
        "Hub access token.",
        default_text="the one that the hub client has stored",
        in_recipe=False,
        commands=ALL,
    ),
    Option(
        "cache_dir",
        ("--cache_dir", "--cache-dir"),
        SOURCE,
        "Where hub downloads are kept.",
        kind="path",
        metavar="DIR",
        default_text="the hub client's cache",
        in_recipe=False,
        commands=ALL,
    ),
    Option(
        "adapter",
        ("--adapter",),
        SOURCE,
        "Folder with a PEFT LoRA adapter (rsLoRA, DoRA, saved modules) to merge into the weights as they are read.",
        kind="path",
        metavar="FOLDER",
        in_recipe=False,
        commands=ALL,
    ),
    Option(
        "trust_remote_code",
        ("--trust-remote-code",),
        SOURCE,
        "Run model code that comes with the checkpoint. Only for sources whose code you have read, hence never from a recipe.",
        kind="switch",
        default=False,
        in_recipe=False,
        commands=ALL,
    ),
    Option(
        "recipe",
        ("--recipe",),
        COMPRESSION,
        "YAML file of options, or the name of a shipped recipe. The command line overrides it; its lists are extended.",
        metavar="FILE",
        in_recipe=False,
        commands=ALL,
    ),
    Option(
        "quality",
        ("--quality",),
        COMPRESSION,
        "How much time the result is worth; short for the shipped recipe of that name, with calibration data that the model itself writes "
        "unless --dataset says otherwise.",
        choices=("fast", "balanced", "high", "best"),
        in_recipe=False,
    ),
    Option(
        "plan",
        ("--plan",),
        COMPRESSION,
        "Obey a plan file, as `llmcomp plan` writes it, instead of the options of this group.",
        kind="path",
        metavar="FILE",
        commands=(EXPORT,),
        in_recipe=False,
    ),
    Option(
        "weight_format",
        ("--weight-format",),
        COMPRESSION,
        "fp32, fp16, int8, int4 or nf4, or the exact name of a format (int8_asym, int4_sym, ...); keep: the codes and scales of a checkpoint "
        "that is stored quantized, and float as it is.",
        default="int4",
        compression=True,
        metavar="FORMAT",
        commands=ALL,
    ),
    Option(
        "sym",
        ("--sym",),
        COMPRESSION,
        "Symmetric integers, no zero point. Leaves the backup precision alone.",
        kind="switch",
        default=False,
        compression=True,
        commands=ALL,
    ),
    Option(
        "ratio",
        ("--ratio",),
        COMPRESSION,
        "Share of the weights, embedding and last layer not counted, that get the weight format; the most sensitive rest gets the backup.",
        kind="number",
        default=1.0,
        compression=True,
    ),
    Option(
        "target_size",
        ("--target-size",),
        COMPRESSION,
        "Lose least at a size: bytes of openvino_model.xml and .bin together, never exceeded (3.5GB, 900MiB, a plain number; same: as large "
        "as without this option). Format and group of each layer are chosen by measured losses, see --sensitivity.",
        metavar="SIZE",
        compression=True,
    ),
    Option(
        "target_bpw",
        ("--target-bpw",),
        COMPRESSION,
        "The same for 8 x bytes of the .bin / elements of the source weights.",
        kind="number",
        metavar="BITS",
        compression=True,
    ),
    Option(
        "max_loss",
        ("--max-loss",),
        COMPRESSION,
        "The smallest model whose KL to the checkpoint, nats per token on held-out text, is at most this by its upper 95 % bound. The result is "
        "judged as with --eval, and made anew up to three times.",
        kind="number",
        metavar="NATS",
        compression=True,
    ),
    Option(
        "group_size",
        ("--group-size",),
        COMPRESSION,
        "Weights along the input that share a scale; -1 is one scale for each output channel.",
        kind="integer",
        default_text="64; 8-bit formats -1",
        compression=True,
        commands=ALL,
    ),
    Option(
        "group_size_fallback",
        ("--group-size-fallback",),
        COMPRESSION,
        "What becomes of a layer that the group does not divide. adjust: the largest power of two from 32 to the asked size that "
        "divides it, else the backup; ignore: it stays float; error: stop and name all such layers.",
        default="adjust",
        choices=("error", "ignore", "adjust"),
        compression=True,
    ),
    Option(
        "all_layers",
        ("--all-layers",),
        COMPRESSION,
        "Give the embedding and the last layer the weight format too.",
        kind="switch",
        default=False,
        compression=True,
    ),
    Option(
        "backup_precision",
        ("--backup-precision",),
        COMPRESSION,
        "For whatever does not get the weight format; none leaves it float.",
        default="int8_asym",
        choices=("none", "int8_sym", "int8_asym"),
        compression=True,
    ),
    Option(
        "ignored_scope",
        ("--ignored-scope",),
        COMPRESSION,
        "Leave these layers float: a layer's, tensor's or node's name, a glob, re:REGEX (matched from the start of the name), or "
        "type:OPERATION. Repeatable.",
        kind="list",
        default_text="none",
        metavar="RULE",
        compression=True,
    ),
    Option(
        "override",
        ("--override",),
        COMPRESSION,
        "PATTERN=FORMAT[:GROUP] for single layers, patterns as in --ignored-scope. Repeatable; the last rule that matches a layer "
        "wins, and wins over everything else.",
        kind="list",
        default_text="none",
        metavar="RULE",
        compression=True,
    ),
    Option(
        "scale_rule",
        ("--scale-rule",),
        COMPRESSION,
        "What picks the scales of the weight format. minmax: as NNCF; search: several scales tried for each group, which takes two to "
        "four times as long; others are named in the README; auto: the format's best of those that cost no time.",
        default="auto",
        metavar="RULE",
        compression=True,
    ),
    Option(
        "folds",
        ("--folds",),
        COMPRESSION,
        "auto: before rounding to fewer than 8 bits, make the columns of each weight alike, by factors that move exactly into the norm "
        "or the weight in front of it. none: leave all weights as they are.",
        default="auto",
        choices=("auto", "none"),
        compression=True,
    ),
    Option(
        "permutation",
        ("--permutation",),
        COMPRESSION,
        "sorted: before rounding to fewer than 8 bits in groups, sort the inner channels of each MLP by magnitude, which changes nothing "
        "else. none: leave them in their order. Which is better depends on the model: judge both.",
        default="none",
        choices=("none", "sorted"),
        compression=True,
    ),
    Option(
        "awq",
        ("--awq",),
        COMPRESSION,
        "Choose the factors of folds by what they lose on calibration data (AWQ).",
        kind="switch",
        default=False,
        compression=True,
    ),
    Option(
        "scale_estimation",
        ("--scale-estimation",),
        COMPRESSION,
        "Choose scales by the error that the inputs seen in calibration see.",
        kind="switch",
        default=False,
        compression=True,
    ),
    Option(
        "gptq",
        ("--gptq",),
        COMPRESSION,
        "Choose codes so that later columns make up for the error of earlier ones on calibration data (GPTQ).",
        kind="switch",
        default=False,
        compression=True,
    ),
    Option(
        "target_correction",
        ("--target-correction",),
        COMPRESSION,
        "With --gptq: let each layer make up for what the layers before it have lost on calibration data. The text goes through the float model, too.",
        kind="switch",
        default=False,
        compression=True,
    ),
    Option(
        "codebook_scope",
        ("--codebook-scope",),
        COMPRESSION,
        "What shares a table of the format adaptive_codebook. tensor: nothing; blocks: weights of the same name in all blocks.",
        default="tensor",
        choices=("tensor", "blocks"),
        compression=True,
    ),
    Option(
        "lora_correction",
        ("--lora-correction",),
        COMPRESSION,
        "Beside each calibrated layer two small matrices, whose product makes up for most of what rounding has lost on calibration data.",
        kind="switch",
        default=False,
        compression=True,
    ),
    Option(
        "lora_rank",
        ("--lora-rank",),
        COMPRESSION,
        "Rank of --lora-correction: rows of the one matrix, columns of the other.",
        kind="integer",
        default=8,
        compression=True,
    ),
    Option(
        "lora_adapters",
        ("--lora-adapters",),
        COMPRESSION,
        "What the matrices of --lora-correction are stored in.",
        default="int8_asym",
        choices=("int8_asym", "fp16"),
        compression=True,
    ),
    Option(
        "sensitivity_metric",
        ("--sensitivity-metric",),
        COMPRESSION,
        "What a ratio below 1 ranks layers by: one of NNCF's metrics, of which all but the first look at --dataset, or at what --sensitivity "
        "found there; or the loss in nats per token that is predicted from it.",
        default="weight_quantization_error",
        choices=(
            "weight_quantization_error",
            "hessian_input_activation",
            "mean_activation_variance",
            "max_activation_variance",
            "mean_activation_magnitude",
            "predicted_loss",
        ),
        compression=True,
    ),
    Option(
        "sensitivity",
        ("--sensitivity",),
        COMPRESSION,
        "What `llmcomp measure` wrote: each layer's scores for --sensitivity-metric, and the losses of candidates for a budget.",
        kind="path",
        metavar="FILE",
        default_text="measured anew where it is needed",
        compression=True,
        in_recipe=False,
    ),
    Option(
        "dataset",
        ("--dataset",),
        CALIBRATION,
        "Calibration data: a .txt, .jsonl or .parquet file of texts or chats, or a folder of these; wikitext2, c4 or gsm8k, as optimum-intel "
        "has them; another dataset of the hub, ID[:SPLIT]; auto: text that the model itself writes.",
        metavar="DATA",
        default_text="none",
        commands=ALL,
    ),
    Option(
        "dataset_column",
        ("--dataset-column",),
        CALIBRATION,
        "Column of .jsonl, .parquet or a hub dataset that holds texts, or chats as lists of messages with role and content.",
        metavar="NAME",
        default_text="text, else messages",
        commands=ALL,
    ),
    Option(
        "dataset_config",
        ("--dataset-config",),
        CALIBRATION,
        "Configuration of a hub dataset.",
        metavar="NAME",
        default_text="the dataset's own default",
        commands=ALL,
    ),
    Option(
        "num_samples",
        ("--num-samples",),
        CALIBRATION,
        "Rows of calibration data: the first windows of the texts, the first chats.",
        kind="integer",
        default=128,
        commands=ALL,
    ),
    Option(
        "sequence_length",
        ("--sequence-length",),
        CALIBRATION,
        "Tokens of a row. With 128 rows the default gives 32768 tokens, more than the inputs of any layer of an 8 B model, which second "
        "moments need; and few tokens of a row lack context.",
        kind="integer",
        default=256,
        default_text="256, or all positions of a model that has fewer",
        commands=ALL,
    ),
    Option(
        "candidates",
        ("--candidates",),
        CALIBRATION,
        "FORMAT:GROUP,... to tell each layer's loss for; the first is tried for real, the others follow from it. Repeatable.",
        kind="list",
        default_text="the weight format, and 4 bits in groups of 32 to 128 and 8 bits",
        metavar="LIST",
        commands=(MEASURE,),
        in_recipe=False,
    ),
    Option(
        "probe_tokens",
        ("--probe-tokens",),
        CALIBRATION,
        "Tokens of --dataset on which the loss of rounded layers is measured; time grows with it. Statistics are of all rows.",
        kind="integer",
        default=512,
        commands=(MEASURE,),
        in_recipe=False,
    ),
    Option("seed", ("--seed",), COMPRESSION, "Seed of everything random.", kind="integer", default=0, commands=ALL),
    Option(
        "overwrite",
        ("--overwrite",),
        OUTPUT,
        "Replace an existing output.",
        kind="switch",
        default=False,
        in_recipe=False,
        commands=ALL,
    ),
    Option(
        "resume",
        ("--resume",),
        OUTPUT,
        "Go on with what an interrupted export of the same work has left in OUT.partial, and end with the bytes that it would have given.",
        kind="switch",
        default=False,
        in_recipe=False,
        commands=(EXPORT,),
    ),
    Option(
        "no_tokenizer",
        ("--no-tokenizer", "--disable-convert-tokenizer"),
        OUTPUT,
        "Write no tokenizer and do not ask the source for one, except to read --dataset.",
        kind="switch",
        default=False,
        commands=(EXPORT,),
    ),
    Option(
        "verify",
        ("--verify",),
        OUTPUT,
        "Checks before the output appears. structure: every constant, and the first block, the last block and the head run; full: the "
        "whole model runs; auto: full if the forecast says that it fits.",
        default="auto",
        choices=("none", "structure", "full", "auto"),
        commands=(EXPORT,),
    ),
    Option(
        "min_share",
        ("--min-share",),
        OUTPUT,
        "Share of the weights that are to get a format which must get it; where channel sizes leave fewer the model is written all the same, and "
        "the command exits with 13. 0 never minds, 1 minds every layer.",
        kind="number",
        default=0.9,
        metavar="SHARE",
        commands=(EXPORT,),
    ),
    Option(
        "eval",
        ("--eval",),
        OUTPUT,
        "Judge the result against the checkpoint, which takes the memory to run that in float32: KL and perplexity on a few windows of text "
        "go into the report.",
        kind="switch",
        default=False,
        commands=(EXPORT,),
    ),
    Option(
        "eval_dataset",
        ("--eval-dataset",),
        OUTPUT,
        "Text file that --eval and --max-loss judge on; never the calibration data.",
        kind="path",
        metavar="FILE",
        default_text="text that Python itself ships",
        commands=(EXPORT,),
    ),
    Option(
        "dry_run",
        ("--dry-run",),
        OUTPUT,
        "Say size, memory and time, and write nothing.",
        kind="switch",
        default=False,
        commands=(EXPORT,),
        in_recipe=False,
    ),
    Option("quiet", ("--quiet",), RUN, "Warnings and errors only.", kind="switch", default=False, commands=(EXPORT,), in_recipe=False),
    Option(
        "json_log",
        ("--json-log",),
        RUN,
        "Also write progress as one JSON object a line.",
        kind="path",
        metavar="FILE",
        commands=(EXPORT,),
        in_recipe=False,
    ),
)

BY_FIELD: dict[str, Option] = {option.field: option for option in OPTIONS}
