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


LEAST_PACKED = 4
"""The smallest group that the CPU plugin reads packed."""


def runs_packed(layer: Layer, scheme: Scheme) -> bool:
    """Whether the CPU plugin keeps a layer's codes packed."""
    if scheme.is_float:
        return True
    known = CPU_STACKS if len(layer.shape) > 2 else CPU_MATRICES
    return formats.get(scheme.format).code_type in known and not _looks_up(layer_chain(layer, scheme))


def ragged(layer: Layer, scheme: Scheme) -> str:
    """Why the CPU plugin would compute a layer wrongly, empty if it would not.

    Of groups that end inside a byte it reads their neighbours' codes, and memory behind them (OpenVINO 2026.4.1: 4 bits in odd groups or odd
    channels, 2 bits in what four does not divide; several tokens at once are enough for channels, one for groups).
    """
    if scheme.is_float or not runs_packed(layer, scheme):
        return ""
    size = layer.shape[-1] if scheme.group_size == -1 else scheme.group_size
    if 0 < scheme.group_size < LEAST_PACKED or size * bits(formats.get(scheme.format).code_type) % 8 == 0:
        return ""
    return f"{'channels' if scheme.group_size == -1 else 'groups'} of {size} end inside a byte, which OpenVINO's CPU misreads"


def _looks_up(node: Node) -> bool:
    return node.op == "Gather" or any(_looks_up(i) for i in node.inputs)
