"""Reading a written model back: its bytes against the journal, its structure against the runtime, and a run of its parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import openvino as ov
import psutil
from numpy.typing import NDArray

from llmcomp.errors import VerificationError
from llmcomp.graph.blocks import Cut, Cutter
from llmcomp.graph.ir import IR
from llmcomp.graph.layer import Layer
from llmcomp.graph.model import flat_rows
from llmcomp.writing import journal
from llmcomp.writing.journal import checksum
from llmcomp.writing.layout import Layout, Slot
from llmcomp.writing.stream import leading_bytes

TOKENS = 8
PROPERTIES = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"}
FULL_FACTOR = 3.0
"""Compiling and running took 1.2 (1.24 B parameters) to 1.7 times (135 M) the .bin in anonymous memory, beside the mapped file; the rest is margin."""


def choose(mode: str, nbytes: int) -> str:
    """What `auto` means for a .bin of `nbytes`: a full run where the forecast fits into half of the free memory."""
    if mode != "auto":
        return mode
    return "full" if FULL_FACTOR * nbytes < psutil.virtual_memory().available / 2 else "structure"


def verify(
    mode: str,
    xml: Path,
    journal_file: Path,
    layers: Sequence[Layer],
    layout: Layout,
    tail: Mapping[str, Slot],
    vocabulary: int,
    example: Path | None = None,
) -> str:
    """Check the model at `xml`; returns what was done, in words. `example` has inputs for one that is no stateful text model.

    `mode` is none, structure (bytes, bounds; first block, last block and head run) or full (bytes, bounds; all of it runs).

    Raises:
        VerificationError: with what disagrees.
    """
    if mode == "none":
        return "not verified"
    check_bytes(xml.with_suffix(".bin"), journal_file, layers, layout, tail)
    check_bounds(xml)
    if mode == "structure":
        ran = _run_parts(xml, layers, vocabulary)
        if ran:
            return f"bytes match their checksums; {ran} ran"
    _run_cut(xml, Cut(ov.Core().read_model(xml), None), vocabulary, "the model", example)
    return "bytes match their checksums; the whole model ran"


def check_bytes(path: Path, journal_file: Path, layers: Sequence[Layer], layout: Layout, tail: Mapping[str, Slot]) -> None:
    """Every tile in the file has the checksum that was taken when it was computed."""
    by_name = {layer.name: layer for layer in layers}
    with path.open("rb") as file:
        for record in journal.read(journal_file):
            layer = by_name.pop(record["layer"])
            wrong = disagreement(file, layer, record, layout, tail)
            if wrong is not None:
                raise VerificationError(layer.name, f"{wrong} are not the bytes that were computed", "Check the disk and repeat.")
    if by_name:
        raise VerificationError(next(iter(by_name)), f"it and {len(by_name) - 1} more layers were never finished", "Please report this.")


def disagreement(file: BinaryIO, layer: Layer, record: Mapping[str, Any], layout: Layout, tail: Mapping[str, Slot]) -> str | None:
    """What of a layer is not in the file as its journal record has it, in words; None if all is."""
    rows, step = flat_rows(layer), record["rows"]
    slots = layout.of(layer.name)
    parts = [slot for slot in slots if slot.part.role == "rows"]
    for i, start in enumerate(range(0, rows, step)):
        total = 0
        for slot in parts:
            begin, end = (leading_bytes(slot.part, row, rows) for row in (start, min(start + step, rows)))
            total = checksum(_read(file, slot.offset + begin, end - begin), total)
        if total != record["sums"][i]:
            return f"rows from {start} on"
    total = 0
    for slot in (tail[layer.name] if layer.name in tail and s.part.name == "scale" else s for s in slots if s.part.role != "rows"):
        total = checksum(_read(file, slot.offset, slot.part.nbytes), total)
    return None if total == record["scale_sum"] else "its scales"


def _read(file: BinaryIO, offset: int, count: int) -> bytes:
    file.seek(offset)
    return file.read(count)


def check_bounds(xml: Path) -> None:
    """Every constant of the XML lies inside the .bin."""
    ir, size = IR.read(xml), xml.with_suffix(".bin").stat().st_size
    for number in (*ir.constants(), *ir.body_constants()):
        data = ir.data(number)
        if int(data["offset"]) + int(data["size"]) > size:
            raise VerificationError(
                ir.name(number) if number >= 0 else "a constant in a loop",
                f"it ends behind the {size} bytes of the .bin",
                "Please report this.",
            )


def _run_parts(xml: Path, layers: Sequence[Layer], vocabulary: int) -> str:
    """Run the first block, the last block and the head; returns what ran, empty if the model has no cuts."""
    blocks = sorted({layer.block for layer in layers if layer.block is not None})
    if not blocks:
        return ""
    nodes = {b: [n for layer in layers if layer.block == b for n in layer.nodes] for b in (blocks[0], blocks[-1])}
    for block in dict.fromkeys((blocks[0], blocks[-1])):
        cutter = Cutter(ov.Core().read_model(xml))
        bounds = cutter.bounds(nodes[block])
        if bounds is None:
            return ""
        start = bounds[0] if block != blocks[0] else None
        _run_cut(xml, cutter.cut(start, bounds[1]), vocabulary, f"block {block}")
    cutter = Cutter(ov.Core().read_model(xml))
    bounds = cutter.bounds(nodes[blocks[-1]])
    assert bounds is not None
    _run_cut(xml, cutter.cut(bounds[1], None), vocabulary, "the head")
    return f"block {blocks[0]}, block {blocks[-1]} and the head"


def _run_cut(xml: Path, cut: Cut, vocabulary: int, what: str, example: Path | None = None) -> None:
    feed = _example(cut.model, example) or _made_up(cut, vocabulary)
    try:
        outputs = ov.Core().compile_model(cut.model, "CPU", PROPERTIES).create_infer_request().infer(feed)
    except RuntimeError as error:
        reason = "OpenVINO does not run it: " + " ".join(str(error).split())[-300:]
        raise VerificationError(f"{xml.name}, {what}", reason, "Check config.json against the weights, or report this") from error
    for output in outputs.values():
        if not np.isfinite(output).all():
            raise VerificationError(
                f"{xml.name}, {what}",
                f"{int((~np.isfinite(output)).sum())} of its outputs are NaN or Inf",
                "Check config.json, try another format, or report this.",
            )


def _example(model: ov.Model, file: Path | None) -> dict[str, NDArray[Any]]:
    """What the model was traced with, if that is all that it needs: pixels, patches and their positions, which must go together."""
    if file is None or model.get_sinks() or not file.is_file():
        return {}
    names = [port.get_any_name() for port in model.inputs]
    with np.load(file) as stored:
        return {name: stored[name] for name in names} if set(names) <= set(stored.files) else {}


def _made_up(cut: Cut, vocabulary: int) -> dict[str, NDArray[Any]]:
    """A few tokens, and what text models want to know about them."""
    rng = np.random.default_rng(0)
    feed: dict[str, NDArray[Any]] = {}
    for port in cut.model.inputs:
        name = port.get_any_name()
        shape = [d.get_length() if d.is_static else TOKENS for d in port.get_partial_shape()]
        if name == cut.hidden:
            feed[name] = rng.normal(size=[1, *shape[1:]]).astype(np.float32)
        elif name in ("input_ids", "decoder_input_ids"):
            feed[name] = rng.integers(0, max(vocabulary, 1), (1, TOKENS))
        elif name == "position_ids":
            feed[name] = np.broadcast_to(np.arange(TOKENS), [*shape[:-2], 1, TOKENS]).copy()
        elif name == "cache_position":
            feed[name] = np.arange(TOKENS)
        elif name == "beam_idx":
            feed[name] = np.zeros(1, np.int32)
        else:
            feed[name] = np.ones([1, *shape[1:]], port.get_element_type().to_dtype())
    return feed
