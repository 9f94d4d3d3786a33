"""The small files of a bundle: configs, chat template, and an openvino_config.json that tells the truth."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from llmcomp import formats
from llmcomp.checkpoint import Checkpoint
from llmcomp.graph.skeleton import Skeleton
from llmcomp.options import ExportOptions
from llmcomp.planning import Plan


def write_side_files(checkpoint: Checkpoint, skeleton: Skeleton, plan: Plan, options: ExportOptions, folder: Path) -> None:
    """Write config.json, generation_config.json and openvino_config.json, and copy the source's other side files."""
    config = checkpoint.config if skeleton.config is None else json.loads(skeleton.config.read_text(encoding="utf8"))
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf8")
    if checkpoint.generation_config is not None:
        (folder / "generation_config.json").write_text(json.dumps(checkpoint.generation_config, indent=2) + "\n", encoding="utf8")
    for path in checkpoint.side_files:
        if not (folder / path.name).exists():
            shutil.copyfile(path, folder / path.name)
    (folder / "openvino_config.json").write_text(json.dumps(openvino_config(plan, options), indent=2) + "\n", encoding="utf8")


def openvino_config(plan: Plan, options: ExportOptions) -> dict[str, Any]:
    """optimum's OVConfig as it would be for this plan; `bits` and `group_size` are those that most weights got."""
    main = plan.main_format()
    return {
        "dtype": main.format,
        "quantization_config": {
            "bits": formats.get(main.format).bits if formats.exists(main.format) else None,
            "sym": main.format.endswith("_sym"),
            "group_size": main.group_size,
            "ratio": plan.summary.ratio,
            "all_layers": options.all_layers,
            "backup_precision": options.backup_precision,
            "quant_method": "default",
        },
        "llmcomp": {"layers": plan.counts()},
    }
