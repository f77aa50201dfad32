"""The choice of a backend for a model on this machine, the reasons against one, and the memory it takes."""

import ctypes
import logging
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal

import torch

from paceline.config import DTYPES, FLOAT_DTYPES, EngineConfig
from paceline.errors import DrafterMismatch, ModelError, NotCompiled, SettingError, UsageError
from paceline.target import hardware
from paceline.target.base import ModelTarget
from paceline.target.cuda.driver import unusable
from paceline.target.cuda.memory import MemoryPlan, planned_weights
from paceline.target.cuda.memory import plan as plan_memory
from paceline.target.cuda.packing import GGUF
from paceline.target.cuda.target import CudaTarget, make_launcher
from paceline.target.cuda.weights import CudaWeights, WeightType
from paceline.target.cuda.weights import unsupported_reason as unsupported_by_cuda
from paceline.target.eager.linear import can_pack
from paceline.target.eager.target import TorchTarget, cache_dtype, placement
from paceline.target.kv.cache import token_bytes
from paceline.target.kv.disk_cache import cache_folder
from paceline.target.native import library
from paceline.target.native.packed_file import load_packed
from paceline.target.native.packing import plan, unsupported_reason
from paceline.target.native.target import NativeTarget, cache_token_bytes
from paceline.target.weights.checkpoint import Checkpoint
from paceline.target.weights.model_config import ModelConfig
from paceline.target.weights.reader import canonical_tensors, kept_matrices, load, open_checkpoint
from paceline.target.weights.tensors import TensorEntry, fingerprint

MAX_COPY_SHARE: Final = 0.75  # a copy that reads more bytes in a pass saves too little
MIN_CACHE_MB: Final = 64  # of a copy
DISK_TIER: Final = "only the native CPU engine keeps pages on the disk"
GPU_SETTING: Final = "PACELINE_GPU"
GPU_CHOICES: Final = ("auto", "cuda", "torch")
GPU_WEIGHTS: Final[Mapping[str, WeightType]] = {  # by dtype, of the CUDA kernels
    "auto": "bf16", "bfloat16": "bf16", "int8": "int8", "fp8": "fp8", "gguf": "gguf"
}  # fmt: skip

log = logging.getLogger("paceline")


class _Unsupported(Exception):
    """The native engine cannot run this here; its text says why."""


def load_target(path: Path, config: EngineConfig) -> ModelTarget:
    """From a GGUF file or a folder: the native engine where it can, torch where it cannot."""
    target = _load_target(path, config)
    if config.cache_disk_mb and not target.disk_tier:
        log.info(
            "the KV cache of %s is not kept on the disk (cache_disk_mb): it runs on %s, and %s",
            *(path.name, target.describe(), DISK_TIER),
        )
    return target


def _load_target(path: Path, config: EngineConfig) -> ModelTarget:
    device, _ = placement(config)
    if device.type == "cuda" and config.dtype in GPU_WEIGHTS:
        return _on_gpu(path, config, device, GPU_WEIGHTS[config.dtype])
    if config.dtype == "fp8":
        expected = ", ".join(name for name in DTYPES if name != "fp8")
        raise SettingError("dtype", "fp8", f"one of {expected}", "fp8 runs on an NVIDIA GPU only")
    if device.type != "cpu" or config.dtype in FLOAT_DTYPES:
        return TorchTarget.load(path, config)
    try:
        return _native(path, config)
    except OSError as error:
        raise ModelError.unreadable(path, error) from error
    except _Unsupported as reason:
        if config.dtype in ("int8", "gguf") or library.chosen() not in ("auto", "torch"):
            raise UsageError(f"{path.name} cannot run on the native engine: {reason}") from None
        if library.chosen() == "auto":
            log.warning("%s runs on torch, which is slower here: %s", path.name, reason)
    return TorchTarget.load(path, config)


def _on_gpu(path: Path, config: EngineConfig, device: torch.device, kind: WeightType) -> ModelTarget:
    """The CUDA kernels where they know the GPU and the model, torch where they do not."""
    choice = _gpu_choice()
    if choice == "torch":
        return _torch_on_gpu(path, config, f"{GPU_SETTING}=torch")
    try:
        checkpoint = open_checkpoint(path)
        if against := _unsupported_on_gpu(checkpoint, device, kind):
            raise NotCompiled(against)
        weights = _planned(path, checkpoint, kind)
        _require_room(path, plan_memory(weights, config), device)
        launcher = make_launcher(checkpoint.shape, config, weights.kernels)
    except OSError as error:
        raise ModelError(f"{path.name} cannot be read: {error.strerror or error}") from error
    except NotCompiled as reason:
        if choice == "cuda":
            raise UsageError(f"{path.name} cannot run on the CUDA kernels: {reason}") from None
        log.warning("%s runs on torch, which is slower here: %s", path.name, reason)
        return _torch_on_gpu(path, config, str(reason))
    try:
        kept = GGUF if kind == "gguf" else ()
        return CudaTarget(load(path, torch.bfloat16, keep=kept), config, launcher, kind)
    except torch.OutOfMemoryError:  # somebody else took it meanwhile
        raise UsageError(
            f"{path.name} and a cache of {config.cache_mb} MB do not fit into the GPU's memory: "
            "give a smaller cache_mb or another device"
        ) from None


def _gpu_choice() -> str:
    choice = os.environ.get(GPU_SETTING, "auto")
    if choice not in GPU_CHOICES:
        raise SettingError(GPU_SETTING, choice, f"one of {', '.join(GPU_CHOICES)}")
    return choice


def _unsupported_on_gpu(checkpoint: Checkpoint, device: torch.device, kind: WeightType) -> str | None:
    return unusable(device) or unsupported_by_cuda(checkpoint.shape, checkpoint.tensors, kind)


def _planned(path: Path, checkpoint: Checkpoint, kind: WeightType) -> CudaWeights:
    entries = dict(canonical_tensors(checkpoint))
    kept = kept_matrices(checkpoint, entries, GGUF) if kind == "gguf" else {}
    if kind == "gguf" and not kept:
        expected = f"another, or a GGUF file with weights in {', '.join(GGUF)}"
        raise SettingError("dtype", "gguf", expected, f"{path.name} has none")
    sizes = {name: entry.shape for name, entry in entries.items()}
    return planned_weights(checkpoint.shape, sizes, kind, kept)


def _torch_on_gpu(path: Path, config: EngineConfig, reason: str) -> ModelTarget:
    if config.dtype in ("int8", "fp8", "gguf"):
        expected = f"auto, {', '.join(FLOAT_DTYPES)}"
        raise SettingError(
            "dtype", config.dtype, expected, f"only the CUDA kernels run it on a GPU: {reason}"
        )
    return TorchTarget.load(path, config)


def _require_room(path: Path, memory: MemoryPlan, device: torch.device) -> None:
    free, total = torch.cuda.mem_get_info(device)
    if memory.total <= free:
        return
    cache_mb, smaller = memory.cache_mb_in(free), "dtype gguf, fp8 or int8, another device or a smaller model"
    hint = f"cache_mb of at most {cache_mb}" if cache_mb else smaller
    raise UsageError(
        f"{path.name} does not fit into the GPU's memory ({memory}; {free / 2**20:,.0f} of "
        f"{total / 2**20:,.0f} MiB are free): give {hint}"
    )


def load_draft(path: Path, config: EngineConfig) -> ModelTarget:
    """A draft model: float weights too are rounded to 8 bits, where the native engine can run them."""
    config = replace(config, cache_disk_mb=0)
    if config.dtype == "auto" and placement(config)[0].type == "cpu":
        with suppress(_Unsupported):
            return _native(path, replace(config, dtype="int8"))
    return load_target(path, config)


def load_quantized_copy(path: Path, config: EngineConfig, target: ModelTarget) -> NativeTarget:
    """The same model in 4 bits a weight, with a smaller cache of its own: a draft model."""
    if reason := unsupported_copy_reason(path, config, target.bytes_held):
        raise _no_copy(path, reason)
    cache_mb = min(config.cache_mb, max(MIN_CACHE_MB, config.cache_mb // 4))
    smaller = replace(config, cache_mb=cache_mb, cache_disk_mb=0)
    try:
        return _native(path, smaller, four_bits=True)
    except OSError as error:
        raise ModelError.unreadable(path, error) from error
    except _Unsupported as problem:
        raise _no_copy(path, str(problem)) from None


def unsupported_copy_reason(path: Path, config: EngineConfig, target_bytes: int | None = None) -> str | None:
    """Why a copy of a model in 4 bits cannot draft for it, without reading its weights; None: it can.

    target_bytes: those of the loaded model's weights; without it, those it would have.
    """
    device, dtype = placement(config)
    if device.type != "cpu":
        return "nothing here runs such weights on a GPU"
    where, why = native_path()
    if where is None:
        return why
    try:
        checkpoint = open_checkpoint(path)
    except OSError as error:
        raise ModelError.unreadable(path, error) from error
    tensors = dict(canonical_tensors(checkpoint))
    if against := unsupported_reason(checkpoint.shape, tensors, quantise=True):
        return against
    if target_bytes is None:
        native = config.dtype not in FLOAT_DTYPES and not unsupported_reason(
            checkpoint.shape, tensors, quantise=config.dtype == "int8"
        )
        target_bytes = plan(tensors).nbytes if native else _dense_bytes(tensors, dtype)
    mb, max_mb = plan(tensors, four_bits=True).nbytes / 1e6, MAX_COPY_SHARE * target_bytes / 1e6
    if mb <= max_mb:
        return None
    return f"it would take {mb:.0f} MB, and more than {max_mb:.0f} MB save too little of a pass"


def _no_copy(path: Path, reason: str) -> DrafterMismatch:
    return DrafterMismatch(
        f"a copy of {path.name} in 4 bits cannot draft for it: {reason}; leave `quantized` out"
    )


def _native(path: Path, config: EngineConfig, four_bits: bool = False) -> NativeTarget:
    """four_bits: weights that take more are rounded to 4 bits."""
    checkpoint = open_checkpoint(path)
    tensors = dict(canonical_tensors(checkpoint))
    where, lib = _native_library(checkpoint.shape, tensors, four_bits or config.dtype == "int8")
    weights_id = fingerprint(checkpoint.identity, tensors.items())
    weights = load_packed(checkpoint, tensors, weights_id, lib, four_bits=four_bits)
    target = NativeTarget(checkpoint.shape, weights, weights_id, where, config)
    if config.cache_disk_mb:
        folder = cache_folder(config.cache_dir)
        try:
            target.add_disk_cache(folder, config.cache_disk_mb << 20, path.stem)
        except OSError as error:
            log.warning("the KV cache is not kept on the disk: %s: %s", folder, error.strerror or error)
    return target


def _native_library(
    shape: ModelConfig, tensors: Mapping[str, TensorEntry], quantise: bool
) -> tuple[str, ctypes.CDLL]:
    """The path and its library, for a model that can run on it. quantise: float weights may be rounded."""
    where, why = native_path()
    if where is None:
        raise _Unsupported(why)
    if against := unsupported_reason(shape, tensors, quantise):
        raise _Unsupported(against)
    try:
        return where, library.load(where)
    except NotCompiled as error:
        raise _Unsupported(str(error)) from error


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """How a model would run here, known before its weights are read."""

    engine: Literal["native", "cuda", "torch"]
    reason: str  # for it, or against a faster one
    weights: int  # bytes
    cache: int  # bytes, as set
    other: int  # bytes of buffers
    token: int  # bytes of one token in the cache

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.other


def plan_load(path: Path, config: EngineConfig) -> LoadPlan:
    """Decides as `load_target` does."""
    try:
        checkpoint = open_checkpoint(path)
    except OSError as error:
        raise ModelError.unreadable(path, error) from error
    shape, tensors, cache = checkpoint.shape, dict(canonical_tensors(checkpoint)), config.cache_mb << 20
    device, dtype = placement(config)
    against = f"dtype={config.dtype}"
    if device.type == "cuda" and (kind := GPU_WEIGHTS.get(config.dtype)):
        chosen = f"{GPU_SETTING}=torch" if _gpu_choice() == "torch" else None
        against = chosen or _unsupported_on_gpu(checkpoint, device, kind) or ""
        if not against:
            memory = plan_memory(_planned(path, checkpoint, kind), config)
            token, other = token_bytes(shape, torch.bfloat16.itemsize), memory.buffers + memory.graphs
            reason = "the CUDA kernels know this GPU and this model"
            return LoadPlan("cuda", reason, memory.weights, memory.cache, other, token)
    elif device.type == "cpu" and config.dtype not in FLOAT_DTYPES:
        try:
            where, _ = _native_library(shape, tensors, quantise=config.dtype == "int8")
        except _Unsupported as reason:
            against = str(reason)
        else:
            token = cache_token_bytes(shape)
            return LoadPlan("native", f"{where}: {native_path()[1]}", plan(tensors).nbytes, cache, 0, token)
    token = token_bytes(shape, cache_dtype(device, dtype).itemsize)
    weights = _dense_bytes(tensors, dtype)
    if device.type == "cpu" and checkpoint.tied and can_pack(torch.empty(0, dtype=dtype)):
        weights += tensors["embed"].elements * dtype.itemsize  # a packed head beside the embedding
    return LoadPlan("torch", against, weights, cache, 0, token)


def _dense_bytes(tensors: Mapping[str, TensorEntry], dtype: torch.dtype) -> int:
    return sum(entry.elements for entry in tensors.values()) * dtype.itemsize


def _why(path: str) -> str:
    best = "the best this processor lists"
    if path == library.TILES or not hardware.has(library.NEEDS[library.TILES]):
        return best
    return f"{best} but AMX, which a trial found {hardware.tiles(library.source_digest())}"


def native_path() -> tuple[str | None, str]:
    """The native path this process would take, or None, and the reason."""
    choice = library.chosen()
    if choice == "torch":
        return None, f"{library.SETTING}=torch"
    path = library.best_path(choice)
    if path is not None:
        return path, _why(path) if choice == "auto" else "chosen by the user"
    if choice == "auto":
        return None, "the system lists none of AVX2, AVX-512 with VNNI and NEON for this processor"
    return None, f"the system does not list what {choice} needs for this processor"
