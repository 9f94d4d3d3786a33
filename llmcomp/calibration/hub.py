"""Datasets of the hub, streamed through `datasets`: no more is fetched than is read, and only formats that cannot run code."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from llmcomp.calibration.items import TEXT, Record
from llmcomp.checkpoint.ask import ASK_SECONDS, is_network, tell, within
from llmcomp.errors import CalibrationError, HubError
from llmcomp.options.rules import did_you_mean

READERS = ("arrow", "csv", "json", "parquet", "text")
"""Builders of `datasets` that read data and nothing else; one of the others unpickles."""
REMEDY = "Check the network; or give a .txt, .jsonl or .parquet file, or --dataset auto, which need none"


@dataclass(frozen=True)
class HubSet:
    """Which rows of which dataset."""

    repo: str
    config: str | None = None
    split: str = "train"
    data_files: Mapping[str, str] | None = None
    write: Callable[[Mapping[str, Any]], str] | None = None
    """Makes the text, where it is not a column."""
    short: str | None = None
    """The name of `KNOWN` that was asked for."""

    def __str__(self) -> str:
        told = " ".join(part for part in (self.repo, self.config, self.split) if part)
        return f"{self.short} ({told})" if self.short else told


_C4 = HubSet("allenai/c4", data_files={"train": "en/c4-train.00000-of-01024.json.gz"})
KNOWN = {
    "wikitext2": HubSet("Salesforce/wikitext", "wikitext-2-raw-v1"),
    "c4": _C4,
    "c4-new": _C4,
    "gsm8k": HubSet("openai/gsm8k", "main", write=lambda row: f"Question: {row['question']}\nAnswer: {row['answer']}"),
}
"""What optimum-intel calls by these names."""


def find(name: str, config: str | None) -> HubSet:
    """The dataset of `NAME` or `NAME:SPLIT`; one of `KNOWN`, or a hub id whose split is train unless given.

    Raises:
        CalibrationError: not a hub id.
    """
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    repo, _, split = name.partition(":")
    if "=" in split:
        raise CalibrationError(name, f"{split!r} is no split", "Say lengths with --sequence-length and numbers with --num-samples")
    if repo in KNOWN:
        return replace(KNOWN[repo], split=split or KNOWN[repo].split, short=repo)
    try:
        validate_repo_id(repo)
    except HFValidationError:
        raise CalibrationError(name, "no such file or folder, and not a hub id either", "Check the path") from None
    return HubSet(repo, config, split or "train")


def read_hub(dataset: HubSet, token: str | None) -> Iterator[Record]:
    """Its rows, in order; those of the local cache where the hub cannot be reached.

    Raises:
        HubError: unreachable and not cached, unknown, or gated.
        CalibrationError: no such configuration or split, or files of a format that is not read.
    """
    rows = _rows(dataset, token)
    number = 0
    while True:
        with _failures(dataset):
            row = next(rows, None)
        if row is None:
            return
        number += 1
        yield f"{dataset}, row {number}", {TEXT: dataset.write(row)} if dataset.write else row


def _rows(dataset: HubSet, token: str | None) -> Iterator[Mapping[str, Any]]:
    import datasets

    reason = _trouble(dataset.repo, token)
    if reason is not None:
        try:
            with _offline():
                return iter(datasets.load_dataset(dataset.repo, dataset.config, split=dataset.split, data_files=dataset.data_files))
        except Exception:  # the library raises many kinds; each means that there is nothing
            raise HubError(str(dataset), f"no such file or folder; {reason}, and it is not in the cache", REMEDY) from None
    with _failures(dataset):
        builder = datasets.load_dataset_builder(dataset.repo, dataset.config, data_files=dataset.data_files, token=token)
        reader = type(builder).__module__.split(".")[-1]
        if reader not in READERS:
            raise CalibrationError(str(dataset), f"its files are for {reader!r}, not {', '.join(READERS)}", "Choose a dataset of texts")
        streamed: Iterable[Mapping[str, Any]] = builder.as_streaming_dataset(dataset.split)
        return iter(streamed)


def _trouble(repo: str, token: str | None) -> str | None:
    """Why the hub cannot be asked; None if it has the dataset."""
    import datasets
    import huggingface_hub as hub
    from huggingface_hub import constants, errors

    if constants.HF_HUB_OFFLINE or datasets.config.HF_HUB_OFFLINE:
        return "the hub is not asked (offline)"
    try:
        within(ASK_SECONDS, lambda: hub.HfApi().dataset_info(repo, token=token, timeout=ASK_SECONDS))
    except errors.GatedRepoError:
        raise HubError(repo, "its owner asks you to accept terms first", "Accept them on the dataset's page, then give --token") from None
    except errors.RepositoryNotFoundError:
        raise HubError(
            repo,
            "no such file or folder, and the hub knows no such dataset, or it is private",
            did_you_mean(repo, KNOWN),
        ) from None
    except Exception as error:
        if not is_network(error):
            raise
        return f"the hub cannot be reached ({tell(error)})"
    return None


@contextmanager
def _failures(dataset: HubSet) -> Iterator[None]:
    """Failures of `datasets`, which has many kinds, in ours."""
    try:
        yield
    except (CalibrationError, HubError):
        raise
    except Exception as error:
        if is_network(error) and not isinstance(error, FileNotFoundError):
            raise HubError(str(dataset), f"the download broke off ({tell(error)})", REMEDY) from None
        raise CalibrationError(
            str(dataset), f"it cannot be read ({tell(error)})", "Give its split as NAME:SPLIT, its configuration with --dataset-config"
        ) from None


@contextmanager
def _offline() -> Iterator[None]:
    """The hub's client and `datasets` look into their cache alone; both read the environment only when they are imported."""
    import datasets
    import huggingface_hub

    places: list[Any] = [huggingface_hub.constants, datasets.config]
    before = [place.HF_HUB_OFFLINE for place in places]
    try:
        for place in places:
            place.HF_HUB_OFFLINE = True
        yield
    finally:
        for place, value in zip(places, before, strict=True):
            place.HF_HUB_OFFLINE = value
