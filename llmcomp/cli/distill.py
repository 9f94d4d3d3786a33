"""`llmcomp distill MODEL OUT`."""

from __future__ import annotations

import argparse
from typing import Any

from llmcomp.cli.arguments import add_arguments, options_of
from llmcomp.options.table import EXPORT

DESCRIPTION = """Compress a checkpoint as `llmcomp export` would, train the result to answer as the float model does, and write it as a checkpoint
without adapters, which `llmcomp export OUT IR --weight-format keep` makes an OpenVINO model of. Options of export describe the start."""

TRAINING: dict[str, dict[str, Any]] = {
    "train_dataset": {"metavar": "DATA", "help": "Text to train on. Default: that of --dataset."},
    "train_tokens": {"type": int, "help": "Tokens of that text, which the teacher answers to once each. Default: 262144."},
    "train_length": {"type": int, "help": "Tokens of a row. Default: 256."},
    "passes": {"type": float, "help": "Times that the text is gone through. Default: 1."},
    "minutes": {"type": float, "help": "Of training, instead of --passes."},
    "train": {
        "choices": ("lora", "nls", "weights", "scales"),
        "help": "lora: adapters that vanish into the codes; nls: these, each layer's rank searched for; weights: the float weights themselves; "
        "scales: scales and norms under frozen codes. "
        "Default: lora.",
    },
    "rank": {"type": int, "help": "Of adapters. Default: 64."},
    "ranks": {"metavar": "RANK,RANK,...", "help": "Of nls: what each layer can have. Default: 32,24,16,8."},
    "rank_budget": {"type": int, "help": "Of nls: parameters of all adapters. Default: what the middle rank costs everywhere."},
    "search_evaluations": {"type": int, "help": "Of nls: looks at the held-out rows that the search takes at most. Default: 64."},
    "search_share": {"type": float, "help": "Of nls: the part of the training after which ranks are searched for. Default: 0.3."},
    "loss": {
        "choices": ("kl", "task"),
        "help": "kl: to the float model, of every token of the text; task: cross-entropy of completions behind their prompts, two columns of "
        "--train-dataset. Default: kl.",
    },
    "prompt_column": {"metavar": "NAME", "help": "Of task. Default: prompt."},
    "completion_column": {"metavar": "NAME", "help": "Of task. Default: completion."},
    "chat_template": {"action": "store_true", "help": "Of task: write both as the model's chat template does."},
    "lr": {"type": float, "help": "Highest learning rate of what --train names."},
    "scale_lr": {"type": float, "help": "Highest learning rate of scales, relative to their size; 0: they stand still."},
    "norm_lr": {"type": float, "help": "Highest learning rate of norms and biases; 0: they stand still."},
    "batch_rows": {"type": int, "help": "Rows of a step. Default: 8."},
    "microbatch_rows": {"type": int, "help": "Rows in memory at once. Default: 4."},
    "held_out_rows": {"type": int, "help": "Rows that are not trained on, by which the best state is chosen. Default: 16."},
    "eval_every": {"type": int, "help": "Steps between two looks at them. Default: 20."},
    "patience": {"type": int, "help": "Looks without improvement after which training stops. Default: none."},
    "save_every": {"type": int, "help": "Steps between two states that --resume goes on from. Default: 20."},
    "top_k": {"type": int, "help": "Likeliest tokens of the teacher that are kept for each position. Default: 64."},
    "dtype": {"choices": ("f32", "bf16"), "help": "Of products. Default: f32."},
    "gradient_checkpointing": {"action": "store_true", "help": "Keep less in memory, compute more."},
    "tensorboard": {"action": "store_true", "help": "Write its files beside the log; needs the extra llmcomp[tensorboard]."},
    "train_seed": {"type": int, "help": "Of the order of rows and the adapters' first values. Default: 0."},
    "adapter_start": {"metavar": "PATH", "help": "Adapters of an earlier training of the same start to go on from."},
}


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("distill", help="train back what compression has lost", description=DESCRIPTION)
    add_arguments(parser, EXPORT)
    group = parser.add_argument_group("training")
    for name, settings in TRAINING.items():
        group.add_argument("--" + name.replace("_", "-"), dest=name, default=argparse.SUPPRESS, **settings)
    parser.set_defaults(run=run)


def run(parsed: argparse.Namespace) -> int:
    options = options_of(parsed)
    from llmcomp.options.train_options import TrainOptions

    given = {name: value for name, value in vars(parsed).items() if name in TRAINING}
    if "ranks" in given:
        given["ranks"] = tuple(given["ranks"].split(","))
    training = TrainOptions.of(given)
    from llmcomp.cli.progress import make_progress
    from llmcomp.cli.summary import print_training_forecast
    from llmcomp.distilling import distill, dry_run
    from llmcomp.heap import map_large_arrays

    map_large_arrays()
    with make_progress(options.quiet, options.json_log) as progress:
        if options.dry_run:
            print_training_forecast(dry_run(options, training, progress))
            return 0
        result = distill(options, training, progress)
    if not options.quiet:
        told = f"{result.first_loss:.4f} -> {result.best_loss:.4f} nats a token at step {result.best_step} of {result.steps}"
        print(
            f"{result.output}: held-out {result.measure} {told}"
            if result.improved
            else f"{result.output}: no step improved on the start, which it holds"
        )
    return 0
