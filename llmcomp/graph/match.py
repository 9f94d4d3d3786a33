"""Which checkpoint tensor a parameter of the architecture is, and what to say when there is none."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable

from llmcomp.errors import ArchitectureError


def find_tensor(name: str, tensors: Collection[str], base_prefix: str = "") -> str | None:
    """The stored name of parameter `name`: as it is, or with the base model's prefix added or taken away, as transformers saves both."""
    candidates = [name]
    if base_prefix:
        candidates.append(f"{base_prefix}.{name}")
        if name.startswith(f"{base_prefix}."):
            candidates.append(name[len(base_prefix) + 1 :])
    return next((c for c in candidates if c in tensors), None)


def near_names(name: str, tensors: Iterable[str], count: int = 1) -> list[str]:
    """The stored names most like `name`. Layer numbers must agree: the same tensor of another layer is never the likely match."""
    numbers = re.findall(r"\d+", name)
    same = [t for t in tensors if re.findall(r"\d+", t) == numbers]
    return difflib.get_close_matches(name, same, n=count, cutoff=0.5)


def missing_tensors_error(missing: Collection[str], free: Collection[str], source: str) -> ArchitectureError:
    """The error for parameters that the checkpoint does not hold, each with its likely match among the stored tensors that nothing else is (`free`)."""
    lines = []
    for name in sorted(missing)[:5]:
        near = near_names(name, free)
        lines.append(f"{name} (stored as {near[0]}?)" if near else name)
    more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
    return ArchitectureError(
        source,
        f"{len(missing)} tensor{'s' if len(missing) > 1 else ''} that the architecture needs {'are' if len(missing) > 1 else 'is'} not in it: "
        + ", ".join(lines)
        + more,
        "Rename the tensors, or check `architectures` in config.json; nothing is ever re-initialised.",
    )
