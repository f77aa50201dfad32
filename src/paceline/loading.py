"""From names to a model that can speculate: target, trained heads, drafters and the cost of a pass.

`load_model` puts the list of drafters together. It checks names, cards and settings before it reads weights,
since reading them takes a while.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from shutil import copytree
from tempfile import TemporaryDirectory
from typing import Final

from paceline import hub
from paceline.atomic import rename
from paceline.config import EngineConfig, SpecConfig, require
from paceline.drafters import DRAFTERS, TARGET_DRAFTERS, model_free
from paceline.drafters.draft_model import DRAFT_VOCABS, DraftVocab, ModelDrafter, SelfDrafter, drafter_for
from paceline.drafters.draft_model.calibration_text import SAMPLES
from paceline.drafters.draft_model.layer_search import TENANT, layers_for
from paceline.drafters.heads import BlockDrafter, drafter_of
from paceline.drafters.imported import import_drafter, is_import_path
from paceline.errors import (
    DrafterMismatch,
    ModelError,
    PacelineError,
    UnknownModel,
    UsageError,
    short,
    unknown_name,
)
from paceline.heads.base import TargetEmbeddings
from paceline.heads.head_checkpoint import CARD, StoredHead, read, read_card
from paceline.heads.local_heads import (
    DRAFT_CARD,
    available_heads,
    drafter_path,
    in_package,
    store_folder,
)
from paceline.heads.registry import HEAD_TYPES
from paceline.heads.runner import HeadTarget
from paceline.heads.versions import Version, current
from paceline.hub.catalog import CATALOGUE
from paceline.target.base import ModelTarget
from paceline.target.cost import CostTable, cost_table
from paceline.target.eager.target import placement
from paceline.target.hardware import set_torch_threads
from paceline.target.load import load_draft, load_quantized_copy, load_target, unsupported_copy_reason
from paceline.target.weights.reader import canonical_tensors, open_checkpoint
from paceline.target.weights.tensors import fingerprint
from paceline.text import Tokenizer
from paceline.types import Drafter

log = logging.getLogger("paceline")

Name = str | PathLike[str]  # of a head in the local store or the package, or its folder

# Arguments of LLM and options of the commands that load a drafter.
_LOADED_BY: Final = {
    "model": "draft_model=... (--draft-model)",
    **{kind: f"trained=[...] (--trained), a head of kind {kind}" for kind in HEAD_TYPES},
    **{name: f"spec=SpecConfig(({name!r}, ...)) (--drafters)" for name in TARGET_DRAFTERS},
}


@dataclass(frozen=True, slots=True)
class TrainedHead:
    """A head on disk; only its card has been read."""

    name: str
    kind: str  # also the drafter's name
    root: Path  # its folder
    version: Version  # the one in use


@dataclass(frozen=True, slots=True)
class LoadedModel:
    tokenizer: Tokenizer
    target: ModelTarget
    heads: tuple[TrainedHead, ...]
    drafters: dict[str, Drafter]
    spec: SpecConfig  # of requests that bring none
    cost: CostTable  # of a pass


def load_model(
    path: Path,
    *,
    draft_model: str | None = None,
    draft_vocab: DraftVocab = "auto",
    drafters: Sequence[Drafter | str] = (),
    trained: Name | Sequence[Name] | None = None,
    spec: SpecConfig | None = None,
    config: EngineConfig,
) -> LoadedModel:
    """Options as for `LLM`."""
    require(
        lambda vocab: vocab in DRAFT_VOCABS, "draft_vocab", draft_vocab, f"one of {', '.join(DRAFT_VOCABS)}"
    )
    imported = import_drafters((*(one for one in drafters if isinstance(one, str)), *_paths(spec)))
    custom = _custom([*(one for one in drafters if not isinstance(one, str)), *imported.values()])
    if spec is not None:
        names = {path: drafter.name for path, drafter in imported.items()}
        spec = replace(spec, drafters=tuple(names.get(name, name) for name in spec.drafters))
    heads = find_heads(trained or ())
    ready = model_free() | custom
    _check_kinds(heads, ready)
    extra = (*custom, *(head.kind for head in heads), *(("model",) if draft_model else ()))
    spec = spec or SpecConfig((*SpecConfig().drafters, *extra))
    check_drafters(spec, {*ready, *extra}, TARGET_DRAFTERS)
    _check_usable(spec, ready, path, config, draft_model)
    tokenizer = Tokenizer.load(path)
    stored = read_heads(heads, path)
    target = load_target(path, config)
    ready |= {drafter.name: drafter for drafter in head_drafters(target, stored, config)}
    if draft_model is not None:
        ready["model"] = model_drafter(draft_model, draft_vocab, tokenizer, target, config)
    if "quantized" in spec.drafters and "quantized" not in ready:
        ready["quantized"] = quantized_drafter(target, path, config)
    if "self" in spec.drafters and "self" not in ready:
        ready["self"] = layer_skip_drafter(target, tokenizer)
    cost = cost_table(target)
    target.make_ready()
    return LoadedModel(tokenizer, target, tuple(heads), ready, spec, cost)


def unusable(
    drafter: str, model: Path, config: EngineConfig | None = None, draft_model: Path | None = None
) -> str | None:
    """The reason against a drafter of the registry for a model, without reading weights; None: there is none.

    draft_model: the one in question for the drafter `model`. One that cannot pay is not offered; named all
    the same, it is loaded with this reason as a warning, for it works and it may be an experiment.
    """
    if drafter == "quantized":
        return unsupported_copy_reason(model, config or EngineConfig())
    if drafter == "model" and draft_model is not None:
        try:
            smaller = weight_bytes(draft_model) < weight_bytes(model)
        except PacelineError as error:
            return str(error)
        if not smaller:
            return f"{draft_model.name} is no smaller than {model.name}: its drafts cost more than they save"
    return None


def _check_usable(
    spec: SpecConfig,
    custom: Mapping[str, Drafter],
    model: Path,
    config: EngineConfig,
    draft_model: str | None,
) -> None:
    """Refuses drafters that cannot work; warns of a draft model that cannot pay."""
    for name in spec.drafters:
        if name in TARGET_DRAFTERS and name not in custom and (reason := unusable(name, model, config)):
            raise DrafterMismatch(f"{model.name} cannot use {name!r}: {reason}; leave `{name}` out")
    if draft_model and (reason := unusable("model", model, config, draft_model_path(draft_model))):
        log.warning("%s", reason)


def weight_bytes(model: Path) -> int:
    """Bytes of the weights in its file; a pass reads about as many."""
    try:
        return sum(stored.nbytes for _, stored in canonical_tensors(open_checkpoint(model)))
    except OSError as error:
        raise ModelError.unreadable(model, error) from error


def _custom(drafters: Sequence[Drafter]) -> dict[str, Drafter]:
    for drafter in drafters:
        if isinstance(drafter, type) or not isinstance(getattr(drafter, "name", None), str):
            raise UsageError(f"{drafter!r} is not usable as a drafter: give an object with a `name`")
    return {drafter.name: drafter for drafter in drafters}


def import_drafters(paths: Iterable[str]) -> dict[str, Drafter]:
    """A new drafter for each import path; each has a name of its own."""
    made = {path: import_drafter(path) for path in dict.fromkeys(paths)}
    taken = dict.fromkeys(DRAFTERS, "a drafter of the package")
    for path, drafter in made.items():
        if drafter.name in taken:
            raise UsageError(f"{path} is called {drafter.name!r}, as {taken[drafter.name]} is: rename it")
        taken[drafter.name] = path
    return made


def _paths(spec: SpecConfig | None) -> list[str]:
    return [] if spec is None else [name for name in spec.drafters if is_import_path(name)]


def _check_kinds(heads: Sequence[TrainedHead], drafters: Mapping[str, Drafter]) -> None:
    for head in heads:
        if head.kind in drafters:
            raise UsageError(
                f"{head.name} would be called {head.kind!r}, as a drafter given here is: rename that one"
            )


def check_drafters(spec: SpecConfig, loaded: Iterable[str], loadable: Iterable[str] = ()) -> None:
    """Every drafter of the spec is loaded, or the error says how to load it. loadable: those loaded later."""
    loaded = set(loaded)
    usable = {*loaded, *loadable}
    for name in spec.drafters:
        if name not in usable:
            raise UsageError(not_loaded(name, loaded))


def not_loaded(name: str, loaded: Iterable[str]) -> str:
    """Tells a drafter that is not loaded from one that does not exist."""
    if is_import_path(name):
        return (
            f"{short(name)} is an import path, which only those who load the model may give: "
            f"name a drafter that is loaded: {', '.join(sorted(loaded))}"
        )
    if name in _LOADED_BY:
        return (
            f"the drafter {name!r} is known but not loaded: load the model with {_LOADED_BY[name]}. "
            f"Loaded: {', '.join(sorted(loaded))}"
        )
    return unknown_name("drafter", name, sorted({*loaded, *_LOADED_BY}))


def model_drafter(
    name: str, vocab: DraftVocab, tokenizer: Tokenizer, target: ModelTarget, config: EngineConfig
) -> Drafter:
    """A smaller model as the drafter `model`."""
    path = draft_model_path(name)
    model, own_tokenizer = load_draft(path, config), Tokenizer.load(path)
    drafter = drafter_for(model, own_tokenizer, tokenizer, target.vocab_size, vocab)
    drafter.fingerprint = f"{model.fingerprint}, {model.describe()}, {vocab}"
    return drafter


def quantized_drafter(target: ModelTarget, path: Path, config: EngineConfig) -> Drafter:
    """The target's weights in 4 bits. Loaded only if named: it takes memory."""
    copy = load_quantized_copy(path, config, target)
    cost = copy.bytes_held / target.bytes_held
    drafter = ModelDrafter(copy, target.vocab_size, cost=cost, name="quantized")
    drafter.fingerprint = f"{copy.fingerprint}, {copy.describe()}"
    return drafter


def layer_skip_drafter(target: ModelTarget, tokenizer: Tokenizer) -> Drafter:
    """Some of the target's own layers. Loaded only if named: the first time, it searches for them."""
    layers = layers_for(target, target.fingerprint, lambda: [tokenizer.encode(text) for text in SAMPLES])
    target.forget(TENANT)
    drafter = SelfDrafter(target, layers)
    drafter.fingerprint = f"layers {layers}"
    return drafter


def find_heads(names: Name | Sequence[Name]) -> list[TrainedHead]:
    """In this order. A request names a head by its kind, so there is one of each kind at most."""
    heads: dict[str, TrainedHead] = {}
    for name in [names] if isinstance(names, str | PathLike) else names:
        folder = drafter_path(name)
        if not folder.exists():
            here = ", ".join(path.name for path in available_heads()) or "none yet: see `paceline train`"
            raise UnknownModel(
                f"no trained drafter {folder.name!r}: expected a folder, or one trained here ({here})"
            )
        version = current(folder)
        kind = read_card(version.folder).kind
        if kind in heads:
            raise UsageError(
                f"{heads[kind].name} and {folder.name} are both {kind} drafters: "
                "give one of each kind, since requests name them by it"
            )
        heads[kind] = TrainedHead(folder.name, kind, folder, version)
    return list(heads.values())


def model_fingerprint(model: Path) -> str:
    """The fingerprint of its target, without reading the weights."""
    return _identity(model)[0]


def _identity(model: Path) -> tuple[str, int]:
    """Fingerprint and vocabulary size."""
    try:
        checkpoint = open_checkpoint(model)
        return fingerprint(checkpoint.identity, canonical_tensors(checkpoint)), checkpoint.shape.vocab_size
    except OSError as error:
        raise ModelError.unreadable(model, error) from error


def copy_to_store(head: TrainedHead) -> TrainedHead:
    """A head in the package never changes; its copy in the local store may, and hides it from then on."""
    if not in_package(head.root):
        return head
    root = store_folder() / head.name
    if root.exists() and not (root / CARD).exists():
        raise UsageError(
            f"{root} has no drafter yet, and what learns from {head.name} would go there: finish its "
            "training with `paceline train`, or remove the folder"
        )
    if not root.exists():
        root.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=root.parent) as folder:
            copied = copytree(head.root, Path(folder, head.name))
            try:
                rename(copied, root)
            except OSError:
                if not (root / CARD).exists():
                    raise  # else another process has copied it meanwhile
    return replace(head, root=root, version=Version(0, root))


def draft_model_path(name: str) -> Path:
    """A draft model trained here, or any other model; a name in the catalogue wins over both."""
    trained = drafter_path(name)
    here = name not in CATALOGUE and (trained / DRAFT_CARD).is_file()
    return trained if here else hub.resolve(name)


def read_heads(heads: Sequence[TrainedHead], model: Path) -> list[StoredHead]:
    """Their weights, checked against the model's fingerprint."""
    if not heads:
        return []
    identity = _identity(model)
    return [read(head.version.folder, *identity) for head in heads]


def head_drafters(target: HeadTarget, heads: Sequence[StoredHead], config: EngineConfig) -> list[Drafter]:
    """Each on the backend that runs it fastest, with the target's own embeddings."""
    if not heads:
        return []
    if placement(config)[0].type == "cpu":
        set_torch_threads(config.threads)
    embeddings = target.embeddings()
    return [_head_drafter(head, target, embeddings) for head in heads]


def _head_drafter(head: StoredHead, target: HeadTarget, embeddings: TargetEmbeddings) -> Drafter:
    """Its cache is as large as the target's: positions found there are never computed again."""
    runner, calibration = target.block_runner(head), head.card.calibration
    drafter: Drafter
    if runner:
        drafter = BlockDrafter(runner, calibration, target.capacity)
    else:
        drafter = drafter_of(head.net(embeddings), calibration, target.capacity)
    drafter.fingerprint = head.fingerprint
    return drafter
