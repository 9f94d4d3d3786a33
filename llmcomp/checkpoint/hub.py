"""Downloads from the hub: safetensors, configs and tokenizer files of one revision, through huggingface_hub's cache."""

from __future__ import annotations

from pathlib import Path

from llmcomp.errors import CheckpointError, HubError

WANTED = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", "*.model", "*.txt", "*.py"]
UNWANTED = ["*/*", "*.onnx*", "original/*"]
ASK_SECONDS = 4.0
"""How long the hub may take to answer the first question; an export must not hang before it has begun."""
REMEDY = "Check the network, or give a local folder; a model that is in the hub client's cache works offline"


def download(repo: str, revision: str | None, token: str | None, cache_dir: str | Path | None) -> Path:
    """The folder of the snapshot; from the cache alone where the hub cannot be reached.

    Raises:
        HubError: unreachable and not cached, unknown, gated, or refused.
        CheckpointError: the repository has no safetensors weights.
    """
    import huggingface_hub as hub
    from huggingface_hub import constants, errors

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

    if constants.HF_HUB_OFFLINE:
        return _cached(repo, snapshot, "the hub client is set to offline (HF_HUB_OFFLINE)")
    try:
        info = hub.HfApi().model_info(repo, revision=revision, token=token, timeout=ASK_SECONDS)
        names = [f.rfilename for f in info.siblings or []]
        if not any(n.endswith(".safetensors") for n in names):
            held = ", ".join(sorted({Path(n).suffix for n in names if Path(n).suffix in (".bin", ".pt", ".gguf", ".onnx")})) or "no weights"
            raise CheckpointError(repo, f"the repository has no safetensors files ({held})", "Choose a repository with safetensors weights")
        return snapshot(False)
    except errors.GatedRepoError:
        raise HubError(repo, "its owner asks you to accept terms first", "Accept them on the model's page, then give --token") from None
    except errors.RevisionNotFoundError:
        raise HubError(repo, f"it has no revision {revision!r}", "Check --revision") from None
    except errors.RepositoryNotFoundError:
        raise HubError(repo, "the hub knows no such model, or it is private", "Check the name, or give --token") from None
    except errors.HFValidationError as error:
        raise HubError(repo, f"not a valid hub id ({error})", "Check the name, or give a folder that exists") from None
    except (errors.HfHubHTTPError, errors.LocalEntryNotFoundError, OSError) as error:
        return _cached(repo, snapshot, f"the hub cannot be reached ({type(error).__name__})")
    except Exception as error:  # the client's HTTP library has its own hierarchy
        if type(error).__module__.split(".")[0] not in ("httpx", "httpcore", "requests", "urllib3"):
            raise
        return _cached(repo, snapshot, f"the hub cannot be reached ({type(error).__name__})")


def _cached(repo: str, snapshot: object, reason: str) -> Path:
    from huggingface_hub import errors

    try:
        return snapshot(True)  # type: ignore[operator]
    except (errors.LocalEntryNotFoundError, OSError):
        raise HubError(repo, f"{reason}, and the model is not in the cache", REMEDY) from None
