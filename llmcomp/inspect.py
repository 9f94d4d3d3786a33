"""What an OpenVINO folder holds: every weight's format, read from the XML alone."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from llmcomp.errors import CheckpointError
from llmcomp.graph.ir import IR

SMALL = 4096
"""Float constants of fewer elements are norms and tables, not weights; of those that are compressed all are."""
FLOATING = {"keep", "fp16", "fp32", "f32", "f16", "bf16"}
"""Formats and element types that compress nothing."""


@dataclass(frozen=True)
class Row:
    """Weights of one kind: storage type, elements, bytes with scales and zero points, number of constants."""

    element_type: str
    group_size: int | None
    count: int
    weights: int
    bytes: int


@dataclass(frozen=True)
class Inspection:
    rows: tuple[Row, ...]
    files: Mapping[str, int]
    """Name of each .bin -> its bytes."""
    bits_per_weight: float
    made_by: str
    rt_info: Mapping[str, Any]
    report: Mapping[str, Any] | None

    @property
    def bin_bytes(self) -> int:
        return sum(self.files.values())


def inspect_folder(folder: Path) -> Inspection:
    """Read `openvino_model.xml` of a folder, or those of its submodels, whoever wrote them.

    Raises:
        CheckpointError: no IR there, or one that cannot be parsed.
    """
    files = sorted(folder.glob("openvino_*model.xml"))
    if not files:
        raise CheckpointError(str(folder), "it holds no openvino_model.xml", "Give a folder that an export has written")
    kinds: dict[tuple[str, int | None], list[tuple[int, int]]] = {}
    for xml in files:
        try:
            ir = IR.read(xml)
        except Exception as error:
            raise CheckpointError(str(xml), f"it is not a readable IR ({error})", "Export it again") from None
        for number in ir.constants():
            shape = ir.output_shape(number)
            kind = ir.data(number)["element_type"]
            small = prod(shape) < SMALL and kind not in PLAIN
            if small or len(shape) < 2 or ir.output_type(number) in ("I64", "I32", "BOOL") or _is_scale(ir, number):
                continue
            extra, group = _companions(ir, number)
            stored = int(ir.data(number)["size"]) + extra
            kinds.setdefault((kind, group), []).append((prod(shape), stored))
    rows = tuple(Row(t, g, len(v), sum(n for n, _ in v), sum(b for _, b in v)) for (t, g), v in sorted(kinds.items(), key=str))
    info = _rt_info(ir)
    total = sum(r.weights for r in rows)
    return Inspection(
        rows,
        {xml.with_suffix(".bin").name: xml.with_suffix(".bin").stat().st_size for xml in files},
        8 * sum(r.bytes for r in rows) / total if total else 0.0,
        next((f"{k} {info[k].get('version', '')}".strip() for k in ("llmcomp", "nncf") if k in info), "unknown"),
        info,
        _report(folder / "report.json"),
    )


PLAIN = {
    "u8": "int8",
    "i8": "int8",
    "u4": "int4",
    "i4": "int4",
    "u3": "int3",
    "u2": "int2",
    "f8e4m3": "fp8",
    "f8e5m2": "fp8",
    "f4e2m1": "fp4",
}
"""What formats of these element types are called in short."""


def compressed_layers(folder: Path) -> str:
    """What has been compressed in a folder: "int8 (24 layers), ...", by the report's formats where there is one; empty if nothing.

    Raises:
        CheckpointError: as `inspect_folder`.
    """
    found, counts = inspect_folder(folder), Counter[str]()
    for layer in found.report["layers"] if found.report else ():
        counts[str(layer["format"])] += 1
    for row in () if found.report else found.rows:
        counts[PLAIN.get(row.element_type, row.element_type)] += row.count
    return ", ".join(f"{name} ({n} layer{'s' if n > 1 else ''})" for name, n in sorted(counts.items()) if name not in FLOATING)


def _report(path: Path) -> Mapping[str, Any] | None:
    """Our report, where there is one; a file of that name from another tool is none."""
    try:
        found = json.loads(path.read_text(encoding="utf8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and {"schema", "source", "layers", "verified"} <= found.keys() else None


CHAIN = ("Convert", "Gather", "Subtract", "Multiply", "Reshape")
"""Operations between a stored weight and what multiplies by it."""


def _is_scale(ir: IR, number: int) -> bool:
    """It enters a chain from the side: as the second input of a Multiply or Subtract, whatever is done to it before."""
    node, port = number, 0
    while ir.kind(node) not in ("Multiply", "Subtract") or port == 0:
        readers = _chain_readers(ir, node)
        if not readers:
            return False
        node, port = readers[0]
    return True


def _chain_readers(ir: IR, node: int) -> list[tuple[int, int]]:
    """(layer, port) of what reads a node as part of a chain. A Gather with it as its table is an embedding, the end of the chain."""
    return [(r, p) for r, p in ir.readers(node) if ir.kind(r) in CHAIN and not (ir.kind(r) == "Gather" and p == 0)]


def _companions(ir: IR, number: int) -> tuple[int, int | None]:
    """(bytes of the scales, zero points and tables on a weight's chain, group size or None per channel)."""
    node, shape, grouped = number, ir.output_shape(number), False
    while True:
        readers = _chain_readers(ir, node)
        if not readers:
            break
        node = readers[0][0]
        grouped = grouped or ir.kind(node) == "Reshape"
    stored = {c: int(ir.data(c)["size"]) for c in _constants_below(ir, node) if ir.output_type(c) not in ("I64", "I32")}
    return sum(stored.values()) - stored.get(number, 0), shape[-1] if len(shape) > 2 and grouped else None


def _constants_below(ir: IR, node: int) -> set[int]:
    """The constants that a node is made of, if it is made of constants alone."""
    found, stack = set(), [node]
    while stack:
        current = stack.pop()
        if ir.kind(current) == "Const":
            found.add(current)
        elif ir.kind(current) not in CHAIN:
            return set()
        stack.extend(source for source, _ in ir.inputs[current].values())
    return found


def _rt_info(ir: IR) -> dict[str, Any]:
    root = ir.root.find("rt_info")
    return {} if root is None else {e.tag: _value(e) for e in root if e.tag != "info"}


def _value(element: Any) -> Any:
    return {child.tag: _value(child) for child in element} if len(element) else element.attrib.get("value", "")
