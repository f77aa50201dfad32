"""Which target runs a model on this machine, and why."""

import logging
from pathlib import Path

from paceline.config import EngineConfig
from paceline.errors import ModelError, NotCompiled, SettingError
from paceline.target.load import open_checkpoint, placed_tensors
from paceline.target.native import library
from paceline.target.native.layout import reason_against
from paceline.target.native.native_target import NativeTarget
from paceline.target.native.packed import packed
from paceline.target.stored import fingerprint
from paceline.target.torch_target import TorchTarget, placement

log = logging.getLogger("paceline")


class _Unsuited(Exception):
    """The native engine cannot run this here; its text says why."""


def load_target(path: Path, config: EngineConfig) -> NativeTarget | TorchTarget:
    """From a GGUF file or a folder: the native engine where it can, torch where it cannot."""
    device, _ = placement(config)
    if device.type != "cpu" or config.dtype not in ("auto", "int8"):
        return TorchTarget.load(path, config)
    try:
        return _native(path, config)
    except OSError as error:
        raise ModelError(f"{path.name} cannot be read: {error.strerror or error}") from error
    except _Unsuited as reason:
        if config.dtype == "int8" or library.chosen() not in ("auto", "torch"):
            raise SettingError(f"{path.name} cannot run on the native engine: {reason}") from None
        if library.chosen() == "auto":
            log.warning("%s runs on torch, which is slower here: %s", path.name, reason)
    return TorchTarget.load(path, config)


def _native(path: Path, config: EngineConfig) -> NativeTarget:
    where, why = native_path()
    if where is None:
        raise _Unsuited(why)
    checkpoint = open_checkpoint(path)
    tensors = dict(placed_tensors(checkpoint))
    against = reason_against(checkpoint.shape, tensors, quantise=config.dtype == "int8")
    if against:
        raise _Unsuited(against)
    mark = fingerprint(checkpoint.identity, tensors.items())
    try:
        weights = packed(checkpoint, tensors, mark, library.load(where))
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
