"""GET /page/advice: the report of `paceline advise --json` that the server was started with."""

import asyncio
import json
from pathlib import Path
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from paceline.server.admission import Admission
from paceline.web.api_errors import ApiError

MAX_BYTES: Final = 8 << 20  # of the file


class AdviceServing:
    """file: read at each request, so that a new report shows; None: there is none."""

    def __init__(self, admission: Admission, file: str | None) -> None:
        self._admission, self._file = admission, file

    async def report(self, http: Request) -> Response:
        """For operators: its routes' conditions may be those of other keys. null: none for this caller."""
        shown = self._file is not None and self._admission.is_operator(http.state.key)
        found = await asyncio.to_thread(self._read, Path(str(self._file))) if shown else None
        return JSONResponse({"configured": self._file is not None, "report": found})

    def _read(self, file: Path) -> Any:
        try:
            with file.open("rb") as source:
                content = source.read(MAX_BYTES + 1)
            if len(content) > MAX_BYTES:
                raise ValueError("too large")
            found = json.loads(content)
        except (OSError, ValueError):
            found = None
        if not isinstance(found, dict) or "routes" not in found:
            raise ApiError(
                503,
                "the file of --advice cannot be read: write it with `paceline advise --json FILE`",
                "server_error",
                code="advice_not_readable",
                refusal=None,
            )
        return found
