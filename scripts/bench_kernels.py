"""Speed of the compiled rules, beside this machine's copy speed and, with --peer, NNCF's own kernels; prints one line a format.

    python scripts/bench_kernels.py [--tile 2097152] [--width 2048] [--workers N] [--seconds 1.0] [--peer]

Workers quantize bf16 tiles of a matrix far larger than the caches, as an export does. A figure is the median of five runs;
"of copy" is the time of copying the same bf16 bytes, with the same workers, over ours. Nothing else should run.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ml_dtypes
import numpy as np

from llmcomp import formats, kernels

ROUNDS = 5
PEER = ("int8_asym", "int8_sym", "int4_asym", "int4_sym", "nf4", "fp4", "mxfp4", "mxfp8_e4m3", "fp8_e4m3")
"""Formats for which NNCF has compiled kernels of one step."""
MATRIX = 1 << 27
"""Weights of the matrix: 256 MiB of bf16, beyond any cache here."""


def rate(work: Callable[[int], Any], tiles: int, weights: int, workers: int, seconds: float) -> float:
    """Weights per second of `work(tile)` in `workers` threads, median over the rounds; each round lasts at least `seconds`."""
    rates = []
    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(work, range(2 * workers)))
        for _ in range(ROUNDS):
            done, started = 0, time.perf_counter()
            while time.perf_counter() - started < seconds:
                list(pool.map(work, [(done + i) % tiles for i in range(8 * workers)]))
                done += 8 * workers
            rates.append(done * weights / (time.perf_counter() - started))
    return statistics.median(rates)


def peer_rate(w: np.ndarray, mode: str, group: int, seconds: float) -> float:
    """Weights per second of NNCF's kernel on one whole layer of bf16, as its export calls it."""
    import nncf
    import openvino as ov
    from nncf.quantization.algorithms.weight_compression.config import WeightCompressionConfig
    from nncf.quantization.algorithms.weight_compression.weight_lowering import compress_weight
    from nncf.tensor import Tensor

    layer = w[: (1 << 22) // w.shape[1]]
    tensor = Tensor(ov.Tensor(layer.view(np.uint16), ov.Shape(list(layer.shape)), ov.Type.bf16))
    config = WeightCompressionConfig(nncf.CompressWeightsMode(mode), group)
    return rate(lambda _: compress_weight(tensor, (1,), config), 1, layer.size, 1, seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tile", type=int, default=1 << 21, help="weights of a tile")
    parser.add_argument("--width", type=int, default=2048, help="weights of a row")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seconds", type=float, default=1.0, help="least length of a run")
    parser.add_argument("--peer", action="store_true", help="NNCF as well, if it is installed")
    args = parser.parse_args()
    w = np.random.default_rng(0).standard_normal((MATRIX // args.width, args.width), np.float32).astype(ml_dtypes.bfloat16)
    rows = args.tile // args.width
    tiles = [w[i : i + rows] for i in range(0, len(w) - rows + 1, rows)]
    raw = [tile.view(np.uint16) for tile in tiles]
    weights = tiles[0].size
    target = np.empty((args.workers, *raw[0].shape), np.uint16)
    copy = rate(lambda i: np.copyto(target[i % args.workers], raw[i]), len(raw), weights, args.workers, args.seconds)
    finite = rate(lambda i: kernels.non_finite(tiles[i]), len(tiles), weights, args.workers, args.seconds)
    print(f"{args.workers} workers, tiles of {rows} x {args.width} bf16")
    print(f"copy                {copy / 1e6:7.0f} M weights/s ({copy * 2 / 1e9:.1f} GB/s read)")
    print(f"non_finite          {finite / 1e6:7.0f} M weights/s")
    for name in formats.names():
        fmt = formats.get(name)
        group = fmt.group_size

        def work(i: int, fmt: formats.Format = fmt, group: int = group) -> None:
            kernels.quantize_rows(fmt, tiles[i], group, fmt.best_rule)

        ours = rate(work, len(tiles), weights, args.workers, args.seconds)
        line = f"{name:10} g {group:3}    {ours / 1e6:7.0f} M weights/s, {ours / copy:.2f} of copy"
        if args.peer and name in PEER:
            peer = peer_rate(w, name, group, args.seconds)
            line += f", peer {peer / 1e6:.0f}: {ours / peer:.1f} times"
        print(line, flush=True)


if __name__ == "__main__":
    main()
