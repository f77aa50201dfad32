"""Which target runs a model on this machine, and why."""

import logging
from pathlib import Path

from paceline.config import EngineConfig
from paceline.errors import ModelError, NotCompiled, SettingError
from paceline.target.load import load, open_checkpoint, placed_tensors
from paceline.target.native import library
from paceline.target.native.layout import reason_against
from paceline.target.native.native_target import NativeTarget
from paceline.target.native.packed import packed
from paceline.target.stored import fingerprint
from paceline.target.torch_target import TorchTarget, placement

log = logging.getLogger("paceline")

AnyTarget = NativeTarget | TorchTarget


def load_target(path: Path, config: EngineConfig) -> AnyTarget:
    """From a GGUF file or a folder: the native engine where it can, torch where it cannot."""
    device, _ = placement(config)
    if device.type != "cpu" or config.dtype not in ("auto", "int8"):
        return TorchTarget.load(path, config)
    try:
        target = native(path, config)
    except OSError as error:
        raise ModelError(f"{path.name} cannot be read: {error.strerror or error}") from error
    if isinstance(target, NativeTarget):
        return target
    if config.dtype == "int8" or library.chosen() in ("avx512", "avx2", "portable"):
        raise SettingError(f"{path.name} cannot run on the native engine: {target}")
    if library.chosen() == "auto":
        log.warning("%s runs on torch, which is slower here: %s", path.name, target)
    return TorchTarget.load(path, config)


def native(path: Path, config: EngineConfig) -> NativeTarget | str:
    """The native target, or the reason why there is none."""
    where = native_path()
    if where[0] is None:
        return where[1]
    checkpoint = open_checkpoint(path)
    tensors = dict(placed_tensors(checkpoint))
    against = reason_against(checkpoint.shape, tensors, quantise=config.dtype == "int8")
    if against:
        return against
    mark = fingerprint(checkpoint.identity, tensors.items())
    try:
        lib = library.load(where[0])
    except NotCompiled as error:
        return str(error)
    weights = packed(checkpoint, tensors, mark, lib)
    return NativeTarget(checkpoint.shape, weights, mark, where[0], config)


def native_path() -> tuple[str | None, str]:
    """The native path this process would take, and why."""
    choice = library.chosen()
    if choice == "torch":
        return None, f"{library.SETTING}=torch"
    path = library.best_path(choice)
    if path is None:
        wanted = "AVX2 nor AVX-512 with VNNI" if choice == "auto" else choice
        return None, f"this processor lists neither {wanted}" if choice == "auto" else f"it lists no {wanted}"
    return path, "asked for" if choice != "auto" else "the best this processor lists"


__all__ = ["AnyTarget", "load", "load_target", "native", "native_path"]
