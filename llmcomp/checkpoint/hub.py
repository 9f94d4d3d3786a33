"""Downloads from the hub: safetensors, configs and tokenizer files of one revision, through huggingface_hub's cache."""

from __future__ import annotations

from pathlib import Path

from llmcomp.checkpoint.ask import ASK_SECONDS, is_network, tell, within
from llmcomp.errors import CheckpointError, HubError

WANTED = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt", "*.py"]
UNWANTED = ["*/*", "consolidated*.safetensors"]
"""Other layouts of the same weights: subfolders, and the files of Mistral's own runtime."""
REMEDY = "Check the network, or give a local folder; a model that is in the hub client's cache works offline"


def download(repo: str, revision: str | None, token: str | None, cache_dir: str | Path | None, offline: bool) -> Path:
    """The folder of the snapshot; from the cache alone when `offline`, or where the hub cannot be reached.

    Raises:
        HubError: unreachable and not cached, unknown, gated, refused, or the download broke off.
        CheckpointError: the repository has no safetensors weights.
    """
    import huggingface_hub as hub
    from huggingface_hub import constants, errors
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repo)
    except errors.HFValidationError as error:
        raise HubError(repo, f"no such folder, and not a valid hub id either ({error})", "Check the name") from None

    def snapshot(local: bool) -> Path:
        return Path(
            hub.snapshot_download(
                repo,
                revision=revision,
                token=token,
                cache_dir=cache_dir,
                allow_patterns=WANTED,
                ignore_patterns=UNWANTED,
                local_files_only=local,
            )
        )

    def cached(reason: str) -> Path:
        try:
            return snapshot(True)
        except (errors.LocalEntryNotFoundError, OSError):
            raise HubError(repo, f"no such folder; {reason}, and the model is not in the cache", REMEDY) from None

    if offline or constants.HF_HUB_OFFLINE:
        return cached("the hub is not asked (offline)")
    try:
        info = within(ASK_SECONDS, lambda: hub.HfApi().model_info(repo, revision=revision, token=token, timeout=ASK_SECONDS))
    except errors.GatedRepoError:
        raise HubError(repo, "its owner asks you to accept terms first", "Accept them on the model's page, then give --token") from None
    except errors.RevisionNotFoundError:
        raise HubError(repo, f"it has no revision {revision!r}", "Check --revision") from None
    except errors.RepositoryNotFoundError:
        raise HubError(
            repo, "no such folder, and the hub knows no such model, or it is private", "Check the name, or give --token"
        ) from None
    except Exception as error:
        if not is_network(error):
            raise
        return cached(f"the hub cannot be reached ({tell(error)})")
    _check_files(repo, [f.rfilename for f in info.siblings or []])
    try:
        return snapshot(False)
    except Exception as error:
        if not is_network(error):
            raise
        raise HubError(repo, f"the download broke off ({tell(error)})", "Repeat the command: files that are complete are kept") from None


def _check_files(repo: str, names: list[str]) -> None:
    weights = [n for n in names if n.endswith(".safetensors") and "/" not in n and not n.startswith("consolidated")]
    if not weights:
        kinds = {Path(n).suffix for n in names} & {".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack"}
        held = f"only {', '.join(sorted(kinds))}" if kinds else "no weights"
        remedy = "Choose a repository with safetensors weights; of a .gguf, download the file and give its path; pickles are never opened"
        raise CheckpointError(repo, f"the repository has no safetensors files of a Hugging Face model ({held})", remedy)
    if "config.json" not in names:
        raise CheckpointError(repo, "the repository has no config.json", "Choose the repository of the whole model; an adapter is not one")
