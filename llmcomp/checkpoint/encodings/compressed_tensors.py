"""compressed-tensors, as llm-compressor writes it: integers packed or in bytes, and FP8; per tensor, channel, group or block.

weight_packed       I32 (out, ceil(in · bits / 32))   codes + 2^(bits-1), the lowest bits first (pack-quantized)
weight              I8 or F8_E4M3 (out, in)           codes as they are (int-, float- and naive-quantized)
weight_shape        I64 or I32 (2)                    (out, in) of what is packed
weight_scale        float (out, groups), (out, 1), (1) or (ceil(out / rows), ceil(in / columns)) by the strategy
weight_zero_point   I8, of the shape of the scales; I32 (ceil(out · bits / 32), groups) where it is packed, down the columns
weight_g_idx        I32 (in)                          the group of each input; -1 in all of it where they are in order

Of NVFP4 (nvfp4-pack-quantized) weight_packed is U8 (out, in / 2), weight_scale F8_E4M3 (out, in / 16), and weight_global_scale F32 (1) divides. Of MXFP4
(mxfp4-pack-quantized) it is the same with exponents, U8 (out, in / 32), as weight_scale; of MXFP8 (mxfp8-quantized) weight is F8_E4M3 beside such.

A layer's config group is the one whose shapes its tensors have, so that the classes of modules that `targets` names need not be known;
what `ignore` lists is stored plain.

Source: the documentation of compressed-tensors (https://github.com/vllm-project/compressed-tensors).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcomp.checkpoint.checkpoint import TensorInfo
from llmcomp.checkpoint.encodings import powers
from llmcomp.checkpoint.encodings.base import (
    FLOATS,
    MAX_GROUP,
    DecodedTensor,
    Encoding,
    Rows,
    check,
    check_finite,
    check_groups,
    check_matrix,
    part,
    shown,
    wrong,
)
from llmcomp.checkpoint.encodings.blocks import BlockScaled, grid
from llmcomp.checkpoint.encodings.groups import Grouped, codes_at, first_codes, in_order
from llmcomp.checkpoint.encodings.two_scales import SIZE, TwoScales
from llmcomp.checkpoint.stored import stored_array

PACKED, WEIGHT, SCALE, ZERO, SHAPE, ORDER = (
    ".weight_packed",
    ".weight",
    ".weight_scale",
    ".weight_zero_point",
    ".weight_shape",
    ".weight_g_idx",
)
SECOND = ".weight_global_scale"
UNUSED = (".input_scale", ".input_zero_point", ".input_global_scale", ".output_scale", ".output_zero_point")
"""Of activations, which a weight is not made of."""
FORMATS = (
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "mxfp8-quantized",
)
FOUR = (("tensor_group", SIZE), ("group", powers.SIZE))
"""How floats of four bits are stored: NVFP4, MXFP4."""
STRATEGIES = ("tensor", "channel", "group", "block", "tensor_group")


@dataclass(frozen=True)
class Scheme:
    """What one config group says of weights."""

    kind: str
    bits: int
    symmetric: bool
    strategy: str
    size: tuple[int, int]
    """Rows and columns that share a scale, for groups and blocks."""

    def scales(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """Shapes that the scales of a matrix may have; none where groups do not divide it."""
        if self.strategy == "tensor":
            return (1,), (), (1, 1)
        if self.strategy == "channel":
            return ((shape[0], 1),)
        if self.strategy == "group" and shape[1] % self.size[1]:
            return ()
        return (grid(shape, self.size),)


class CompressedTensors(Encoding):
    methods = ("compressed-tensors",)
    suffixes = (PACKED, SHAPE, ORDER, SECOND)

    def __init__(self, settings: Mapping[str, Any], config: Path) -> None:
        super().__init__(settings, config)
        groups = self.setting("config_groups", default={})
        if not isinstance(groups, dict) or not all(isinstance(group, dict) for group in groups.values()):
            raise self.refused(f"config_groups {shown(groups)} does not say how weights are stored")
        told = [self.setting("format"), *(group.get("format") for group in groups.values())]
        for name in told:
            if name is not None and name not in (*FORMATS, "mixed-precision"):
                raise self.refused(f"format {shown(name)} is not read, only {', '.join(FORMATS)}")
        sparsity = self.setting("sparsity_config", default={})
        if not isinstance(sparsity, dict) or sparsity.get("format", "dense") != "dense":
            raise self.refused("sparse weights are not read")
        if self.setting("transform_config"):
            raise self.refused("transform_config is not read: the weights are not those of the plain architecture")
        self.schemes = [self._scheme(group["weights"]) for group in groups.values() if group.get("weights") is not None]

    def _scheme(self, weights: Any) -> Scheme:
        if not isinstance(weights, dict):
            raise self.refused(f"weights {shown(weights)} is no scheme")
        kind, bits, size, block = (weights.get(name) for name in ("type", "num_bits", "group_size", "block_structure"))
        strategy = weights.get("strategy")
        if strategy is None:
            strategy = "tensor" if size is None else "channel" if size == -1 else "group"
        if kind not in ("int", "float") or type(bits) is not int or not (2 <= bits <= 8 if kind == "int" else bits in (4, 8)):
            raise self.refused(
                f"weights of type {shown(kind)} with num_bits {shown(bits)} are not read, only int of 2 to 8 and float of 4 and 8"
            )
        four = kind == "float" and bits == 4
        if (four and (strategy, size) not in FOUR) or (not four and strategy == "tensor_group"):
            raise self.refused(
                f"weights of type {shown(kind)} with num_bits {bits} by strategy {shown(strategy)} in groups of {shown(size)} are not read"
            )
        if strategy not in STRATEGIES:
            raise self.refused(f"strategy {shown(strategy)} is not read, only {', '.join(STRATEGIES)}")
        sizes = [1, size] if strategy in ("group", "tensor_group") else block if strategy == "block" else [1, 1]
        if not isinstance(sizes, list) or len(sizes) != 2 or not all(type(n) is int and 0 < n <= MAX_GROUP for n in sizes):
            raise self.refused(f"group_size {shown(size)} with block_structure {shown(block)} are no sizes of strategy {strategy}")
        return Scheme(kind, bits, weights.get("symmetric") is not False, strategy, (sizes[0], sizes[1]))

    def decoded(self, tensors: Mapping[str, TensorInfo]) -> dict[str, DecodedTensor]:
        found: dict[str, DecodedTensor] = {}
        four = any(scheme.kind == "float" and scheme.bits == 4 for scheme in self.schemes)
        for name, info in tensors.items():
            if name.endswith(PACKED) and info.dtype == "U8" and four:
                stem = name.removesuffix(PACKED)
                exponents = stem + SCALE in tensors and tensors[stem + SCALE].dtype == "U8"
                found[stem + WEIGHT] = (self._powers if exponents else self._two_scales)(stem, info, tensors)
            elif name.endswith(PACKED):
                stem = name.removesuffix(PACKED)
                check_matrix(check(info, ("I32",)))
                shape = self._shape(info, part(tensors, stem + SHAPE, info, ("I64", "I32"), (2,)))
                found[stem + WEIGHT] = self._matrix(stem, info, shape, "int", tensors)
            elif name.endswith(WEIGHT) and (info.dtype == "I8" or info.dtype.startswith("F8_")):
                check_matrix(check(info, ("I8", "F8_E4M3")))
                scale = tensors.get(name.removesuffix(WEIGHT) + SCALE)
                if scale is not None and scale.dtype == "U8":
                    found[name] = self._powers(name.removesuffix(WEIGHT), info, tensors)
                    continue
                kind = "int" if info.dtype == "I8" else "float"
                found[name] = self._matrix(name.removesuffix(WEIGHT), info, info.shape, kind, tensors)
        return found

    def _two_scales(self, stem: str, codes: TensorInfo, tensors: Mapping[str, TensorInfo]) -> DecodedTensor:
        if not any(scheme.strategy == "tensor_group" for scheme in self.schemes):
            raise wrong(codes, f"none of the config_groups stores floats of 4 bits in groups of {SIZE}")
        scale, second = part(tensors, stem + SCALE, codes, ("F8_E4M3",)), part(tensors, stem + SECOND, codes, ("F32",))
        unused = [tensors[stem + end] for end in UNUSED if stem + end in tensors]
        return TwoScales(stem + WEIGHT, codes, scale, second, True, unused)

    def _powers(self, stem: str, codes: TensorInfo, tensors: Mapping[str, TensorInfo]) -> DecodedTensor:
        bits = 4 if codes.dtype == "U8" else 8
        if not any((s.kind, s.bits, s.strategy, s.size) == ("float", bits, "group", (1, powers.SIZE)) for s in self.schemes):
            raise wrong(
                codes, f"none of the config_groups stores floats of {bits} bits in groups of {powers.SIZE} with exponents as scales"
            )
        unused = [tensors[stem + end] for end in UNUSED if stem + end in tensors]
        return powers.PowerScaled(stem + WEIGHT, codes, part(tensors, stem + SCALE, codes, ("U8",)), unused)

    def _shape(self, codes: TensorInfo, info: TensorInfo) -> tuple[int, ...]:
        out, width = (int(n) for n in stored_array(info))
        if out != codes.shape[0] or not 0 < width <= codes.shape[1] * 16:
            raise wrong(info, f"it says {[out, width]}, and {list(codes.shape)} words of 32 bits are packed")
        return out, width

    def _matrix(self, stem: str, codes: TensorInfo, shape: tuple[int, ...], kind: str, tensors: Mapping[str, TensorInfo]) -> DecodedTensor:
        packed = codes.name.endswith(PACKED)
        scale = check_finite(part(tensors, stem + SCALE, codes, FLOATS))
        zero = tensors.get(stem + ZERO)
        fitting = [
            scheme
            for scheme in self.schemes
            if scheme.kind == kind
            and scale.shape in scheme.scales(shape)
            and (scheme.symmetric or zero is not None)
            and (not packed or codes.shape[1] == -(-shape[1] * scheme.bits // 32))
        ]
        if len({scheme.bits for scheme in fitting}) != 1 and (packed or not fitting):
            told = f"{list(codes.shape)} for {list(shape)}, scales {list(scale.shape)}, {'no ' if zero is None else ''}zero points"
            raise wrong(codes, f"{told}: {'several' if fitting else 'none'} of the config_groups store{'' if fitting else 's'} a weight so")
        scheme = fitting[0]
        unused = [tensors[stem + end] for end in UNUSED if stem + end in tensors]
        if kind == "float" or scheme.strategy == "block":
            if zero is not None:
                check(zero, ("I8", "F8_E4M3", *FLOATS), scale.shape)
                if stored_array(zero).astype(np.float32).any():
                    raise wrong(zero, "zero points of blocks and of FP8 weights are not read")
                unused.append(zero)
            size = {"tensor": shape, "channel": (1, shape[1])}.get(scheme.strategy, scheme.size)
            return BlockScaled(stem + WEIGHT, codes, scale, (size[0], size[1]), unused)
        groups = scale.shape[1] if len(scale.shape) == 2 else 1
        if zero is not None:
            lines = -(-shape[0] * scheme.bits // 32)
            check(zero, ("I8", "I32") if packed else ("I8",), *([(lines, groups)] if packed and zero.dtype == "I32" else [scale.shape]))
        group = in_order(shape[1], scheme.size[1] if scheme.strategy == "group" else -1)
        order = tensors.get(stem + ORDER)
        if order is not None:
            check(order, ("I32",), (shape[1],))
            unused.append(order)
            if not (stored_array(order) == -1).all():
                group = check_groups(order, groups)
        if packed:
            unused.append(tensors[stem + SHAPE])
        return _Integers(stem + WEIGHT, shape, codes, scale, zero, unused, group, scheme.bits if packed else None)


class _Integers(Grouped):
    def __init__(
        self,
        name: str,
        shape: tuple[int, ...],
        codes: TensorInfo,
        scale: TensorInfo,
        zero: TensorInfo | None,
        others: Sequence[TensorInfo],
        group: NDArray[np.int64],
        bits: int | None,
    ) -> None:
        super().__init__(name, shape, [codes, scale, *([zero] if zero is not None else []), *others], group)
        self.stored, self.scale, self.zero = codes, scale, zero
        self.bits = bits
        """None where a code is a byte."""
        self.span = (-128, 127) if bits is None else (0, (1 << bits) - 1)

    def codes(self, rows: Rows, columns: slice) -> NDArray[Any]:
        found = stored_array(self.stored)[rows]
        return (found if self.bits is None else first_codes(found, self.bits, self.info.shape[1]))[:, columns]

    def zeros(self, rows: Rows) -> NDArray[Any] | None:
        offset = 0 if self.bits is None else 1 << (self.bits - 1)
        if self.zero is None:
            return np.full((1, 1), offset) if offset else None
        if self.zero.dtype == "I32":
            numbers = np.arange(self.info.shape[0])[rows]
            return codes_at(np.ascontiguousarray(stored_array(self.zero).T), numbers, self.bits or 8).T
        return self._spread_down(self.zero, rows).astype(np.int32) + offset

    def scales(self, rows: Rows) -> NDArray[Any]:
        return self._spread_down(self.scale, rows)

    def _spread_down(self, info: TensorInfo, rows: Rows) -> NDArray[Any]:
        """(rows, groups); (1, 1) for a whole tensor's."""
        values = stored_array(info)
        return values.reshape(1, 1) if values.size == 1 else values[rows]
