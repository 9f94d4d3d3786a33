from __future__ import annotations

from pathlib import Path

import pytest

from llmcomp.errors import OptionError
from llmcomp.options import ExportOptions, IgnoredScope, Override, build, command_line, load_recipe, recipes
from llmcomp.options.table import BY_FIELD, OPTIONS
from llmcomp.planning import check_options


def test_the_table_and_the_options_agree() -> None:
    fields = ExportOptions.model_fields
    assert set(BY_FIELD) == set(fields)
    for option in OPTIONS:
        if option.field in ("model", "output") or option.default is None:
            continue
        assert fields[option.field].default == option.default, option.field


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"wieght_format": "int4"}, "weight_format"),
        ({"ratio": 1.5}, "ratio"),
        ({"ratio": float("nan")}, "ratio"),
        ({"group_size": 0}, "at least one"),
        ({"group_size": "many"}, "--group-size many"),
        ({"backup_precision": "int3"}, "--backup-precision int3"),
        ({"override": ["q_proj"]}, "PATTERN=FORMAT"),
        ({"override": ["*=int4:0"]}, "PATTERN=FORMAT"),
        ({"ignored_scope": ["re:("]}, "regular expression"),
        ({"ignored_scope": [""]}, "empty"),
        ({"plan": Path("no-such-plan")}, "no such file"),
        ({"plan": Path("p"), "ratio": 0.5}, "--ratio"),
        ({"plan": Path("p"), "recipe": "r"}, "--recipe"),
        ({"target_size": "many"}, "--target-size many: it is not a number"),
        ({"target_size": "3.5Gb/s"}, "--target-size 3.5Gb/s"),
        ({"target_size": "-1GB"}, "--target-size -1GB"),
        ({"target_size": "0"}, "--target-size 0: no model fits"),
        ({"target_bpw": 0}, "--target-bpw 0"),
        ({"max_loss": -0.1}, "--max-loss -0.1"),
        ({"target_size": "1GB", "target_bpw": 4}, "--target-size --target-bpw: each of them"),
        ({"max_loss": 0.1, "ratio": 0.5}, "--ratio 0.5: --max-loss decides"),
        ({"plan": Path("p"), "target_bpw": 4}, "--target-bpw"),
        ({"plan": Path("p"), "quality": "best"}, "--quality"),
        ({"quality": "worst"}, "--quality worst"),
        ({"eval_dataset": Path("x.txt")}, "--eval-dataset: nothing is judged"),
        ({"eval_dataset": Path("x.txt"), "dataset": "./x.txt", "max_loss": 0.1}, "it is the calibration data"),
        ({"num_samples": 4}, "--num-samples.*--dataset, which is not given"),
        ({"sequence_length": 4}, "--sequence-length.*--dataset, which is not given"),
        ({"dataset_column": "a"}, "--dataset-column.*--dataset, which is not given"),
        ({"dataset_config": "a"}, "--dataset-config.*--dataset, which is not given"),
        ({"dataset": "x.txt", "num_samples": 0}, "--num-samples 0"),
        ({"dataset": "x.txt", "sequence_length": 0}, "--sequence-length 0"),
        ({"dataset": ""}, "--dataset: it is empty"),
        ({"dataset": []}, "--dataset: it is empty"),
        ({"dataset": 5}, "--dataset 5"),
        ({"dataset": "auto", "dataset_column": "a"}, "--dataset-column: with --dataset auto the model writes"),
        ({"dataset": "auto", "dataset_config": "a"}, "--dataset-config: with --dataset auto the model writes"),
    ],
)
def test_what_makes_no_sense_is_named(values: dict[str, object], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        ExportOptions(model="m", **values)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("3.5GB", 3_500_000_000),
        ("0.7gb", 700_000_000),
        ("900 MiB", 900 * 2**20),
        ("1.5KiB", 1536),
        ("12345", 12345),
        ("2.5", 2),
        (".5kb", 500),
        (12345, 12345),
        ("Same", "same"),
    ],
)
def test_sizes_as_people_write_them(text: object, nbytes: object) -> None:
    assert ExportOptions(model="m", target_size=text).target_size == nbytes


def test_the_token_is_no_ones_business() -> None:
    options = ExportOptions(model="m", token="hf_secret")
    assert "hf_secret" not in repr(options) and "hf_secret" not in options.model_dump_json()


def test_a_report_does_not_hold_the_texts() -> None:
    options = ExportOptions(model="m", dataset=["the rain", "the land"])
    assert options.dataset == ("the rain", "the land") and options.model_dump(mode="json")["dataset"] == "2 texts"
    assert ExportOptions(model="m", dataset="x.txt").model_dump(mode="json")["dataset"] == "x.txt"


def test_data_is_of_use_beside_a_plan(tmp_path: Path) -> None:
    (tmp_path / "plan.json").touch()
    options = ExportOptions(model="m", plan=tmp_path / "plan.json", dataset="x.txt", num_samples=4)
    assert (options.dataset, options.num_samples, options.sequence_length) == ("x.txt", 4, 256)


def test_an_override_may_hold_an_equals_sign() -> None:
    override = Override("re:.*(?=x)=int4_sym:32")
    assert (override.rule.text, override.format, override.group_size) == ("re:.*(?=x)", "int4_sym", 32)
    assert Override("*=int8").group_size is None and Override("a=int4:-1").group_size == -1


def test_a_scope_in_nncfs_words() -> None:
    scope = IgnoredScope.parse({"names": ["a"], "patterns": ["b.*"], "types": ["Gather"]})
    assert [r.text for r in scope.rules()] == ["a", "re:b.*", "type:Gather"]
    assert IgnoredScope.parse(["a", "re:b.*", "type:Gather"]).rules() == scope.rules()
    with pytest.raises(OptionError, match="names"):
        IgnoredScope.parse({"name": ["a"]})


def recipe(tmp_path: Path, text: str) -> str:
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    return str(path)


def test_the_command_line_overrides_a_recipe_and_extends_its_lists(tmp_path: Path) -> None:
    name = recipe(tmp_path, "weight-format: int8\ngroup_size: 32\nignored_scope: [a]\n")
    options = build({"model": "m", "recipe": name, "weight_format": "nf4", "ignored_scope": ["b"]})
    assert (options.weight_format, options.group_size) == ("nf4", 32)
    assert [r.text for r in options.ignored_scope.rules()] == ["a", "b"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("wieght_format: int4", "weight_format"),
        ("model: x", "one run"),
        ("token: x", "one run"),
        ("trust_remote_code: true", "one run"),
        ("- a", "not a mapping"),
        ("a: [", "not YAML"),
        ("ratio: 0.5\nratio: 0.6", "twice"),
        ("!!python/object/apply:os.system ['true']", "not YAML"),
    ],
)
def test_a_recipe_that_cannot_be(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(OptionError, match=words):
        load_recipe(recipe(tmp_path, text))


def test_the_shipped_recipes() -> None:
    assert {"laptop-int4", "near-lossless-int8", "mixed-int4-int8"} <= set(recipes())
    for name in recipes():
        build({"model": "m", "recipe": name})
    with pytest.raises(OptionError, match="laptop-int4"):
        load_recipe("laptop-int5")


def test_a_quality_is_the_recipe_of_that_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "best").write_text("weight_format: int8")
    for name in ("fast", "balanced", "high", "best"):
        options = build({"model": "m", "quality": name})
        assert options.model_dump(exclude={"quality", "recipe"}) == build({"model": "m", **load_recipe(str(recipes()[name]))}).model_dump(
            exclude={"quality", "recipe"}
        )
        assert options.dataset == (None if name == "fast" else "auto")
    assert build({"model": "m", "quality": "high", "dataset": "x.txt", "gptq": False}).model_dump() | {"num_samples": 128} == (
        build({"model": "m", "quality": "balanced", "dataset": "x.txt"}).model_dump() | {"quality": "high"}
    )
    with pytest.raises(OptionError, match="--quality high brings --awq, --scale-estimation, --gptq"):
        check_options(build({"model": "m", "quality": "high", "weight_format": "int8"}))
    with pytest.raises(OptionError, match="--quality: it is a recipe"):
        build({"model": "m", "quality": "high", "recipe": "laptop-int4"})


def test_a_budget_replaces_the_recipes(tmp_path: Path) -> None:
    assert build({"model": "m", "quality": "best"}).budget == "target_size"
    assert build({"model": "m", "quality": "best", "target_bpw": 5}).budget == "target_bpw"
    assert build({"model": "m", "quality": "best", "ratio": 0.8}).budget is None
    assert build({"model": "m", "quality": "best", "target_size": "1GB"}).target_size == 10**9


def test_the_recipe_of_a_bare_export_is_what_it_says() -> None:
    named, bare = build({"model": "m", "recipe": "laptop-int4"}), build({"model": "m"})
    differing = {f for f in ExportOptions.model_fields if getattr(named, f) != getattr(bare, f)}
    assert differing == {"recipe", "group_size"} and named.group_size == 64


def test_the_command_of_a_bare_export_has_no_options() -> None:
    assert command_line(build({"model": "m", "output": Path("o")})) == "llmcomp export m o"


@pytest.mark.parametrize("field", ["output", "adapter", "plan", "dataset"])
def test_a_name_that_cannot_be_written_down_is_refused(field: str) -> None:
    with pytest.raises(OptionError, match="no UTF-8"):
        build({"model": "m", "output": Path("o"), field: "x" + chr(0xDCFF)})


def test_the_command_of_a_report_gives_the_same_options() -> None:
    import argparse
    import shlex

    from llmcomp.cli.arguments import add_arguments, options_of

    given = build({
        "model": "a b", "output": Path("o"), "quality": "high", "weight_format": "int4_sym", "override": ["*.o_proj=int8", "x=keep"],
        "ignored_scope": ["re:a.*", "type:Gather"], "dataset": "x.txt", "num_samples": 4, "token": "secret", "target_bpw": 4.5, "no_tokenizer": True,
    })  # fmt: skip
    command = command_line(given)
    assert "secret" not in command and command.startswith("llmcomp export 'a b' o ")
    parser = argparse.ArgumentParser()
    add_arguments(parser, "export")
    again = options_of(parser.parse_args(shlex.split(command)[2:]))
    assert again.model_dump(exclude={"token", "quality"}) == given.model_dump(exclude={"token", "quality"})
