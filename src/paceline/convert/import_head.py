"""Imports a checkpoint of another format as a drafter's folder."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, get_args

from paceline.convert import dspark, eagle3, medusa
from paceline.convert.foreign_checkpoint import (
    METADATA,
    ImportedHead,
    SourceCheckpoint,
    TargetModel,
    read_folder,
    require_new,
)
from paceline.errors import CorruptModel, SettingError, UnknownArchitecture
from paceline.heads.calibration import Calibration
from paceline.heads.head_checkpoint import Card, Storage, save
from paceline.heads.registry import HEAD_TYPES

SPECULATORS: Final[dict[str, Callable[[SourceCheckpoint, TargetModel], ImportedHead]]] = {
    "eagle3": eagle3.from_checkpoint,
    "dspark": dspark.from_checkpoint,
}


def import_(
    checkpoint: Path, target: Path, out: Path, weights: Storage = "float32", *, name: str = ""
) -> Card:
    """Writes a drafter for `target` into `out`, a new folder; it drafts exactly what the checkpoint would.

    weights: how they are stored; int8 takes a quarter of the space and rounds them. name: of the target;
    without one, that of its file or folder.
    """
    if weights not in get_args(Storage):
        raise SettingError("weights", weights, " or ".join(get_args(Storage)))
    require_new(out)
    source, model = read_folder(checkpoint), TargetModel.open(target)
    head = _with_metadata(_reader(source)(source, model), source)
    net = HEAD_TYPES[head.kind].net(head.shape, model.embeddings, head.draft_ids)
    net.load_state_dict(dict(head.weights))
    card = Card(
        kind=head.kind,
        shape=head.shape,
        target=name or model.name,
        fingerprint=model.embeddings.fingerprint,
        weights=weights,
        calibration=head.calibration,
        acceptance=head.acceptance,
        tokens_per_pass=head.tokens_per_pass,
        data={"imported": source.name},
    )
    save(out, card, net)
    return card


def _reader(source: SourceCheckpoint) -> Callable[[SourceCheckpoint, TargetModel], ImportedHead]:
    config = source.config
    architectures = config.raw("architectures")
    names = [str(name) for name in architectures] if isinstance(architectures, list) else []
    kind = config.raw("speculators_model_type")
    if kind is not None:
        if isinstance(kind, str) and kind in SPECULATORS:
            return SPECULATORS[kind]
        what = f"a speculator of type {str(kind)[:40]!r}"
    elif config.raw(medusa.HEADS) is not None:
        return medusa.from_checkpoint
    elif any("eagle3" in name.lower() for name in names):
        return eagle3.from_checkpoint
    else:
        what = f"of the architecture {', '.join(names)[:60] or 'unknown'!r}"
    raise UnknownArchitecture(
        f"{source.name} is {what}, which cannot be imported: expected speculators of type "
        f"{' or '.join(SPECULATORS)}, an EAGLE-3 checkpoint (an architecture with Eagle3 in its name) or a "
        f"Medusa one ({medusa.HEADS} in config.json)"
    )


def _with_metadata(head: ImportedHead, source: SourceCheckpoint) -> ImportedHead:
    """Figures and calibration that paceline exported with a head."""
    known = source.config.fields(METADATA)
    values: dict[str, Any] = {}
    try:
        for key in ("acceptance", "tokens_per_pass"):
            values[key] = tuple(float(x) for x in known.values.get(key) or ())  # type: ignore[attr-defined]
        if curve := known.fields("calibration").values:
            scale, shift = (tuple(float(x) for x in curve[key]) for key in ("scale", "shift"))  # type: ignore[attr-defined]
            if {len(scale), len(shift)} == {head.shape.block}:
                values["calibration"] = Calibration(scale, shift)
    except (KeyError, TypeError, ValueError, OverflowError):
        raise CorruptModel(f"{source.name}: {METADATA} in config.json is damaged: export it again") from None
    return replace(head, **values)
