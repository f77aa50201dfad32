"""Weights of 4 to 8 bits in the order of csrc/packed.h.

GGUF blocks keep their codes and scales: the same values, in as many bytes; only the six-bit scales of Q4_K
and Q5_K take a byte each. Everything is computed by torch, on the device of the weights.

Letters of dimensions, outermost first: t tile of 16 features, h its half, f feature of eight; u unit of 64
inputs, g group of 32, s step of 16, p lane of four, i pair of inputs, e one of the pair.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, unflatten

from paceline.target.weights.dequant import ENCODINGS

TILE: Final = 16  # features
UNIT_INPUTS: Final = 64
SUPER_UNITS: Final = 4
FP8_MAX: Final = 448.0


@dataclass(frozen=True, slots=True)
class PackedFormat:
    """Bytes of a unit, as in PackedFormat of packed.h."""

    codes: int
    scales: int
    shared: int = 0  # of SUPER_UNITS units

    @property
    def stage_bytes(self) -> int:
        """Of a unit and what it shares."""
        return self.codes + self.scales + self.shared


FORMATS: Final[Mapping[str, PackedFormat]] = {
    "Q4_0": PackedFormat(512, 64),
    "Q4_1": PackedFormat(512, 128),
    "Q5_0": PackedFormat(640, 64),
    "Q5_1": PackedFormat(640, 128),
    "Q8_0": PackedFormat(1024, 64),
    "Q4_K": PackedFormat(512, 64, 64),
    "Q5_K": PackedFormat(640, 64, 64),
    "Q6_K": PackedFormat(768, 64, 32),
    "FP8": PackedFormat(1024, 0),
}
GGUF: Final = tuple(name for name in FORMATS if name in ENCODINGS)


def pack_gguf(encoding: str, rows: Tensor) -> Tensor:
    """rows: [features, bytes of a row] uint8 as the file holds them; gives [tiles, bytes of a tile]."""
    kind = ENCODINGS[encoding]
    blocks = rows.view(len(rows), -1, kind.nbytes)
    codes = _FIELDS[encoding](blocks)
    units = torch.cat([*_code_planes(encoding, codes.codes), _by_unit(codes.scales)], -1)  # [t, u, bytes]
    if codes.shared is None:
        return units.flatten(1)
    tiles, inputs = units.shape[0], codes.shared.shape[1]
    shared = codes.shared.view(tiles, TILE, inputs, -1).transpose(1, 2).reshape(tiles, inputs, -1)
    return torch.cat([units.view(tiles, inputs, -1), shared], -1).flatten(1)


def pack_fp8(codes: Tensor) -> Tensor:
    """codes: [features, inputs] uint8, the bits of e4m3."""
    return torch.cat(_code_planes("FP8", codes), -1).flatten(1)


def quantise_fp8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Rounds to e4m3 with one scale for each feature; gives the bits as uint8."""
    rows = weight.float()
    scale = rows.abs().amax(1).clamp_min(1e-12) / FP8_MAX
    codes = (rows / scale[:, None]).clamp_(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return codes.view(torch.uint8), scale


def unpacked(name: str, weight: Tensor, inputs: int) -> Tensor:
    """[features, inputs] float32: what packed weights stand for, but for the scales of FP8 features."""
    kind, tiles, units = FORMATS[name], len(weight), inputs // UNIT_INPUTS
    blocks = weight.view(tiles, units // SUPER_UNITS, -1) if kind.shared else weight.view(tiles, units, -1)
    unit, shared = (
        blocks[..., : blocks.shape[-1] - kind.shared],
        blocks[..., blocks.shape[-1] - kind.shared :],
    )
    unit = unit.reshape(tiles, units, -1)
    codes = _unpacked_codes(name, unit[..., : kind.codes])
    if name == "FP8":
        return codes.view(torch.float8_e4m3fn).float()
    scales = unit[..., kind.codes :].reshape(tiles, units, 2, TILE, -1).permute(0, 3, 1, 2, 4)
    scales = scales.reshape(tiles * TILE, inputs // 32, -1).contiguous()  # [features, groups, bytes]
    scale, minimum = _scale_and_minimum(name, scales, shared)
    values = codes.view(torch.int8).float() if name == "Q8_0" else codes.float() - _ZERO.get(name, 0)
    values = unflatten(values, 1, (scale.shape[1], -1)) * scale[..., None]
    return (unflatten(values.flatten(1), 1, (inputs // 32, 32)) + minimum[..., None]).flatten(1)


def _scale_and_minimum(name: str, scales: Tensor, shared: Tensor) -> tuple[Tensor, Tensor]:
    """[features, runs of equal scale], [features, groups]."""
    none = scales.new_zeros(1, 1, dtype=torch.float32)
    if name in ("Q4_0", "Q5_0", "Q8_0"):
        return scales.view(torch.float16).float()[..., 0], none
    if name in ("Q4_1", "Q5_1"):
        scale, minimum = scales.view(torch.float16).float().unbind(-1)
        return scale, minimum
    tiles, supers = shared.shape[:2]
    factors = shared.reshape(tiles, supers, TILE, -1).transpose(1, 2).reshape(tiles * TILE, supers, -1)
    factors = factors.contiguous().view(torch.float16).float()
    factors = factors.repeat_interleave(8, 1)  # [features, groups, 1 or 2]
    if name == "Q6_K":
        return (scales.view(torch.int8).float() * factors).flatten(1), none
    scale, minimum = (scales.float() * factors).unbind(-1)
    return scale, -minimum


_ZERO: Final = {"Q4_0": 8, "Q5_0": 16, "Q6_K": 32}  # the code of zero


# ---- the fields of GGUF blocks, [features, blocks, bytes]


@dataclass(frozen=True, slots=True)
class _Fields:
    codes: Tensor  # [features, inputs] uint8; int8 as its bits
    scales: Tensor  # [features, groups of 32, bytes]
    shared: Tensor | None = None  # [features, blocks of 256, bytes]


def _codes(packed: Tensor, groups: int, bits: int) -> Tensor:
    """Bytes [..., groups * w] to codes [..., groups * (8 // bits) * w], lowest bits of a group first."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)[:, None]
    parts = unflatten(packed, -1, (groups, 1, -1)) >> shifts
    return (parts & ((1 << bits) - 1)).flatten(-3)


def _row(codes: Tensor) -> Tensor:
    """[features, blocks, codes] to [features, inputs]."""
    return codes.flatten(1)


def _q4(blocks: Tensor, head: int) -> _Fields:
    """head: bytes of scales before the codes."""
    return _Fields(_row(_codes(blocks[..., head:], 1, 4)), blocks[..., :head])


def _q5(blocks: Tensor, head: int) -> _Fields:
    bits = torch.arange(8, dtype=torch.uint8, device=blocks.device)
    high = (blocks[..., head : head + 4, None] >> bits & 1).flatten(-2)
    return _Fields(_row(_codes(blocks[..., head + 4 :], 1, 4) | high << 4), blocks[..., :head])


def _q8_0(blocks: Tensor) -> _Fields:
    return _Fields(_row(blocks[..., 2:]), blocks[..., :2])


def _six_bit_scales(packed: Tensor) -> Tensor:
    """[features, blocks, 12] to [features, groups, 2]: scale and minimum; see dequant.py for their bits."""
    first, second, third = unflatten(packed, -1, (3, 4)).unbind(-2)
    scales = torch.cat([first & 63, third & 15 | first >> 2 & 48], -1)
    minima = torch.cat([second & 63, third >> 4 | second >> 2 & 48], -1)
    return torch.stack([scales, minima], -1).flatten(1, 2)


def _q4_k(blocks: Tensor) -> _Fields:
    codes = _codes(blocks[..., 16:], 4, 4)
    return _Fields(_row(codes), _six_bit_scales(blocks[..., 4:16]), blocks[..., :4])


def _q5_k(blocks: Tensor) -> _Fields:
    codes = _codes(blocks[..., 48:], 4, 4) | _codes(blocks[..., 16:48], 1, 1) << 4
    return _Fields(_row(codes), _six_bit_scales(blocks[..., 4:16]), blocks[..., :4])


def _q6_k(blocks: Tensor) -> _Fields:
    codes = _codes(blocks[..., :128], 2, 4) | _codes(blocks[..., 128:192], 2, 2) << 4
    scales = unflatten(blocks[..., 192:208], -1, (8, 2)).flatten(1, 2)
    return _Fields(_row(codes), scales, blocks[..., 208:])


_FIELDS: Final[Mapping[str, Callable[[Tensor], _Fields]]] = {
    "Q4_0": lambda blocks: _q4(blocks, 2),
    "Q4_1": lambda blocks: _q4(blocks, 4),
    "Q5_0": lambda blocks: _q5(blocks, 2),
    "Q5_1": lambda blocks: _q5(blocks, 4),
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}


# ---- the order of a unit


def _by_unit(scales: Tensor) -> Tensor:
    """[features, groups, bytes] to [t, u, bytes]: by group, then by feature."""
    split = scales.reshape(-1, TILE, scales.shape[1] // 2, 2, scales.shape[2])  # t, feature, u, g
    return split.permute(0, 2, 3, 1, 4).flatten(2)


def _code_planes(encoding: str, codes: Tensor) -> list[Tensor]:
    """The bytes of codes by unit, [t, u, bytes]: whole ones, or low halves and what lies above them."""
    split = codes.view(-1, 2, 8, codes.shape[1] // UNIT_INPUTS, 2, 2, 4, 2, 2)  # t h f u g s p i e
    if encoding == "Q8_0":
        return [_bytes(split, "tugfpshie")]
    if encoding == "FP8":
        return [_bytes(split.flip(7), "tugfpshei")]
    low = _ordered(split & 15, "tugfpseih")
    planes = [(low[..., 0] | low[..., 1] << 4).flatten(2)]
    if encoding in ("Q5_0", "Q5_1", "Q5_K"):
        planes.append(_bits(_ordered(split >> 4, "tufpegsih").flatten(-3), 1).flatten(2))
    if encoding == "Q6_K":
        planes.append(_bits(_ordered(split >> 4, "tugfpesih").flatten(-2), 2).flatten(2))
    return planes


def _ordered(split: Tensor, letters: str) -> Tensor:
    return split.permute(["thfugspie".index(letter) for letter in letters])


def _bytes(split: Tensor, letters: str) -> Tensor:
    return _ordered(split, letters).flatten(2)


def _bits(codes: Tensor, width: int) -> Tensor:
    """Joins the last dimension into a byte, lowest bits first."""
    joined = codes[..., 0]
    for i in range(1, codes.shape[-1]):
        joined = joined | codes[..., i] << width * i
    return joined


def _unpacked_codes(name: str, planes: Tensor) -> Tensor:
    """[t, u, bytes] to [features, inputs]."""
    if name == "Q8_0":
        return _in_order(unflatten(planes, 2, (2, 8, 4, 2, 2, 2, 2)), "tugfpshie")
    if name == "FP8":
        return _in_order(unflatten(planes, 2, (2, 8, 4, 2, 2, 2, 2)).flip(8), "tugfpshei")
    low = unflatten(planes[..., :512], 2, (2, 8, 4, 2, 2, 2))
    codes = _in_order(torch.stack([low & 15, low >> 4], -1), "tugfpseih")
    if name in ("Q5_0", "Q5_1", "Q5_K"):
        high = unflatten(planes[..., 512:], 2, (8, 4, 2, 2))
        codes |= _in_order(unflatten(_split(high, 1), -1, (2, 2, 2)), "tufpegsih") << 4
    if name == "Q6_K":
        high = unflatten(planes[..., 512:], 2, (2, 8, 4, 2, 2))
        codes |= _in_order(unflatten(_split(high, 2), -1, (2, 2)), "tugfpesih") << 4
    return codes


def _split(joined: Tensor, width: int) -> Tensor:
    shifts = torch.arange(0, 8, width, dtype=torch.uint8, device=joined.device)
    return joined[..., None] >> shifts & ((1 << width) - 1)


def _in_order(split: Tensor, letters: str) -> Tensor:
    ordered = split.permute([letters.index(letter) for letter in "thfugspie"])
    return ordered.flatten(3).flatten(0, 2).contiguous()
