"""llmcomp makes large language models small: a checkpoint goes in, a compressed OpenVINO model comes out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llmcomp.options.modes import PruneMode, StripFormat
    from llmcomp.training.batch_norm import batch_norm_adaptation
    from llmcomp.training.prune import prune, pruning_statistic
    from llmcomp.training.strip import strip

__all__ = ["PruneMode", "StripFormat", "__version__", "batch_norm_adaptation", "prune", "pruning_statistic", "strip"]
__version__ = "0.1.0"

_HOMES = {
    "PruneMode": "options.modes",
    "StripFormat": "options.modes",
    "batch_norm_adaptation": "training.batch_norm",
    "prune": "training.prune",
    "pruning_statistic": "training.prune",
    "strip": "training.strip",
}


def __getattr__(name: str) -> Any:
    # Imported on first use: most commands need neither torch nor what else a public name brings.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
