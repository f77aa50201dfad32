"""The tools and response formats that requests had last, in a file for the server's next start."""

import json
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from paceline.constraints import OutputSpec
from paceline.recent_file import RecentFile

FOLDER: Final = "recent_outputs"  # in the folder of the disk tier of the KV cache
MAX_OUTPUTS: Final = 16
MAX_BYTES: Final = 2**20  # of all of them, as JSON


class RecentOutputs:
    """The tools and response formats that requests for a model had last.

    Compiled grammars are shared by all tenants, as they are without this.
    """

    def __init__(self, folder: Path, weights: str) -> None:
        """folder: of the disk tier. weights: their fingerprint."""
        self._file = RecentFile(_path(folder, weights), MAX_OUTPUTS, MAX_BYTES)

    def note(self, output: OutputSpec) -> None:
        """One whose grammar was compiled, of a request that may be remembered."""
        if output.output is not None or not output.constrained:
            return
        body = {
            "tools": output.tools,
            "tool_choice": output.tool_choice,
            "parallel_tool_calls": output.parallel_tool_calls,
            "response_format": output.response_format,
        }
        given = {name: value for name, value in body.items() if value not in (None, (), [])}
        self._file.note(json.dumps(given).encode())

    def read(self) -> list[dict[str, Any]]:
        """As fields of a request, those used last first."""
        with suppress(ValueError):  # of another layout
            return [dict(json.loads(value)) for value in self._file.read()]
        return []


def clear(folder: Path, weights: Collection[str] | None = None) -> None:
    """Removes what is known of models with these weights, or of all."""
    for pattern in ("*",) if weights is None else [f"{_path(folder, one).name}*" for one in weights]:
        for path in (folder / FOLDER).glob(pattern):  # unfinished ones, too
            with suppress(OSError):
                path.unlink()


def _path(folder: Path, weights: str) -> Path:
    return folder / FOLDER / weights[:32]
