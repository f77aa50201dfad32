"""Memory bandwidth of this machine, and the lower bound it sets for a token: weights over bandwidth."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

READ_BYTES = 2**30  # far more than any cache holds


def read_gb_per_s(threads: int, repeats: int = 5, size: int = READ_BYTES) -> float:
    """Sums a large array, every thread its part; sums are read-bound and let threads run side by side."""
    parts = np.array_split(np.ones(size // 8, dtype=np.int64), threads)
    seconds = []
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(repeats):
            started = time.perf_counter()
            list(pool.map(np.add.reduce, parts))
            seconds.append(time.perf_counter() - started)
    return size / median(seconds) / 1e9


def floor(model: Path, threads: int) -> dict[str, Any]:
    """The file's bytes stand for the weights; an embedding that is not the head too is counted in vain."""
    bandwidth = read_gb_per_s(threads)
    size = model.stat().st_size
    return {
        "gb_per_s": round(bandwidth, 1),
        "weights_mb": round(size / 1e6, 1),
        "floor_ms": round(1000 * size / (bandwidth * 1e9), 2),
    }
