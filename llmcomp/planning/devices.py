"""What a device computes with packed weights; anything else it decompresses at load, so that the format saves disk and not memory or time."""

from __future__ import annotations

from llmcomp import formats
from llmcomp.formats import Node
from llmcomp.formats.packing import bits
from llmcomp.graph.layer import Layer
from llmcomp.planning.scheme import Scheme, layer_chain

CPU_MATRICES = {"u8", "i8", "u4", "i4", "u2", "nf4", "f4e2m1"}
"""Code types that the CPU plugin's FullyConnected takes packed, whatever their scale's type. Seen in the compiled graphs of OpenVINO 2026.4.1
on AVX2 and on AVX-512 with AMX; f8e4m3, u3 and tables looked up by a Gather became f32 constants on both."""
CPU_STACKS = {"u8", "i8", "u4", "i4"}
"""The same for stacks of experts (GatherMatmul)."""


def runs_packed(layer: Layer, scheme: Scheme) -> bool:
    """Whether the CPU plugin keeps a layer's codes packed."""
    if scheme.is_float:
        return True
    known = CPU_STACKS if len(layer.shape) > 2 else CPU_MATRICES
    return formats.get(scheme.format).code_type in known and not _looks_up(layer_chain(layer, scheme))


def ragged(layer: Layer, scheme: Scheme) -> str:
    """Why the CPU plugin would compute a layer wrongly, empty if it would not.

    It misreads packed groups, and memory behind them, where a size is no power of two (OpenVINO 2026.4.1 on AVX-512 with AMX: 4 bits in groups of
    9, 40, 48, 80, 144, even 8 bits in groups of 576), and channels that end inside a byte once several tokens come at a time.
    """
    if scheme.is_float or not runs_packed(layer, scheme):
        return ""
    size = layer.shape[-1] if scheme.group_size == -1 else scheme.group_size
    if scheme.group_size != -1:
        return f"groups of {size} are no power of two, which OpenVINO's CPU misreads" if size & (size - 1) else ""
    inside = size * bits(formats.get(scheme.format).code_type) % 8
    return f"channels of {size} end inside a byte, which OpenVINO's CPU misreads" if inside else ""


def _looks_up(node: Node) -> bool:
    return node.op == "Gather" or any(_looks_up(i) for i in node.inputs)
