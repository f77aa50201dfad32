"""Downloads a model repository from the Hugging Face hub."""

import errno
import shutil
from collections.abc import Collection, Container, Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from paceline.atomic import locked, rename, write_json
from paceline.errors import CorruptModel, PullError
from paceline.hub.catalog import CATALOGUE
from paceline.hub.local_models import MANIFEST, hub_folder, require_space, sha256
from paceline.hub.progress import Progress, bytes_under, watching

PATTERNS: Final = ("*.safetensors", "*.json", "*.jinja", "tokenizer*")


def pull_repository(repository: str, progress: Progress) -> Path:
    """Pinned to the revision found at the start; every large file is checked against its SHA-256."""
    goal = hub_folder(repository)
    lock = goal.with_name(f".{goal.name}.lock")
    with locked(lock, lambda: progress(0, 0, f"waiting for another pull of {repository}")):
        if (goal / MANIFEST).is_file():
            return goal
        hub = _hub()
        with _plain_reasons(repository):
            info = hub.HfApi().model_info(repository, files_metadata=True)
        files = {file.rfilename: file for file in info.siblings or () if _is_needed(file.rfilename)}
        _require_runnable(repository, files)
        total = sum(file.size or 0 for file in files.values())
        partial = goal.with_name(f"{goal.name}.partial")
        partial.mkdir(exist_ok=True)
        require_space(partial, total - bytes_under(partial), repository)
        with watching(partial, progress, total, f"downloading {repository}"):
            for file in files.values():
                _download(hub, repository, file, info.sha, partial)
        _drop_all_but(files, partial)
        write_json(partial / MANIFEST, {"revision": info.sha, "size": total, "licence": _licence(info)})
        rename(partial, goal)
        progress(total, total, f"{repository} is ready")
        return goal


def _hub() -> ModuleType:
    try:
        import huggingface_hub
        from huggingface_hub.utils.tqdm import disable_progress_bars
    except ImportError as error:
        raise PullError(
            "a hub repository needs the package huggingface_hub: run `pip install huggingface_hub`, "
            f"or pull one of {', '.join(CATALOGUE)}"
        ) from error
    disable_progress_bars()
    return huggingface_hub


def _is_needed(file: str) -> bool:
    return "/" not in file and any(fnmatch(file, pattern) for pattern in PATTERNS)


def _require_runnable(repository: str, files: Collection[str]) -> None:
    if "config.json" not in files or not any(file.endswith(".safetensors") for file in files):
        raise PullError(
            f"{repository} holds no safetensors model: expected config.json and *.safetensors; "
            "to use a GGUF file of it, download that and name its path"
        )


def _download(hub: ModuleType, repository: str, file: Any, revision: str, folder: Path) -> None:
    with _plain_reasons(repository):
        hub.hf_hub_download(repository, file.rfilename, revision=revision, local_dir=folder)
    path = folder / file.rfilename
    expected = file.lfs.sha256 if file.lfs else None  # small files carry none
    if expected and (got := sha256(path)) != expected:
        path.unlink()
        raise CorruptModel(
            f"{file.rfilename} of {repository} has the wrong SHA-256 (expected {expected}, got {got}): "
            "it is deleted, pull again to fetch it anew"
        )


def _drop_all_but(files: Container[str], folder: Path) -> None:
    """Removes the library's cache files, and files that only an earlier revision had."""
    for path in folder.iterdir():
        if path.name not in files:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _licence(info: Any) -> str:
    return str((info.card_data or {}).get("license") or "unknown")


@contextmanager
def _plain_reasons(repository: str) -> Iterator[None]:
    """The library's errors often contain addresses: only their type is reported."""
    try:
        yield
    except Exception as error:
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            raise
        kind = type(error).__name__
        if kind == "RepositoryNotFoundError":
            why = "no such public repository; check the spelling, or log in to the hub if it is private"
        elif kind == "GatedRepoError":
            why = "its owner asks for consent first; give it on the hub and log in"
        else:
            why = f"the model hub cannot be reached ({kind}); check the network"
        raise PullError(
            f"could not pull {repository}: {why}, or pull one of {', '.join(CATALOGUE)}"
        ) from error
