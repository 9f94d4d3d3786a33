"""Templates rendered strictly: what is missing is an error, and HTML is escaped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jinja2

HERE = Path(__file__).parent


def render(path: Path, **values: Any) -> str:
    """The template at `path`; an `.html.j2` escapes what it is given, and may extend `frame.html.j2`, which has our pages' style."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([path.parent, HERE]),
        autoescape=path.name.endswith(".html.j2"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["cell"] = lambda text: str(text).replace("\\", "\\\\").replace("|", "\\|").replace("\n", " ")
    environment.filters["mib"] = lambda nbytes: f"{nbytes / 2**20:,.1f} MiB"
    environment.filters["count"] = lambda number: f"{number:,}"
    return environment.get_template(path.name).render(**values)
