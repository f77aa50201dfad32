"""The block encodings of GGUF, decoded to float32: one small function each."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]


FP4_DOUBLED: Final = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)


@dataclass(frozen=True, slots=True)
class Encoding:
    elements: int  # in one block
    nbytes: int  # of one block
    decode: Callable[[Bytes, Floats], None]  # blocks [n, nbytes] into out [n, elements]


def _codes(packed: Bytes, groups: int, bits: int) -> Bytes:
    """[n, groups * w] bytes to [n, groups, 8 // bits, w] codes, lowest bits of a group's bytes first."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    return (packed.reshape(len(packed), groups, 1, -1) >> shifts) & np.uint8((1 << bits) - 1)


def _half(blocks: Bytes, at: int) -> Floats:
    """The float16 at byte `at` of every block, [n, 1]."""
    return blocks[:, at : at + 2].copy().view(np.float16).astype(np.float32)


def _scale(out: Floats, codes: NDArray[np.integer], scales: Floats) -> Floats:
    """Writes codes * scales into out, where every scale serves an equal run of codes; returns the runs."""
    runs = out.reshape(*scales.shape, -1)
    runs[...] = codes.reshape(runs.shape)
    runs *= scales[..., None]
    return runs


def _f32(blocks: Bytes, out: Floats) -> None:
    out[...] = blocks.view(np.float32)


def _f16(blocks: Bytes, out: Floats) -> None:
    out[...] = blocks.view(np.float16)


def _bf16(blocks: Bytes, out: Floats) -> None:
    out.view(np.uint32)[...] = blocks.view(np.uint16)
    out.view(np.uint32)[...] <<= np.uint32(16)


def _q8_0(blocks: Bytes, out: Floats) -> None:
    _scale(out, blocks[:, 2:].view(np.int8), _half(blocks, 0))


def _q4_0(blocks: Bytes, out: Floats) -> None:
    _scale(out, _codes(blocks[:, 2:], 1, 4).view(np.int8) - np.int8(8), _half(blocks, 0))


def _q4_1(blocks: Bytes, out: Floats) -> None:
    runs = _scale(out, _codes(blocks[:, 4:], 1, 4), _half(blocks, 0))
    runs += _half(blocks, 2)[..., None]


def _five_bits(high: Bytes, low: Bytes) -> Bytes:
    codes = _codes(low, 1, 4).reshape(len(low), -1)
    codes |= np.unpackbits(high, axis=1, bitorder="little") << np.uint8(4)
    return codes


def _q5_0(blocks: Bytes, out: Floats) -> None:
    codes = _five_bits(blocks[:, 2:6], blocks[:, 6:])
    _scale(out, codes.view(np.int8) - np.int8(16), _half(blocks, 0))


def _q5_1(blocks: Bytes, out: Floats) -> None:
    runs = _scale(out, _five_bits(blocks[:, 4:8], blocks[:, 8:]), _half(blocks, 0))
    runs += _half(blocks, 2)[..., None]


def _mxfp4(blocks: Bytes, out: Floats) -> None:
    """Codes of 4-bit floats, stored doubled to be whole, under a power of two."""
    scales = np.ldexp(np.float32(1), blocks[:, :1].astype(np.int32) - 128)
    _scale(out, FP4_DOUBLED[_codes(blocks[:, 1:], 1, 4)], scales.astype(np.float32))


def _q2_k(blocks: Bytes, out: Floats) -> None:
    packed = blocks[:, :16]  # scale in the low four bits, minimum in the high four
    runs = _scale(out, _codes(blocks[:, 16:80], 2, 2), _half(blocks, 80) * (packed & 15))
    runs -= (_half(blocks, 82) * (packed >> 4))[..., None]


def _q3_k(blocks: Bytes, out: Floats) -> None:
    low = _codes(blocks[:, 96:104], 1, 4).reshape(-1, 16)
    high = _codes(blocks[:, 104:108], 1, 2).reshape(-1, 16)
    scales = (low | high << np.uint8(4)).view(np.int8) - np.int8(32)
    codes = _codes(blocks[:, 32:96], 2, 2).reshape(-1, 8, 32)
    codes |= _codes(blocks[:, :32], 1, 1).reshape(-1, 8, 32) << np.uint8(2)
    _scale(out, codes.view(np.int8) - np.int8(4), _half(blocks, 108) * scales)


def _six_bit_scales(packed: Bytes) -> tuple[Bytes, Bytes]:
    """Eight scales and eight minima of six bits in twelve bytes.

    The first four of each lie whole in bytes 0-3 and 4-7. The last four have their low bits side by side in
    bytes 8-11, and their top two bits above the first four.
    """
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([first & 63, third & 15 | (first >> 2) & 48], axis=1)
    minima = np.concatenate([second & 63, third >> 4 | (second >> 2) & 48], axis=1)
    return scales, minima


def _q4_k(blocks: Bytes, out: Floats) -> None:
    scales, minima = _six_bit_scales(blocks[:, 4:16])
    runs = _scale(out, _codes(blocks[:, 16:], 4, 4), _half(blocks, 0) * scales)
    runs -= (_half(blocks, 2) * minima)[..., None]


def _q5_k(blocks: Bytes, out: Floats) -> None:
    scales, minima = _six_bit_scales(blocks[:, 4:16])
    codes = _codes(blocks[:, 48:], 4, 4).reshape(-1, 8, 32)
    codes |= _codes(blocks[:, 16:48], 1, 1).reshape(-1, 8, 32) << np.uint8(4)
    runs = _scale(out, codes, _half(blocks, 0) * scales)
    runs -= (_half(blocks, 2) * minima)[..., None]


def _q6_k(blocks: Bytes, out: Floats) -> None:
    codes = _codes(blocks[:, :128], 2, 4).reshape(-1, 2, 4, 32)
    codes |= _codes(blocks[:, 128:192], 2, 2) << np.uint8(4)
    scales = _half(blocks, 208) * blocks[:, 192:208].view(np.int8)
    _scale(out, codes.view(np.int8) - np.int8(32), scales)


ENCODINGS: Final[Mapping[str, Encoding]] = {
    "F32": Encoding(1, 4, _f32),
    "F16": Encoding(1, 2, _f16),
    "BF16": Encoding(1, 2, _bf16),
    "Q4_0": Encoding(32, 18, _q4_0),
    "Q4_1": Encoding(32, 20, _q4_1),
    "Q5_0": Encoding(32, 22, _q5_0),
    "Q5_1": Encoding(32, 24, _q5_1),
    "Q8_0": Encoding(32, 34, _q8_0),
    "MXFP4": Encoding(32, 17, _mxfp4),
    "Q2_K": Encoding(256, 84, _q2_k),
    "Q3_K": Encoding(256, 110, _q3_k),
    "Q4_K": Encoding(256, 144, _q4_k),
    "Q5_K": Encoding(256, 176, _q5_k),
    "Q6_K": Encoding(256, 210, _q6_k),
}
