"""Datasets of the hub, with the client's answers given by the test: no network. Rows come from files of this machine."""

from __future__ import annotations

import json
import pickle
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import huggingface_hub
import pytest
from huggingface_hub import constants, errors

from llmcomp.calibration import hub
from llmcomp.errors import CalibrationError, HubError, OptionError
from tests.calibration.helpers import ids, load, rows

real_builder = datasets.load_dataset_builder


@pytest.fixture(autouse=True)
def online(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def answer(monkeypatch: pytest.MonkeyPatch, error: Exception | None = None) -> None:
    """What the hub says about any dataset."""

    def dataset_info(*_: Any, **__: Any) -> Any:
        if error is not None:
            raise error
        return SimpleNamespace()

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", dataset_info)


def serve(monkeypatch: pytest.MonkeyPatch, path: str, **arguments: Any) -> list[tuple[Any, ...]]:
    """Every dataset of the hub is what `datasets` makes of `path`; returns what was asked for."""
    asked: list[tuple[Any, ...]] = []

    def load_dataset_builder(repo: str, config: str | None = None, *, data_files: Any = None, token: str | None = None) -> Any:
        asked.append((repo, config, data_files, token))
        return real_builder(path, config if config == "other" else None, **arguments)

    answer(monkeypatch)
    monkeypatch.setattr(datasets, "load_dataset_builder", load_dataset_builder)
    return asked


def split_files(folder: Path, **splits: list[dict[str, Any]]) -> str:
    folder.mkdir()
    for split, records in splits.items():
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    return str(folder)


def refused(words: str, tmp_path: Path, dataset: str, kind: type[Exception] = HubError, **options: Any) -> None:
    with pytest.raises(kind, match=words):
        load(tmp_path, dataset, **options)


def test_rows_are_streamed_from_the_train_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = split_files(
        tmp_path / "set", train=[{"text": "the rain", "n": "a"}, {"text": "", "n": "b"}, {"text": "on", "n": "c"}], test=[{"text": "land"}]
    )
    asked = serve(monkeypatch, path)
    samples = load(tmp_path, "some/set", token="hf_secret")
    assert rows(samples) == [ids(tmp_path, "the rain\n\non")]
    assert samples.source == "some/set train" and asked == [("some/set", None, None, "hf_secret")]
    assert rows(load(tmp_path, "some/set", dataset_column="n")) == [ids(tmp_path, "a\n\nb\n\nc")]
    assert rows(load(tmp_path, "some/set:test")) == [ids(tmp_path, "land")]
    refused("some/set train, row 1: no column 'm' among text, n", tmp_path, "some/set", CalibrationError, dataset_column="m")
    refused("some/set nothing: it cannot be read .*Available splits.*NAME:SPLIT", tmp_path, "some/set:nothing", CalibrationError)
    refused("some/set other train: .*'other' not found", tmp_path, "some/set", CalibrationError, dataset_config="other")


def test_chats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    talk = [{"role": "user", "content": "on"}]
    serve(monkeypatch, split_files(tmp_path / "set", train=[{"messages": talk}, {"messages": talk}]))
    assert rows(load(tmp_path, "some/chats", 1)) == [ids(tmp_path, "<|user|>on<|end|>")]


@pytest.mark.parametrize(
    ("name", "repo", "config", "files"),
    [
        ("wikitext2", "Salesforce/wikitext", "wikitext-2-raw-v1", None),
        ("c4", "allenai/c4", None, {"train": "en/c4-train.00000-of-01024.json.gz"}),
        ("c4-new", "allenai/c4", None, {"train": "en/c4-train.00000-of-01024.json.gz"}),
        ("gsm8k", "openai/gsm8k", "main", None),
    ],
)
def test_optimums_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, repo: str, config: str | None, files: Any) -> None:
    record = {"question": "1 + 1?", "answer": "2"} if name == "gsm8k" else {"text": "the rain"}
    asked = serve(monkeypatch, split_files(tmp_path / "set", train=[record]))
    wanted = "Question: 1 + 1?\nAnswer: 2" if name == "gsm8k" else "the rain"
    assert rows(load(tmp_path, name, sequence_length=99)) == [ids(tmp_path, wanted)]
    assert asked == [(repo, config, files, None)]
    refused(f"--dataset-column: {name} has its own", tmp_path, name, OptionError, dataset_column="text")
    refused(f"{name}:seq_len=32: .*--sequence-length", tmp_path, f"{name}:seq_len=32", CalibrationError)


def test_optimum_means_the_same_by_them() -> None:
    from optimum.intel.openvino import utils

    assert set(hub.KNOWN) | {"auto"} == utils.PREDEFINED_CAUSAL_LANGUAGE_DATASETS
    wikitext = utils.PREDEFINED_LANGUAGE_DATASETS["wikitext2"]
    known = hub.KNOWN["wikitext2"]
    assert (known.repo, known.config, known.split) == (wikitext["id"], wikitext["name"], wikitext["split"])
    assert hub.KNOWN["c4"].repo == utils.PREDEFINED_LANGUAGE_DATASETS["c4"]["id"]


@pytest.mark.filterwarnings("ignore:The Pandas builder")
def test_pickles_are_not_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Trap:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "opened",))

    (tmp_path / "data.pkl").write_bytes(pickle.dumps(Trap()))
    serve(monkeypatch, "pandas", data_files={"train": str(tmp_path / "data.pkl")})
    refused("some/set train: its files are for 'pandas', not arrow", tmp_path, "some/set", CalibrationError)
    assert not (tmp_path / "opened").exists()


def test_an_unreachable_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch, ConnectionError("no route"))
    refused(
        r"wikitext2 \(.*wikitext-2-raw-v1 train\): .*cannot be reached .no route.*not in the cache.*--dataset auto", tmp_path, "wikitext2"
    )
    kept = datasets.Dataset.from_list([{"text": "the rain"}])
    asked = []

    def cached(*arguments: Any, **named: Any) -> Any:
        # Neither asks the network.
        assert constants.HF_HUB_OFFLINE and datasets.config.HF_HUB_OFFLINE
        asked.append((arguments, named))
        return kept

    monkeypatch.setattr(datasets, "load_dataset", cached)
    assert rows(load(tmp_path, "some/set")) == [ids(tmp_path, "the rain")]
    assert asked == [(("some/set", None), {"split": "train", "data_files": None})]
    assert not constants.HF_HUB_OFFLINE and not datasets.config.HF_HUB_OFFLINE


def test_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    begin = time.perf_counter()
    refused("the hub is not asked .offline., and it is not in the cache", tmp_path, "c4")
    assert time.perf_counter() - begin < 5


def test_a_hub_that_does_not_answer_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forever = threading.Event()
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda *_, **__: forever.wait(60))
    monkeypatch.setattr(hub, "ASK_SECONDS", 0.3)
    begin = time.perf_counter()
    refused("no answer within 0.3 s", tmp_path, "some/set")
    assert time.perf_counter() - begin < 5
    forever.set()


def test_what_the_hub_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import httpx

    response = httpx.Response(404, request=httpx.Request("GET", "https://hub"))
    answer(monkeypatch, errors.RepositoryNotFoundError("404", response=response))
    refused("wikitxt2: no such file or folder, and the hub knows no such dataset.*Did you mean wikitext2", tmp_path, "wikitxt2")
    answer(monkeypatch, errors.GatedRepoError("403", response=response))
    refused("some/set: its owner asks you to accept terms.*--token", tmp_path, "some/set")
    refused("a b: no such file or folder, and not a hub id either", tmp_path, "a b", CalibrationError)
