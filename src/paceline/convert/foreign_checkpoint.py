"""Checkpoints of other formats: records for import and export, vocabulary maps, and files on disk."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from paceline.atomic import write_json
from paceline.errors import CorruptModel, DrafterMismatch, UnknownModel, UsageError, short
from paceline.heads.base import DenseTargetEmbeddings, HeadConfig
from paceline.heads.calibration import Calibration
from paceline.target.weights.checkpoint import Fields
from paceline.target.weights.model_config import ModelConfig
from paceline.target.weights.reader import load_embeddings, open_checkpoint
from paceline.target.weights.safetensors import INDEX, SINGLE, read_json

WHOLE_TEXT: Final = 2**30  # a window larger than any text
METADATA: Final = "paceline"  # key in config.json of what the format does not know
ARCHITECTURES: Final = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
}


@dataclass(frozen=True, slots=True)
class TargetModel:
    """The target of a head."""

    name: str
    shape: ModelConfig
    embeddings: DenseTargetEmbeddings  # float32

    @classmethod
    def open(cls, path: Path) -> "TargetModel":
        return cls(path.name, open_checkpoint(path).shape, load_embeddings(path))

    @property
    def embed(self) -> Tensor:
        """[vocab, width], scaled as the input of the first layer."""
        return self.embeddings.embed * self.embeddings.embed_scale


@dataclass(frozen=True, slots=True)
class OutputCheckpoint:
    """A checkpoint to be written."""

    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class SourceCheckpoint:
    """A checkpoint as read from disk."""

    name: str
    config: Fields
    tensors: Mapping[str, Tensor]

    def tensor(self, name: str) -> Tensor:
        if name not in self.tensors:
            there = ", ".join(sorted(self.tensors)[:3]) or "nothing"
            raise CorruptModel(f"{self.name} has no tensor {name} (there are {there}, ...): fetch it again")
        return self.tensors[name]

    def weight(self, name: str, *sizes: int | None) -> Tensor:
        """In float32. sizes: expected by its config.json; None: any."""
        tensor = self.tensor(name)
        there = [None if size is None else real for size, real in zip(sizes, tensor.shape, strict=False)]
        if tensor.dim() != len(sizes) or there != list(sizes) or not tensor.is_floating_point():
            kind = str(tensor.dtype).removeprefix("torch.")
            expected = " x ".join("any" if size is None else str(size) for size in sizes)
            raise CorruptModel(
                f"{self.name}: {name} is {tuple(tensor.shape)} of {kind}, and its config.json makes it "
                f"{expected} numbers: fetch it again"
            )
        return tensor.float()


@dataclass(frozen=True, slots=True)
class ImportedHead:
    """A checkpoint converted to a draft head."""

    kind: str
    shape: HeadConfig
    draft_ids: Tensor  # ascending
    weights: Mapping[str, Tensor]  # of the net
    calibration: Calibration | None = None
    acceptance: tuple[float, ...] = ()
    tokens_per_pass: tuple[float, ...] = ()
    data: Mapping[str, Any] = field(default_factory=dict)


def vocab_maps(draft_ids: Tensor, vocab: int, more: int = 0) -> dict[str, Tensor]:
    """The maps d2t and t2d between draft and target vocabulary; none where they are the same.

    more: further tokens that the head reads.
    """
    if len(draft_ids) == vocab:
        return {}
    known = torch.zeros(vocab + more, dtype=torch.bool)
    known[draft_ids] = True
    return {"d2t": draft_ids - torch.arange(len(draft_ids)), "t2d": known}


def draft_order(source: SourceCheckpoint, target: TargetModel) -> tuple[Tensor, Tensor]:
    """The draft vocabulary, ascending, and the row of each of its tokens in the checkpoint."""
    vocab = len(target.embeddings.embed)
    size = source.config.integer("draft_vocab_size", vocab)
    if size == vocab and "d2t" not in source.tensors:
        return torch.arange(vocab), torch.arange(vocab)
    offset = source.tensor("d2t")
    if offset.shape != (size,) or offset.is_floating_point() or offset.is_complex():
        raise CorruptModel(
            f"{source.name}: d2t is {tuple(offset.shape)}, expected a whole number for each of the {size} "
            "tokens of draft_vocab_size: fetch it again"
        )
    ids, rows = (torch.arange(size) + offset).sort()
    if not ids.diff().all() or ids[0] < 0 or ids[-1] >= vocab:
        raise DrafterMismatch(
            f"{source.name}: d2t does not name {size} different tokens of {target.name}, which has {vocab}: "
            "import it for the model that it was trained for"
        )
    return ids, rows


def require_target(source: SourceCheckpoint, target: TargetModel, width: int, vocab: int) -> None:
    """vocab: size of the head's input vocabulary."""
    own = target.embeddings.embed.shape
    for what, theirs, ours in (("hidden size", width, own[1]), ("vocabulary size", vocab, own[0])):
        if theirs != ours:
            raise DrafterMismatch(
                f"{source.name} was made for a model of {what} {theirs}, and {target.name} has {ours}: "
                "import it for the model that it was trained for"
            )


def taps_of(source: SourceCheckpoint, inputs: object, target: TargetModel) -> tuple[int, ...]:
    """inputs: layers whose input is read; one past the last for the output of the last."""
    layers = target.shape.layers
    if not isinstance(inputs, list | tuple) or not inputs or not all(type(i) is int for i in inputs):
        raise CorruptModel(
            f"{source.name}: the list of layers that are read is {str(inputs)[:40]!r}, "
            "expected numbers of layers: fetch it again"
        )
    outside = [i for i in inputs if not 1 <= i <= layers]
    if outside:
        raise DrafterMismatch(
            f"{source.name} reads layer {outside[0]}, and {target.name} has 1 to {layers}: "
            "import it for the model that it was trained for"
        )
    return tuple(i - 1 for i in inputs)


def equals_target(tensor: Tensor, own: Tensor) -> bool:
    """True if a tensor equals the target's, in the dtype it is stored in."""
    return tensor.shape == own.shape and torch.equal(tensor.float(), own.to(tensor.dtype).float())


CONFIG: Final = "config.json"
PICKLED: Final = ("pytorch_model.bin", "medusa_lm_head.pt")
PLAIN: Final = (SINGLE, "medusa_lm_head.safetensors")


def write_folder(out: Path, output: OutputCheckpoint, dtype: torch.dtype) -> None:
    """Floating-point tensors get `dtype`."""
    from safetensors.torch import save_file

    out.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: (tensor.to(dtype) if tensor.is_floating_point() else tensor).detach().cpu().contiguous()
        for name, tensor in output.tensors.items()
    }
    save_file(tensors, out / SINGLE, metadata={"format": "pt"})
    write_json(
        out / CONFIG, {**output.config, "dtype": str(dtype).removeprefix("torch.")}, indent=2, ascii=False
    )


def require_new(out: Path) -> None:
    """An error if the folder exists and is not empty."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{out} is there already: name a new folder, or remove it first")


def read_folder(folder: Path) -> SourceCheckpoint:
    if not folder.is_dir():
        raise UnknownModel(f"there is no folder {folder}: expected one with {CONFIG} and weights")
    try:
        config = read_json(folder / CONFIG)
    except OSError as error:
        raise CorruptModel(f"{folder.name}/{CONFIG} cannot be read: {error}") from None
    return SourceCheckpoint(folder.name, Fields(f"{folder.name}/{CONFIG}", config), _tensors(folder))


def _tensors(folder: Path) -> dict[str, Tensor]:
    try:
        tensors = _stored(folder)
    except Exception as error:  # torch has many
        raise CorruptModel(f"the weights in {folder.name} are damaged: {str(error)[:120]}") from None
    if tensors is None:
        raise CorruptModel(f"{folder.name} has no weights: expected one of {', '.join((*PLAIN, *PICKLED))}")
    for name, tensor in tensors.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor) or tensor.layout != torch.strided:
            raise CorruptModel(
                f"the weights in {folder.name} are damaged: {short(name)} is {type(tensor).__name__}, "
                "expected a name and a tensor"
            )
    return tensors


def _stored(folder: Path) -> dict[str, Tensor] | None:
    from safetensors.torch import load_file

    if (folder / INDEX).is_file():
        names = sorted(set(read_json(folder / INDEX)["weight_map"].values()))
        return {name: t for shard in names for name, t in load_file(_inside(folder, shard)).items()}
    for name in PLAIN:
        if (folder / name).is_file():
            return dict(load_file(folder / name))
    for name in PICKLED:
        if (folder / name).is_file():
            return dict(torch.load(folder / name, map_location="cpu", weights_only=True))
    return None


def _inside(folder: Path, name: str) -> Path:
    if Path(name).name != name:
        raise ValueError(f"{INDEX} names {name[:80]!r}, which is not a file beside it")
    return folder / name
