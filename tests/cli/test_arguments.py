"""The option table as arguments, and the plan command's output file; both before any model is opened."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from llmcomp.cli import main
from llmcomp.cli.arguments import add_arguments, options_of
from llmcomp.options import ExportOptions
from llmcomp.options.table import CALIBRATION, EXPORT, OPTIONS


def parsed(*arguments: str) -> ExportOptions:
    parser = argparse.ArgumentParser()
    add_arguments(parser, EXPORT)
    return options_of(parser.parse_args(arguments))


def test_every_option_reaches_its_field() -> None:
    samples = {"switch": "", "number": "0.5", "integer": "32", "text": "x", "path": "x", "list": "x=int4"}
    for option in OPTIONS:
        # Files, and a recipe's fields beside its own, are told apart elsewhere.
        if not option.flags or option.field in ("plan", "recipe", "quality", "sensitivity") or EXPORT not in option.commands:
            continue
        for flag in option.flags:
            sample = "1GB" if option.field == "target_size" else samples[option.kind]
            value = [] if option.kind == "switch" else [option.choices[0] if option.choices else sample]
            # How data is read is said of data alone, and what to judge on where something is judged.
            beside = ["--dataset", "x"] if option.group == CALIBRATION else ["--eval"] if option.field == "eval_dataset" else []
            if option.field in ("lora_rank", "lora_adapters"):
                beside = ["--lora-correction"]
            got = parsed("m", "out", *beside, flag, *value)
            assert got.model_fields_set == {"model", "output", option.field, *(name.strip("-").replace("-", "_") for name in beside[:1])}, (
                flag
            )


def test_what_is_not_given_is_left_to_the_defaults() -> None:
    assert parsed("m", "out") == ExportOptions(model="m", output=Path("out"))


def test_the_command_line_switches_off_what_a_recipe_switches_on(tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text("sym: true\nall_layers: true\noverride: ['*a=int8']\nignored_scope: [b]")
    got = parsed("m", "out", "--recipe", str(recipe), "--no-sym", "--override", "*c=keep", "--ignored-scope", "type:Gather")
    assert (got.sym, got.all_layers) == (False, True)
    assert got.override == ("*a=int8", "*c=keep") and got.ignored_scope.names == ("b",) and got.ignored_scope.types == ("Gather",)


def test_a_table_is_that_of_a_budget(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["plan", "no-model", "--table", str(tmp_path / "t.json")]) == 2
    assert "--table: only a budget has one" in capsys.readouterr().err


@pytest.mark.parametrize(("where", "words"), [("edited.json", "it exists"), (".", "not a file"), ("no/plan.json", "folder does not exist")])
def test_a_plan_file_is_not_replaced_unasked(tmp_path: Path, capsys: pytest.CaptureFixture[str], where: str, words: str) -> None:
    (tmp_path / "edited.json").write_text("mine")
    assert main(["plan", str(tmp_path / "no-model"), "-o", str(tmp_path / where)]) == 3
    assert words in capsys.readouterr().err and (tmp_path / "edited.json").read_text() == "mine"


def test_an_existing_plan_file_is_no_obstacle_when_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "edited.json").write_text("mine")
    # It comes as far as the model, which is not there.
    assert main(["plan", str(tmp_path / "no-model"), "-o", str(tmp_path / "edited.json"), "--overwrite"]) == 4
