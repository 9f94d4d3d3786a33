"""AutoRound, where it stores weights as GPTQ or as AWQ does.

Source: `packing_format` as AutoRound writes it into quantization_config.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmcomp.checkpoint.checkpoint import TensorInfo
from llmcomp.checkpoint.encodings.awq import Awq
from llmcomp.checkpoint.encodings.base import DecodedTensor, Encoding, shown
from llmcomp.checkpoint.encodings.gptq import Gptq

PREFIX = "auto_round:"
PACKED: dict[str, type[Encoding]] = {"auto_gptq": Gptq, "auto_awq": Awq}


class AutoRound(Encoding):
    methods = ("auto-round", "intel/auto-round")
    suffixes = tuple(dict.fromkeys((*Gptq.suffixes, *Awq.suffixes)))

    def __init__(self, settings: Mapping[str, Any], config: Path) -> None:
        super().__init__(settings, config)
        packing = self.setting("packing_format")
        kind = packing.removeprefix(PREFIX) if isinstance(packing, str) else None
        if kind not in PACKED:
            raise self.refused(f"packing_format {shown(packing)} is not read, only {', '.join(PREFIX + name for name in PACKED)}")
        told = {name: value for name, value in settings.items() if name not in ("format", "version", "backend", "dynamic")}
        # Layers with bits of their own are listed there.
        self.packed = PACKED[kind]({**told, "dynamic": settings.get("extra_config")}, config)

    def decoded(self, tensors: Mapping[str, TensorInfo]) -> dict[str, DecodedTensor]:
        return self.packed.decoded(tensors)
