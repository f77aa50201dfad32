"""Trained drafters for a target: found by name or folder, checked, and made ready to guess."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from shutil import copytree
from tempfile import TemporaryDirectory

import torch

from paceline import hub
from paceline.config import EngineConfig
from paceline.drafters.heads import drafter_of
from paceline.drafters.heads.block import BlockDrafter
from paceline.errors import ModelError, PacelineError, UnknownModel, UsageError
from paceline.heads.base import TargetEmbeddings
from paceline.heads.head_checkpoint import CARD, StoredHead, read, read_card
from paceline.heads.local_heads import DRAFT_CARD, available_heads, drafter_path, in_package, shelf, shipped
from paceline.heads.runner import HeadTarget
from paceline.heads.versions import Version, current
from paceline.hub.catalog import CATALOGUE
from paceline.target.eager.target import placement
from paceline.target.weights.reader import open_checkpoint, placed_tensors
from paceline.target.weights.tensors import fingerprint
from paceline.types import Drafter

log = logging.getLogger("paceline")

Name = str | PathLike[str]  # of a drafter that was trained here, or its folder


@dataclass(frozen=True, slots=True)
class Trained:
    """One that is there; nothing but its card has been read."""

    name: str
    kind: str  # what the drafter is called where it serves
    root: Path  # its folder
    version: Version  # the one that is to serve


def find_trained(names: Sequence[Name]) -> list[Trained]:
    """In the order given. A drafter is known by its kind, so there is one of each at most."""
    found: dict[str, Trained] = {}
    for name in names:
        folder = drafter_path(name)
        if not folder.exists():
            here = ", ".join(path.name for path in available_heads()) or "none yet: see `paceline train`"
            raise UnknownModel(
                f"no trained drafter {folder.name!r}: expected a folder, or one trained here ({here})"
            )
        version = current(folder)
        kind = read_card(version.folder).kind
        if kind in found:
            raise UsageError(
                f"{found[kind].name} and {folder.name} are both {kind} drafters: "
                "give one of each kind, since requests name them by it"
            )
        found[kind] = Trained(folder.name, kind, folder, version)
    return list(found.values())


def usual(model: Path, config: EngineConfig) -> list[str]:
    """Those in the package that serve this model unasked: on a GPU, where they pay; on a CPU none do."""
    if placement(config)[0].type == "cpu":
        return []
    names, wanted = [folder.name for folder in shipped()], fingerprint_of(model)
    return [name for name in names if _made_for(name) == wanted]


def _made_for(name: str) -> str:
    """The fingerprint of its target. One that cannot be read is an error for those who name it."""
    try:
        return read_card(drafter_path(name)).fingerprint
    except PacelineError as problem:
        log.warning("%s guesses for nobody: %s", name, problem)
        return ""


def fingerprint_of(model: Path) -> str:
    """What its target would say, without the weights."""
    return _marked(model)[0]


def _marked(model: Path) -> tuple[str, int]:
    """Its fingerprint, and how many tokens it has."""
    try:
        checkpoint = open_checkpoint(model)
        return fingerprint(checkpoint.identity, placed_tensors(checkpoint)), checkpoint.shape.vocab_size
    except OSError as error:
        raise ModelError(f"{model.name} cannot be read: {error.strerror or error}") from error


def on_the_shelf(one: Trained) -> Trained:
    """A drafter in the package never changes; a copy of it may, and has its name from then on."""
    if not in_package(one.root):
        return one
    root = shelf() / one.name
    if root.exists() and not (root / CARD).exists():
        raise UsageError(
            f"{root} has no drafter yet, and what learns from {one.name} would go there: finish its training "
            "with `paceline train`, or remove the folder"
        )
    if not root.exists():
        root.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=root.parent) as making:
            copytree(one.root, Path(making, one.name)).rename(root)
    return replace(one, root=root, version=Version(0, root))


def draft_model_path(name: str) -> Path:
    """Of a draft model that was trained here, or of any other model; a catalogue name wins over both."""
    trained = drafter_path(name)
    here = name not in CATALOGUE and (trained / DRAFT_CARD).is_file()
    return trained if here else hub.resolve(name)


def read_trained(found: Sequence[Trained], model: Path) -> list[StoredHead]:
    """Checked against the model, of which no weights are read."""
    if not found:
        return []
    marked = _marked(model)
    return [read(one.version.folder, *marked) for one in found]


def drafters_beside(target: HeadTarget, heads: Sequence[StoredHead], config: EngineConfig) -> list[Drafter]:
    """Each on the backend that runs it fastest, with the target's own embeddings."""
    if not heads:
        return []
    if placement(config)[0].type == "cpu" and config.threads:
        torch.set_num_threads(config.threads)
    embeddings = target.embeddings()
    return [_drafter(head, target, embeddings) for head in heads]


def _drafter(head: StoredHead, target: HeadTarget, embeddings: TargetEmbeddings) -> Drafter:
    """Its cache is as large as the target's: positions found there are never computed again."""
    runner, calibration = target.block_runner(head), head.card.calibration
    if runner:
        return BlockDrafter(runner, calibration, target.capacity)
    return drafter_of(head.net(embeddings), calibration, target.capacity)
