"""Downloads models from the Hugging Face hub, or from the server that HF_ENDPOINT names. Resumable.

The library huggingface_hub speaks with the hub: listings, tokens, redirects, byte ranges, retries. The files
on the disk are kept here, since the library's own downloads begin from nothing when they are interrupted:

NAME.partial/FILE.DIGEST.part    what has arrived of a file; the digest tells revisions apart
NAME.partial/FILE                a whole file, checked
NAME.partial/.journal            the digests of those
NAME/                            renamed from NAME.partial when all files are there
"""

import errno
import hashlib
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from paceline.atomic import locked, read_json, rename, sync, write_json
from paceline.errors import CorruptModel, PullError
from paceline.hub.catalog import CATALOGUE
from paceline.hub.local_models import (
    MANIFEST,
    arrived,
    hub_folder,
    hub_lock,
    hub_partial,
    pull_again,
    require_space,
    sha256,
)
from paceline.hub.progress import Progress, bytes_under, watching
from paceline.hub.repository import MAIN, HubName, RepositoryFile, Selection, select

if TYPE_CHECKING:
    from huggingface_hub import HfApi

DEFAULT_ENDPOINT: Final = "https://huggingface.co"
LOOK_UP_S: Final = 60.0  # for the list of a repository's files
MAX_FILE: Final = 50 * 10**9  # bytes: the hub sends larger files by a protocol of its own only
_JOURNAL: Final = ".journal"  # no file that a model needs is called so
# Faults of this machine's disk; all others are the network's or the hub's.
_LOCAL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.EIO)


@dataclass(frozen=True, slots=True)
class Listing:
    """A model in a repository, as the hub lists it."""

    selection: Selection
    revision: str  # the commit
    licence: str

    @property
    def missing(self) -> int:
        """Bytes still to be downloaded."""
        partial = hub_partial(self.selection.name)
        return self.selection.size - min(self.selection.size, bytes_under(partial))


def look_up(name: HubName) -> Listing:
    """Asks the hub which files the name takes."""
    api = _api(name)
    with _plain_reasons(name):
        info = api.model_info(
            name.repository, revision=name.revision or None, files_metadata=True, timeout=LOOK_UP_S
        )
    files = [
        RepositoryFile(file.rfilename, file.size or 0, file.lfs.sha256 if file.lfs else file.blob_id or "")
        for file in info.siblings or ()
    ]
    card: Any = info.card_data or {}
    licence = str(card.get("license") or "unknown")
    return Listing(select(name, files), str(info.sha), licence)


def pull_repository(name: HubName, progress: Progress) -> Path:
    """Pinned to the revision found at the start; every file is checked against the hub's digest."""
    listing = look_up(name)
    chosen = listing.selection
    _require_sendable(chosen)
    goal, partial = hub_folder(chosen.name), hub_partial(chosen.name)
    with locked(hub_lock(chosen.name), lambda: progress(0, 0, f"waiting for another pull of {chosen.name}")):
        if not (goal / MANIFEST).is_file():
            partial.mkdir(exist_ok=True)
            require_space(partial, listing.missing, str(chosen.name))
            with watching(partial, progress, chosen.size, f"downloading {chosen.name.short}"):
                _download_all(listing, partial)
            _declare_whole(listing, partial)
            shutil.rmtree(goal, ignore_errors=True)  # left by a removal that was cut short
            rename(partial, goal)
            (goal / _JOURNAL).unlink(missing_ok=True)
        progress(chosen.size, chosen.size, f"{chosen.name} is ready")
    return goal / chosen.gguf if chosen.gguf else goal


def _require_sendable(chosen: Selection) -> None:
    for file in chosen.files:
        if file.size > MAX_FILE:
            raise PullError(
                f"{file.name} has {file.size / 1e9:,.0f} GB, too many for a plain download: run "
                f"`hf download {chosen.name.repository} {file.path} --local-dir FOLDER`, then name its path"
            )


def endpoint() -> str:
    return (os.environ.get("HF_ENDPOINT") or DEFAULT_ENDPOINT).rstrip("/")


def _api(name: HubName) -> "HfApi":
    """Imported for a hub only, since it takes a while; its warnings and bars would be drawn across ours."""
    try:
        from huggingface_hub import HfApi
        from huggingface_hub.utils.tqdm import disable_progress_bars
    except ImportError as error:
        raise PullError(
            f"{name} needs the package huggingface_hub: run `pip install huggingface_hub`, "
            f"or pull one of {', '.join(CATALOGUE)}"
        ) from error
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    disable_progress_bars()
    return HfApi(endpoint=endpoint())


def _download_all(listing: Listing, partial: Path) -> None:
    verified: dict[str, str] = read_json(partial / _JOURNAL)
    for file in listing.selection.files:
        goal = partial / file.name
        if verified.get(file.name) == file.digest and goal.is_file() and goal.stat().st_size == file.size:
            continue
        goal.parent.mkdir(exist_ok=True)
        goal.unlink(missing_ok=True)
        part = partial / f"{file.name}.{file.digest[:16]}.part"
        _download(listing, file, part)
        _check(listing.selection.name, file, part)
        rename(part, goal)
        verified |= {file.name: file.digest}
        write_json(partial / _JOURNAL, verified)


def _download(listing: Listing, file: RepositoryFile, part: Path) -> None:
    """Goes on where the part ends, and after every cut for as long as more arrives."""
    from huggingface_hub.file_download import hf_hub_url, http_get
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]  # public all the same

    name = listing.selection.name
    url = hf_hub_url(name.repository, file.path, revision=listing.revision, endpoint=endpoint())
    if part.exists() and part.stat().st_size > file.size:
        part.unlink()
    while True:
        with _plain_reasons(name), part.open("ab") as stream:  # closed before bytes are counted
            held = stream.tell()
            try:
                http_get(
                    url, stream, resume_size=held, headers=build_hf_headers(), expected_size=file.size or None
                )
                sync(stream)
                return
            except Exception as error:
                if _is_local(error) or stream.tell() <= held:
                    raise


def _check(name: HubName, file: RepositoryFile, part: Path) -> None:
    """Deletes what is not what the hub lists."""
    if file.digest and (got := _digest(file, part)) != file.digest:
        part.unlink()
        raise CorruptModel(
            f"{file.name} of {name} has the wrong digest (expected {file.digest}, got {got}): "
            "it is deleted, pull again to fetch it anew"
        )


def _digest(file: RepositoryFile, path: Path) -> str:
    if len(file.digest) == hashlib.sha256().digest_size * 2:
        return sha256(path)
    content = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def _declare_whole(listing: Listing, partial: Path) -> None:
    chosen = listing.selection
    names = [file.name for file in chosen.files]
    kept = {name.partition("/")[0] for name in (*names, _JOURNAL)}
    for path in partial.iterdir():  # files that only an earlier revision had
        if path.name not in kept:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    manifest: dict[str, Any] = {
        "revision": listing.revision,
        "size": chosen.size,
        "licence": listing.licence,
    }
    if chosen.gguf:
        manifest |= {"file": chosen.gguf, "files": names}
    write_json(partial / MANIFEST, manifest)


def _is_local(error: Exception) -> bool:
    return isinstance(error, OSError) and error.errno in _LOCAL


@contextmanager
def _plain_reasons(name: HubName) -> Iterator[None]:
    """The library's errors are pages of text with addresses: each becomes one line."""
    try:
        yield
    except Exception as error:
        if _is_local(error):
            raise
        status = getattr(getattr(error, "response", None), "status_code", None)
        raise PullError(f"could not pull {name}: {_reason(name, error, status)}") from error


def _reason(name: HubName, error: Exception, status: int | None) -> str:
    kinds = {kind.__name__ for kind in type(error).__mro__}
    from huggingface_hub import get_token

    again, kept = pull_again(str(name)), "what has arrived is kept; " if arrived(str(name)) else ""
    if "GatedRepoError" in kinds:
        accept = f"accept its licence at {endpoint()}/{name.repository}"
        if get_token() is None:
            return f"{accept}, then set HF_TOKEN to a token of yours from {endpoint()}/settings/tokens"
        return f"{accept} with the account of your token (HF_TOKEN, or that of `hf auth login`)"
    if status == 401 and get_token() is not None:
        return f"the hub does not accept your token: set HF_TOKEN to one from {endpoint()}/settings/tokens"
    if "RepositoryNotFoundError" in kinds or status == 401:  # of a private one the hub says the same
        private = (
            "the account of your token cannot see it" if get_token() else "set HF_TOKEN if it is private"
        )
        return f"no such repository: check the spelling, or {private}; or pull one of {', '.join(CATALOGUE)}"
    if "RevisionNotFoundError" in kinds:
        listed = f"{endpoint()}/{name.repository}/tree/main"
        return f"no branch, tag or commit {name.revision or MAIN}: {listed} lists them"
    if "EntryNotFoundError" in kinds:
        return "a file of it has just been removed: pull again"
    if "OfflineModeIsEnabled" in kinds:
        return "HF_HUB_OFFLINE is set: unset it"
    if status is not None:
        wait = "asks to wait" if status == 429 else f"answered with status {status}"
        return f"the model hub {wait}: {kept}try again later: {again}"
    return (
        f"the model hub cannot be reached ({type(error).__name__}): {kept}check the network, "
        f"then {again}, or pull one of {', '.join(CATALOGUE)}"
    )
