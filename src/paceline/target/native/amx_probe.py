"""AMX, tried in a child process (hardware.tiles): are its products those of AVX-512 bit for bit, and faster?

python -m paceline.target.native.amx_probe        prints "unequal", "slower" or "faster"
"""

import ctypes
import time
from typing import Final

import numpy as np
from numpy.typing import NDArray

from paceline.target import hardware
from paceline.target.native import library
from paceline.target.native.library import CODE_BYTES, FORMATS, GROUP, SCALE_BYTES, SCALE_GROUPS, TILE

ROWS: Final = (1, 6, 11, 16, 37)  # without tiles, with them, and in several strips
_SIZE: Final = (64, 512)  # outputs, inputs
_TIMED_SIZE: Final = (1024, 2048)
_TIMED_ROWS: Final = 16
_REPEATS: Final = 7
_ONE: Final = np.array([1.0], np.float16).view(np.uint8)

Floats = NDArray[np.float32]


class Trial:
    """A matrix of some format with random codes."""

    def __init__(self, form: str, outputs: int, inputs: int, random: np.random.Generator) -> None:
        groups = inputs // GROUP
        codes, scales = groups * CODE_BYTES[form], groups // SCALE_GROUPS[form] * SCALE_BYTES[form]
        size = outputs // TILE * codes
        self._memory = np.empty(size + outputs // TILE * scales + 64, np.uint8)
        data = self._memory[-self._memory.ctypes.data % 64 :]
        data[:size] = random.integers(0, 32 if form in ("K8", "H8") else 256, size)  # five bits, in eight
        data[size:][: outputs // TILE * scales] = np.resize(_ONE, outputs // TILE * scales)
        start = data.ctypes.data
        self.linear = library.Linear(
            format=FORMATS.index(form),
            outputs=outputs,
            inputs=inputs,
            codes=start,
            scales=start + size,
            codes_pair=2 * codes,
            scales_pair=2 * scales,
        )

    def times(self, lib: ctypes.CDLL, x: Floats) -> Floats:
        out = np.empty((len(x), self.linear.outputs), np.float32)
        if lib.paceline_multiply(ctypes.byref(self.linear), x.ctypes.data, len(x), out.ctypes.data):
            raise MemoryError("no memory for a product")
        return out


def equal(tiles: ctypes.CDLL, vectors: ctypes.CDLL) -> bool:
    random = np.random.default_rng(0)
    for form in FORMATS:
        matrix = Trial(form, *_SIZE, random)
        for rows in ROWS:
            x = random.standard_normal((rows, _SIZE[1]), np.float32)
            if matrix.times(tiles, x).tobytes() != matrix.times(vectors, x).tobytes():
                return False
    return True


def faster(tiles: ctypes.CDLL, vectors: ctypes.CDLL) -> bool:
    random = np.random.default_rng(1)
    matrix = Trial("K4", *_TIMED_SIZE, random)
    x = random.standard_normal((_TIMED_ROWS, _TIMED_SIZE[1]), np.float32)

    def seconds(lib: ctypes.CDLL) -> float:
        started = time.perf_counter()
        matrix.times(lib, x)
        return time.perf_counter() - started

    both = [(seconds(tiles), seconds(vectors)) for _ in range(_REPEATS)]  # in turns: neighbours slow both
    return min(t for t, _ in both) < min(v for _, v in both)


def main() -> None:
    if not hardware.allow_tiles():
        raise SystemExit("the system does not allow AMX")
    tiles, vectors = library.load(library.TILES), library.load("avx512")
    print("unequal" if not equal(tiles, vectors) else "faster" if faster(tiles, vectors) else "slower")


if __name__ == "__main__":
    main()
