"""Hub ids, with the client's answers given by the test: no network."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants

from llmcomp import checkpoint
from llmcomp.checkpoint import hub
from llmcomp.errors import CheckpointError, HubError
from tests.tiny import tiny_llama

COMMIT = "a" * 40


@pytest.fixture(autouse=True)
def online(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)


def put_in_cache(cache: Path) -> Path:
    snapshot = cache / "models--some--model" / "snapshots" / COMMIT
    tiny_llama(snapshot)
    refs = cache / "models--some--model" / "refs"
    refs.mkdir()
    (refs / "main").write_text(COMMIT)
    return snapshot


def answer(monkeypatch: pytest.MonkeyPatch, files: list[str] | Exception) -> None:
    """What the hub says about any model."""

    def model_info(*_: Any, **__: Any) -> Any:
        if isinstance(files, Exception):
            raise files
        return SimpleNamespace(siblings=[SimpleNamespace(rfilename=f) for f in files])

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)


def refused(words: str, kind: type[Exception] = HubError, source: str = "some/model", **arguments: Any) -> None:
    with pytest.raises(kind, match=words) as caught:
        checkpoint.open(source, **arguments)
    assert source in str(caught.value)


def test_offline_from_the_cache_and_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused("offline.*not in the cache", cache_dir=tmp_path, offline=True)
    snapshot = put_in_cache(tmp_path)
    opened = checkpoint.open("some/model", cache_dir=tmp_path, offline=True)
    assert opened.source == "some/model" and opened.folder == snapshot
    assert checkpoint.open(**opened.open_arguments).tensors == opened.tensors
    refused("not in the cache", cache_dir=tmp_path, offline=True, revision="other")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert checkpoint.open("some/model", cache_dir=tmp_path).folder == snapshot


def test_unreachable_takes_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch, ConnectionError("no route"))
    refused("cannot be reached .no route.*not in the cache", cache_dir=tmp_path)
    snapshot = put_in_cache(tmp_path)
    assert checkpoint.open("some/model", cache_dir=tmp_path).folder == snapshot


def test_a_hub_that_does_not_answer_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forever = threading.Event()
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_, **__: forever.wait(60))
    monkeypatch.setattr(hub, "ASK_SECONDS", 0.3)
    begin = time.perf_counter()
    refused("no answer within 0.3 s", cache_dir=tmp_path)
    # Ten times the limit is still far from the minute for which the hub is silent.
    assert time.perf_counter() - begin < 3
    forever.set()


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (["pytorch_model.bin", "config.json"], "only .bin.*pickles are never opened"),
        (["model.Q4.gguf"], "only .gguf.*give its path"),
        (["original/a.safetensors", "consolidated.safetensors", "config.json"], "no safetensors"),
        (["README.md"], "no weights"),
        (["adapter_model.safetensors", "adapter_config.json"], "no config.json.*adapter"),
    ],
)
def test_repositories_that_are_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: list[str], words: str) -> None:
    answer(monkeypatch, files)
    refused(words, CheckpointError, cache_dir=tmp_path)


def test_what_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub.utils import filter_repo_objects

    files = ["model.safetensors", "config.json", "tokenizer.json", "chat_template.jinja", "merges.txt", "tokenizer.model", "modeling_x.py"]
    others = ["consolidated.safetensors", "original/x.safetensors", "pytorch_model.bin", "onnx/config.json", "README.md", "model.gguf"]
    snapshot = put_in_cache(tmp_path)
    asked: dict[str, Any] = {}

    def download(_: str, **arguments: Any) -> str:
        asked.update(arguments)
        return str(snapshot)

    answer(monkeypatch, files + others)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    opened = checkpoint.open("some/model", revision="v2", token="secret", cache_dir=tmp_path)
    assert (asked["revision"], asked["token"], asked["cache_dir"]) == ("v2", "secret", tmp_path)
    taken = filter_repo_objects(files + others, allow_patterns=asked["allow_patterns"], ignore_patterns=asked["ignore_patterns"])
    assert list(taken) == files
    assert "secret" not in str(opened.open_arguments)


def test_a_download_that_breaks_off_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where an older snapshot is in the cache: the hub had answered, so that is not what was asked for."""
    put_in_cache(tmp_path)
    answer(monkeypatch, ["model.safetensors", "config.json"])

    def download(*_: Any, **__: Any) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    refused("broke off.*No space left", cache_dir=tmp_path)


@pytest.mark.parametrize("source", ["some--x/model", "some..x/model", "model."])
def test_malformed_ids(tmp_path: Path, source: str) -> None:
    refused("not a valid hub id", source=source, cache_dir=tmp_path)


@pytest.mark.parametrize(("name", "words"), [("Gated", "terms"), ("RevisionNotFound", "no revision"), ("RepositoryNotFound", "no such")])
def test_refusals_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, words: str) -> None:
    import httpx
    from huggingface_hub import errors

    kind = {"Gated": "GatedRepoError"}.get(name, f"{name}Error")
    response = httpx.Response(404, request=httpx.Request("GET", "https://hub.invalid"))
    answer(monkeypatch, getattr(errors, kind)("no", response=response))
    refused(words, cache_dir=tmp_path, revision="v9")
