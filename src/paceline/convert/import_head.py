"""A checkpoint of another format, made a drafter's folder."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, get_args

from paceline.convert import dspark, eagle3, medusa
from paceline.convert.files import read_folder, require_new
from paceline.convert.foreign_checkpoint import OURS, Found, Taken, Target
from paceline.errors import CorruptModel, SettingError, UnknownArchitecture
from paceline.heads.calibration import Calibration
from paceline.heads.head_checkpoint import Card, Storage, save
from paceline.heads.kinds import KINDS

SPECULATORS: Final[dict[str, Callable[[Found, Target], Taken]]] = {
    "eagle3": eagle3.taken,
    "dspark": dspark.taken,
}


def import_(
    checkpoint: Path, target: Path, out: Path, weights: Storage = "float32", *, name: str = ""
) -> Card:
    """Writes a drafter for `target` into `out`, a new folder; every guess is that of the checkpoint.

    weights: how they are kept; int8 takes a quarter of the room and rounds them. name: what the target is
    called; without one, what its file or folder is.
    """
    if weights not in get_args(Storage):
        raise SettingError("weights", weights, " or ".join(get_args(Storage)))
    require_new(out)
    found, model = read_folder(checkpoint), Target.open(target)
    taken = _with_ours(_reader(found)(found, model), found)
    net = KINDS[taken.kind].net(taken.shape, model.pieces, taken.draft_ids)
    net.load_state_dict(dict(taken.weights))
    card = Card(
        kind=taken.kind,
        shape=taken.shape,
        target=name or model.name,
        fingerprint=model.pieces.fingerprint,
        weights=weights,
        calibration=taken.calibration,
        acceptance=taken.acceptance,
        tokens_per_pass=taken.tokens_per_pass,
        data={"imported": found.name},
    )
    save(out, card, net)
    return card


def _reader(found: Found) -> Callable[[Found, Target], Taken]:
    config = found.config
    architectures = config.raw("architectures")
    names = [str(name) for name in architectures] if isinstance(architectures, list) else []
    kind = config.raw("speculators_model_type")
    if kind is not None:
        if isinstance(kind, str) and kind in SPECULATORS:
            return SPECULATORS[kind]
        what = f"a speculator of type {str(kind)[:40]!r}"
    elif config.raw(medusa.HEADS) is not None:
        return medusa.taken
    elif any("eagle3" in name.lower() for name in names):
        return eagle3.taken
    else:
        what = f"of the architecture {', '.join(names)[:60] or 'unknown'!r}"
    raise UnknownArchitecture(
        f"{found.name} is {what}, which cannot be imported: expected speculators of type "
        f"{' or '.join(SPECULATORS)}, an EAGLE-3 checkpoint (an architecture with Eagle3 in its name) or a "
        f"Medusa one ({medusa.HEADS} in config.json)"
    )


def _with_ours(taken: Taken, found: Found) -> Taken:
    """What a head of ours knew when it was exported."""
    known = found.config.fields(OURS)
    values: dict[str, Any] = {}
    try:
        for key in ("acceptance", "tokens_per_pass"):
            values[key] = tuple(float(x) for x in known.values.get(key) or ())  # type: ignore[attr-defined]
        if curve := known.fields("calibration").values:
            scale, shift = (tuple(float(x) for x in curve[key]) for key in ("scale", "shift"))  # type: ignore[attr-defined]
            if {len(scale), len(shift)} == {taken.shape.block}:
                values["calibration"] = Calibration(scale, shift)
    except (KeyError, TypeError, ValueError, OverflowError):
        raise CorruptModel(f"{found.name}: {OURS} in config.json is damaged: export it again") from None
    return replace(taken, **values)
