"""The formats' arithmetic, compiled by OpenVINO. Numpy (`formats.quantize`) is the oracle; parity is tested to the bit.

    tile = quantize_rows(fmt, rows, group_size)      # packed codes, f32 scales, packed zero points

One tile is computed by one thread, so that several workers, each with its own tiles, keep all cores busy on data that stays in their caches;
a call from any thread is safe. Compiled models are cached until `clear_cache()`.

comes in: rows of a weight, mapped or in memory, f32, f16 or bf16
goes out: Tile
may import: formats, openvino
read first: quantize.py
"""

from llmcomp.kernels.cache import clear_cache, no_cache
from llmcomp.kernels.columns import has_columns, round_columns
from llmcomp.kernels.finite import non_finite
from llmcomp.kernels.quantize import Tile, error_rows, quantize_rows, roundtrip_rows
from llmcomp.kernels.run import Given
from llmcomp.kernels.trace import Ranges

__all__ = [
    "Given",
    "Ranges",
    "Tile",
    "clear_cache",
    "error_rows",
    "has_columns",
    "no_cache",
    "non_finite",
    "quantize_rows",
    "round_columns",
    "roundtrip_rows",
]
