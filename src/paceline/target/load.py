"""Which target runs a model on this machine, and why."""

import logging
import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

import torch

from paceline.config import EngineConfig
from paceline.errors import DrafterMismatch, ModelError, NotCompiled, SettingError, UsageError
from paceline.target.base import ModelTarget
from paceline.target.cuda.driver import unusable
from paceline.target.cuda.target import CudaTarget, make_launcher
from paceline.target.cuda.weights import reason_against as cuda_reason_against
from paceline.target.eager.target import TorchTarget, placement
from paceline.target.native import library
from paceline.target.native.packed_file import load_packed
from paceline.target.native.packing import plan, reason_against
from paceline.target.native.target import NativeTarget
from paceline.target.weights.reader import load, open_checkpoint, placed_tensors
from paceline.target.weights.tensors import fingerprint

MOST_OF_TARGET: Final = 0.75  # a copy that reads more bytes in a pass saves too little
LEAST_CACHE_MB: Final = 64  # of a copy
GPU_SETTING: Final = "PACELINE_GPU"
GPU_CHOICES: Final = ("auto", "cuda", "torch")

log = logging.getLogger("paceline")


class _Unsuited(Exception):
    """The native engine cannot run this here; its text says why."""


def load_target(path: Path, config: EngineConfig) -> ModelTarget:
    """From a GGUF file or a folder: the native engine where it can, torch where it cannot."""
    device, _ = placement(config)
    if device.type == "cuda" and config.dtype in ("auto", "bfloat16"):
        return _on_gpu(path, config, device)
    if device.type != "cpu" or config.dtype not in ("auto", "int8"):
        return TorchTarget.load(path, config)
    try:
        return _native(path, config)
    except OSError as error:
        raise ModelError.unreadable(path, error) from error
    except _Unsuited as reason:
        if config.dtype == "int8" or library.chosen() not in ("auto", "torch"):
            raise UsageError(f"{path.name} cannot run on the native engine: {reason}") from None
        if library.chosen() == "auto":
            log.warning("%s runs on torch, which is slower here: %s", path.name, reason)
    return TorchTarget.load(path, config)


def _on_gpu(path: Path, config: EngineConfig, device: torch.device) -> ModelTarget:
    """The CUDA kernels where they know the GPU and the model, torch where they do not."""
    choice = os.environ.get(GPU_SETTING, "auto")
    if choice not in GPU_CHOICES:
        raise SettingError(GPU_SETTING, choice, f"one of {', '.join(GPU_CHOICES)}")
    if choice == "torch":
        return TorchTarget.load(path, config)
    try:
        checkpoint = open_checkpoint(path)
        against = unusable(device) or cuda_reason_against(checkpoint.shape, checkpoint.tensors)
        if against:
            raise NotCompiled(against)
        launcher = make_launcher(checkpoint.shape, config)
    except OSError as error:
        raise ModelError(f"{path.name} cannot be read: {error.strerror or error}") from error
    except NotCompiled as reason:
        if choice == "cuda":
            raise UsageError(f"{path.name} cannot run on the CUDA kernels: {reason}") from None
        log.warning("%s runs on torch, which is slower here: %s", path.name, reason)
        return TorchTarget.load(path, config)
    return CudaTarget(load(path, torch.bfloat16), config, launcher)


def load_draft(path: Path, config: EngineConfig) -> ModelTarget:
    """A model that only guesses: float weights too are run in 8 bits each, where the native engine can."""
    if config.dtype == "auto" and placement(config)[0].type == "cpu":
        with suppress(_Unsuited):
            return _native(path, replace(config, dtype="int8"))
    return load_target(path, config)


def load_copy(path: Path, config: EngineConfig, target: ModelTarget) -> NativeTarget:
    """The same model in 4 bits a weight, with a smaller cache of its own: something to guess with."""
    if placement(config)[0].type != "cpu":
        raise _no_copy(path, "nothing here runs such weights on a GPU")
    smaller = replace(config, cache_mb=min(config.cache_mb, max(LEAST_CACHE_MB, config.cache_mb // 4)))
    try:
        return _native(path, smaller, most_bytes=int(MOST_OF_TARGET * target.bytes_held))
    except OSError as error:
        raise ModelError.unreadable(path, error) from error
    except _Unsuited as reason:
        raise _no_copy(path, str(reason)) from None


def _no_copy(path: Path, reason: str) -> DrafterMismatch:
    return DrafterMismatch(
        f"a copy of {path.name} in 4 bits cannot guess for it: {reason}; leave `quantized` out"
    )


def _native(path: Path, config: EngineConfig, most_bytes: int | None = None) -> NativeTarget:
    """most_bytes: for a copy in 4 bits a weight, which is of no use if it takes more."""
    copied = most_bytes is not None
    where, why = native_path()
    if where is None:
        raise _Unsuited(why)
    checkpoint = open_checkpoint(path)
    tensors = dict(placed_tensors(checkpoint))
    against = reason_against(checkpoint.shape, tensors, quantise=copied or config.dtype == "int8")
    if against:
        raise _Unsuited(against)
    if most_bytes is not None and (nbytes := plan(tensors, four_bits=True).nbytes) > most_bytes:
        mb, most = nbytes / 1e6, most_bytes / 1e6
        raise _Unsuited(f"it would take {mb:.0f} MB, and more than {most:.0f} MB save too little of a pass")
    mark = fingerprint(checkpoint.identity, tensors.items())
    try:
        weights = load_packed(checkpoint, tensors, mark, library.load(where), four_bits=copied)
    except NotCompiled as error:
        raise _Unsuited(str(error)) from error
    return NativeTarget(checkpoint.shape, weights, mark, where, config)


def native_path() -> tuple[str | None, str]:
    """The native path this process would take, if any, and why."""
    choice = library.chosen()
    if choice == "torch":
        return None, f"{library.SETTING}=torch"
    path = library.best_path(choice)
    if path is not None:
        return path, "the best this processor lists" if choice == "auto" else "asked for"
    if choice == "auto":
        return None, "the system lists neither AVX2 nor AVX-512 with VNNI for this processor"
    return None, f"the system does not list what {choice} needs for this processor"
