"""Predictors on the disk, one file for each tenant of a model, so that a restart predicts as before.

    folder/HASH.json    HASH of the model's name and the tenant; weights as base64 of deflated floats

A file holds the names of tools and arguments, and values that arguments had: it is for its owner only. A
damaged one is dropped with a warning. Two servers of one model in one folder: the last to write is right.
"""

import hashlib
import json
import logging
import os
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from paceline.atomic import write_bytes
from paceline.server.tool_prediction.predictor import ToolCallPredictor

FOLDER: Final = "tool_predictions"
MAX_FILES: Final = 256  # those used longest ago go first
MAX_BYTES: Final = 4 << 20  # of a file that is read
_DAMAGE: Final = (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError)

log = logging.getLogger("paceline.server")


class PredictorFiles:
    """For one thread. Only `write` raises, an OSError."""

    def __init__(self, folder: Path, model: str) -> None:
        """folder: of the disk tier of the KV cache."""
        self._folder, self._model = folder / FOLDER, model

    def read(self, tenant: str) -> ToolCallPredictor | None:
        path = self._path(tenant)
        try:
            if path.stat().st_size > MAX_BYTES:
                raise ValueError("it is too large")
            predictor = ToolCallPredictor.of_state(json.loads(path.read_text("utf-8")))
            os.utime(path)
        except FileNotFoundError:
            return None
        except _DAMAGE as problem:
            log.warning("%s is damaged (%s): its tenant begins anew", path.name, type(problem).__name__)
            with suppress(OSError):
                path.unlink()
            return None
        return predictor

    def write(self, tenant: str, predictor: ToolCallPredictor) -> None:
        self._folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder.mkdir(mode=0o700, exist_ok=True)
        state: dict[str, Any] = predictor.state()
        write_bytes(self._path(tenant), json.dumps(state, allow_nan=False).encode(), mode=0o600)
        self._trim()

    def _path(self, tenant: str) -> Path:
        named = json.dumps([self._model, tenant]).encode()
        return self._folder / f"{hashlib.sha256(named).hexdigest()[:32]}.json"

    def _trim(self) -> None:
        files = [path for path in self._folder.glob("*.json") if path.is_file()]
        if len(files) > MAX_FILES:
            with suppress(OSError):
                files.sort(key=lambda path: path.stat().st_mtime_ns)
                for path in files[:-MAX_FILES]:
                    path.unlink()


def clear(folder: Path) -> int:
    """Removes all predictors of a folder; gives their number."""
    removed = 0
    for path in (folder / FOLDER).glob("*.json"):
        with suppress(OSError):
            path.unlink()
            removed += 1
    return removed
