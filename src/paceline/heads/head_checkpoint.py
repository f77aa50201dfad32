"""Checkpoints of draft heads: drafter.json, the card, and drafter.safetensors in int8 or float32."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Final, Literal, get_args, get_origin

import torch
from torch import Tensor

from paceline.atomic import remove_unfinished, write_bytes, write_json
from paceline.errors import CorruptModel, DrafterMismatch, UnknownArchitecture, UnknownModel
from paceline.heads.base import DraftHead, HeadConfig, TargetEmbeddings
from paceline.heads.calibration import Calibration, wilson_interval
from paceline.heads.registry import HEAD_TYPES, parameter_shapes

FORMAT: Final = 1
CARD: Final = "drafter.json"
WEIGHTS: Final = "drafter.safetensors"
_DRAFT_IDS: Final = "draft_ids"
_INTERVALS: Final = "acceptance_95"  # for readers of the file; follows from the rest
SCALE: Final = ".scale"  # suffix of the tensor that holds a matrix's scales
_GROUP: Final = 64  # columns that share a scale
Storage = Literal["int8", "float32"]


@dataclass(frozen=True, slots=True)
class Card:
    """The content of drafter.json."""

    kind: str
    shape: HeadConfig
    target: str  # its name
    fingerprint: str  # the target's
    weights: Storage = "int8"
    calibration: Calibration | None = None
    acceptance: tuple[float, ...] = ()  # by position: share accepted where all before it are
    tokens_per_pass: tuple[float, ...] = ()  # with drafts of one token, two tokens, and so on
    data: Mapping[str, Any] = field(default_factory=dict)  # what it was trained and measured on
    counts: tuple[
        int, ...
    ] = ()  # tokens that each share of `acceptance` is of; () in cards of older versions

    def intervals(self) -> tuple[tuple[float, float], ...]:
        """95 % confidence intervals of `acceptance`, as far as counts are known."""
        return tuple(wilson_interval(*pair) for pair in zip(self.acceptance, self.counts, strict=False))


def quantize_int8(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Matrices as int8 [rows, columns] with float32 scales [rows, groups]; the rest unchanged.

    A group is 64 columns, or the whole row where 64 do not divide it.
    """
    tensors: dict[str, Tensor] = {}
    for name, weight in weights.items():
        if weight.dim() != 2 or not weight.is_floating_point():
            tensors[name] = weight
            continue
        columns = weight.shape[1]
        groups = weight.float().reshape(len(weight), -1, columns if columns % _GROUP else _GROUP)
        largest = groups.abs().amax(2).clamp(min=1e-30)
        tensors[name + SCALE] = scale = largest / 127
        tensors[name] = (groups / scale[:, :, None]).round().clamp(-127, 127).to(torch.int8).flatten(1)
    return tensors


class Int8Weights(Mapping[str, Tensor]):
    """Dequantizes one matrix at a time, on access."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def __getitem__(self, name: str) -> Tensor:
        tensor, scale = self._tensors[name], self._tensors.get(name + SCALE)
        return tensor if scale is None else _dequantize(tensor, scale)

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._tensors if not name.endswith(SCALE))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(self._tensors[name].shape) for name in self}


def _dequantize(weight: Tensor, scale: Tensor) -> Tensor:
    return (weight.float().view(len(weight), scale.shape[1], -1) * scale[:, :, None]).flatten(1)


@dataclass(frozen=True, slots=True)
class StoredHead:
    """A checked checkpoint, before its network is built."""

    card: Card
    draft_ids: Tensor  # [draft_vocab]: see DraftHead
    weights: Int8Weights  # of the whole network

    @property
    def fingerprint(self) -> str:
        """Of its card, which every training writes anew with what it measured."""
        card = json.dumps(asdict(self.card), sort_keys=True, default=str)
        return hashlib.sha256(card.encode()).hexdigest()[:32]

    def net(self, embeddings: TargetEmbeddings) -> DraftHead:
        net = HEAD_TYPES[self.card.kind].net(self.card.shape, embeddings, self.draft_ids)
        net.load_state_dict(dict(self.weights))
        return net


@dataclass(frozen=True, slots=True)
class LoadedHead:
    card: Card
    net: DraftHead


def save(folder: Path, card: Card, net: DraftHead) -> None:
    """Writes both files; each replaces an old one atomically."""
    from safetensors.torch import save as encoded

    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: tensor.detach().float().cpu().contiguous() for name, tensor in net.state_dict().items()}
    stored = quantize_int8(weights) if card.weights == "int8" else weights
    stored[_DRAFT_IDS] = net.draft_ids.to("cpu", torch.int32)
    for name in (WEIGHTS, CARD):
        remove_unfinished(folder / name)
    write_bytes(folder / WEIGHTS, encoded(stored))
    save_card(folder, card)


def save_card(folder: Path, card: Card) -> None:
    write_json(folder / CARD, {"format": FORMAT, **asdict(card), _INTERVALS: card.intervals()}, indent=1)


def load(folder: Path, embeddings: TargetEmbeddings) -> LoadedHead:
    """The head with its weights as they are served."""
    stored = read(folder, embeddings.fingerprint, len(embeddings.embed))
    return LoadedHead(stored.card, stored.net(embeddings))


def read(folder: Path, fingerprint: str, vocab: int) -> StoredHead:
    """fingerprint, vocab: of the target that the head is to draft for."""
    card = read_card(folder)
    if card.fingerprint != fingerprint:
        raise DrafterMismatch(
            f"{folder.name} was trained for {card.target}, whose weights differ from those of this model: "
            "use the model it was trained for, or train a drafter for this one"
        )
    tensors = _read(folder / WEIGHTS)
    ids = tensors.pop(_DRAFT_IDS, torch.empty(0)).long()
    inside = (ids >= 0) & (ids < vocab)
    if len(ids) != card.shape.draft_vocab or not inside.all():
        raise _damaged(WEIGHTS, f"{_DRAFT_IDS} does not list {card.shape.draft_vocab} tokens of the target")
    weights = Int8Weights(tensors)
    _require_shapes(parameter_shapes(card.kind, card.shape), weights.shapes())
    return StoredHead(card, ids, weights)


def read_card(folder: Path) -> Card:
    try:
        text = (folder / CARD).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise UnknownModel(f"{folder.name} has no {CARD}; expected a folder with a trained drafter") from None
    try:
        table = json.loads(text)
    except (ValueError, RecursionError):
        raise _damaged(CARD, "it is not JSON") from None
    if not isinstance(table, dict):
        raise _damaged(CARD, "it is not a table")
    if table.pop("format", None) != FORMAT:
        raise CorruptModel(f"{CARD} is not of format {FORMAT}, the one this version reads: train it again")
    return _card(table)


def _card(table: dict[str, Any]) -> Card:
    kind = table.get("kind")
    if kind not in HEAD_TYPES:
        raise UnknownArchitecture(
            f"{CARD} describes a drafter of kind {str(kind)[:40]!r}; known: {', '.join(sorted(HEAD_TYPES))}"
        )
    try:
        shape = _shape(HEAD_TYPES[kind].shape, table.pop("shape"))
        calibration = table.pop("calibration", None)
        if calibration is not None:
            calibration = Calibration(_floats(calibration["scale"]), _floats(calibration["shift"]))
        table |= {key: _floats(table.get(key, ())) for key in ("acceptance", "tokens_per_pass")}
        table["counts"] = tuple(int(n) for n in table.get("counts", ()))
        table.pop(_INTERVALS, None)
        card = Card(shape=shape, calibration=calibration, **table)
        whole = all(isinstance(text, str) for text in (card.target, card.fingerprint))
        if not whole or card.weights not in get_args(Storage) or not isinstance(card.data, dict):
            raise ValueError("a value is of the wrong type")
        if calibration is not None and {len(calibration.scale), len(calibration.shift)} != {shape.block}:
            raise ValueError(f"calibration is not for {shape.block} positions")
    except (KeyError, TypeError, ValueError) as error:
        raise _damaged(CARD, f"{type(error).__name__}: {str(error)[:120]}") from None
    return card


def _shape(cls: type[HeadConfig], table: Mapping[str, Any]) -> HeadConfig:
    """Checks each value against the type of its field; numbers must be positive."""
    values: dict[str, Any] = dict(table)
    for f in fields(cls):  # type: ignore[arg-type]
        value = values.get(f.name)
        if f.type in (int, float) and value is not None:
            types = (int,) if f.type is int else (int, float)
            if isinstance(value, bool) or not isinstance(value, types) or not 0 < value < 2**31:
                raise ValueError(f"{f.name} is {value!r}")
        elif f.type is bool:
            if f.name in values and not isinstance(value, bool):
                raise ValueError(f"{f.name} is {value!r}")
        elif get_origin(f.type) is Literal:
            if f.name in values and value not in get_args(f.type):
                raise ValueError(f"{f.name} is {value!r}")
        elif isinstance(value, list):
            if not all(isinstance(x, int) and 0 <= x < 1000 for x in value):
                raise ValueError(f"{f.name} is {value!r}")
            values[f.name] = tuple(value)
    return cls(**values)


def _floats(values: Any) -> tuple[float, ...]:
    return tuple(float(value) for value in values)


def _read(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load as decoded

    try:
        return decoded(path.read_bytes())
    except FileNotFoundError:
        raise CorruptModel(f"{path.parent.name} has no {path.name}; fetch or train it again") from None
    except (SafetensorError, ValueError, KeyError) as error:
        raise _damaged(path.name, str(error)[:120]) from None


def _require_shapes(expected: Mapping[str, tuple[int, ...]], actual: Mapping[str, tuple[int, ...]]) -> None:
    if expected != actual:
        name = next(iter({*expected.items()} ^ {*actual.items()}))[0]
        should, there = expected.get(name, "nothing"), actual.get(name, "nothing")
        raise _damaged(WEIGHTS, f"{name[:80]} should be {should} and is {there}")


def _damaged(name: str, what: str) -> CorruptModel:
    return CorruptModel(f"{name} is damaged: {what}; fetch or train it again")
