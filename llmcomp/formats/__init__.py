"""Number formats: what a compressed weight is made of, how it is made, how it is read back. Numpy only.

A format is one file with a `register(...)` call at its end; every module of this folder is looked at, so nothing else changes.
The rule that picks codes is written once, against the small namespace of `array.py`: numpy runs it as the oracle, `kernels` traces it.

comes in: float weights (out, in), group size
goes out: Format, Part, Node, CompressedWeight
may import: errors
read first: format.py
"""

from llmcomp.formats.array import F16_MAX, NUMPY, Namespace
from llmcomp.formats.codebook import ADAPTIVE
from llmcomp.formats.format import Format, Node, Part, exists, get, grouped_shape, names, register
from llmcomp.formats.packing import pack, packed_bytes, unpack
from llmcomp.formats.weight import CompressedWeight, faded, quantize, scale_type_needed

__all__ = [
    "ADAPTIVE",
    "F16_MAX",
    "NUMPY",
    "CompressedWeight",
    "Format",
    "Namespace",
    "Node",
    "Part",
    "exists",
    "faded",
    "get",
    "grouped_shape",
    "names",
    "pack",
    "packed_bytes",
    "quantize",
    "register",
    "scale_type_needed",
    "unpack",
]
