"""Errors in OpenAI's shape. No prompt, no path of the machine, no stack."""

import re
from itertools import takewhile
from typing import Any, Final

from pydantic import ValidationError

from paceline.errors import (
    BadBody,
    BodyTooLarge,
    Busy,
    CacheFull,
    ConstraintError,
    DrafterMismatch,
    PromptTooLong,
    SettingError,
    ShuttingDown,
    TextError,
    TimedOut,
    UnknownModel,
)

# Error, status, OpenAI's type, code
_KINDS: Final = (
    (PromptTooLong, 400, "invalid_request_error", "context_length_exceeded"),
    (ConstraintError, 400, "invalid_request_error", "invalid_constraint"),
    (SettingError, 400, "invalid_request_error", None),
    (BodyTooLarge, 413, "invalid_request_error", None),
    (BadBody, 400, "invalid_request_error", None),
    (TextError, 400, "invalid_request_error", None),
    (DrafterMismatch, 400, "invalid_request_error", None),
    (UnknownModel, 404, "invalid_request_error", "model_not_found"),
    (Busy, 429, "rate_limit_error", "server_busy"),
    (ShuttingDown, 503, "server_error", "shutting_down"),
    (CacheFull, 503, "server_error", "cache_full"),
    (TimedOut, 408, "timeout_error", "timeout"),
)
_SETTING: Final = re.compile(r"(\w+)=")  # how errors about a setting begin
_PARAMS: Final = {  # settings whose parameters are called otherwise
    "stop_tokens": "stop_token_ids",
    "max_draft": "num_speculative_tokens",
    "threshold": "acceptance_threshold",
}

_ONE_OF: Final = re.compile(
    r"(str|int|float|bool|(list|dict|literal)\[.*|[A-Z]\w*)"
)  # of a union, not a name


class Failure(Exception):
    """An answer that is not one."""

    def __init__(
        self,
        status: int,
        message: str,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body: dict[str, Any] = {
            "error": {"message": message, "type": kind, "param": param, "code": code}
        }
        self.headers = {} if retry_after is None else {"retry-after": str(max(1, round(retry_after)))}


def failure(error: Exception, param: str | None = None, within: str = "") -> Failure:
    """`within`: the parameter that holds the one which the error names."""
    for kind, status, type_, code in _KINDS:
        if isinstance(error, kind):
            retry = 1.0 if status in (429, 503) else None
            inside = f"{within}." if within else ""
            named = _param(error)
            param = param or (f"{inside}{named}" if named else within or None)
            return Failure(status, f"{inside}{error}", type_, param, code, retry)
    return Failure(500, "internal error: the server's log says more", "server_error")


def _param(error: Exception) -> str | None:
    """The parameter that an error is about, where it says so."""
    named = _SETTING.match(str(error))
    return _PARAMS.get(named[1], named[1]) if named else None


def invalid(error: ValidationError, known: list[str], within: str = "") -> Failure:
    """The first thing that is wrong with a request, and the parameter it is wrong with.

    `within`: where the part that was read lies in the request.
    """
    first = error.errors(include_url=False, include_input=False)[0]
    place, *inner = ((within,) if within else ()) + first["loc"]
    named = takewhile(lambda part: not _ONE_OF.fullmatch(str(part)), inner)
    param = str(place) + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in named)
    if first["type"] == "extra_forbidden":
        return Failure(400, f"{param} is not a known parameter. Known: {', '.join(known)}", param=param)
    return Failure(400, f"{param}: {first['msg']}", param=param)
