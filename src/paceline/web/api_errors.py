"""Errors in OpenAI's shape: one exception, and one table from the package's errors to it.

No message holds a prompt, a path of this machine or a stack.
"""

import asyncio
import logging
import traceback
from collections.abc import Awaitable, Callable
from typing import Any, Final, NamedTuple

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from paceline.errors import (
    Busy,
    CacheFull,
    ConstraintError,
    DrafterMismatch,
    PacelineError,
    PromptTooLong,
    SettingError,
    ShuttingDown,
    TextError,
    TimedOut,
    UnknownModel,
    UsageError,
)
from paceline.log import log_error

log = logging.getLogger("paceline.web")

Handler = Callable[[Request], Awaitable[Response]]

MAX_MESSAGE: Final = 2000  # characters
CLIENT_CLOSED_REQUEST: Final = 499  # nginx's status for a client that left before its answer
CANCELLED: Final = "cancelled"  # the error code of such a request


class _Row(NamedTuple):
    exception: type[PacelineError]
    status: int
    type: str
    code: str | None
    refusal: str  # the reason label of a request that failed before its first pass


_TABLE: Final = (
    _Row(PromptTooLong, 400, "invalid_request_error", "context_length_exceeded", "too_long"),
    _Row(ConstraintError, 400, "invalid_request_error", "invalid_constraint", "invalid"),
    _Row(UsageError, 400, "invalid_request_error", None, "invalid"),
    _Row(TextError, 400, "invalid_request_error", None, "invalid"),
    _Row(DrafterMismatch, 400, "invalid_request_error", None, "invalid"),
    _Row(UnknownModel, 404, "invalid_request_error", "model_not_found", "invalid"),
    _Row(Busy, 429, "rate_limit_error", "server_busy", "queue_full"),
    _Row(ShuttingDown, 503, "server_error", "shutting_down", "draining"),
    _Row(CacheFull, 503, "server_error", "cache_full", "cache_full"),
    _Row(TimedOut, 408, "timeout_error", "timeout", "deadline"),
)
KEY_LIMIT: Final = "key_limit"
UNAUTHORIZED: Final = "unauthorized"
FORBIDDEN: Final = "forbidden"
CONNECTIONS: Final = "connections"
OUT_OF_MEMORY: Final = "out_of_memory"
NOT_LOADED: Final = "not_loaded"
_OTHER_REFUSALS: Final = (KEY_LIMIT, UNAUTHORIZED, FORBIDDEN, CONNECTIONS, OUT_OF_MEMORY, NOT_LOADED)
REFUSALS: Final = frozenset({*_OTHER_REFUSALS, *(row.refusal for row in _TABLE)})


class ApiError(Exception):
    """An error response. `refusal`: why the request was not admitted; None: the server itself failed."""

    def __init__(
        self,
        status: int,
        message: str,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
        refusal: str | None = "invalid",
    ) -> None:
        super().__init__(message)
        self.status, self.type, self.param, self.code = status, type, param, code
        self.message = message if len(message) <= MAX_MESSAGE else f"{message[:MAX_MESSAGE]}..."
        self.refusal = refusal
        self.headers = {} if retry_after is None else {"retry-after": str(max(1, round(retry_after)))}

    @property
    def retryable(self) -> bool:
        """The same request may succeed later: the server's state refused it, not its content."""
        return self.status in (429, 503)

    @property
    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        return JSONResponse(self.body, self.status, self.headers)


def api_error(error: BaseException, param: str | None = None) -> ApiError:
    """The API error for any exception; one that is not in the table is an internal error."""
    if isinstance(error, ApiError):
        return error
    for row in _TABLE:
        if isinstance(error, row.exception):
            retry = 1.0 if row.status in (429, 503) else None
            retry = error.retry_after_s if isinstance(error, Busy) else retry
            param = param or _param(error)
            return ApiError(row.status, str(error), row.type, param, row.code, retry, row.refusal)
    if isinstance(error, MemoryError):
        message = "the server has too little memory for this request: try again later"
        code = OUT_OF_MEMORY
        return ApiError(503, message, "server_error", code=code, retry_after=1, refusal=OUT_OF_MEMORY)
    return ApiError(500, "internal error: the server's log says more", "server_error", refusal=None)


def _param(error: BaseException) -> str | None:
    if isinstance(error, SettingError):
        return error.setting
    return error.param if isinstance(error, ConstraintError) else None


def error_code(error: BaseException) -> str:
    """One word for an error, for metrics, spans and traces."""
    if isinstance(error, ClientDisconnect | asyncio.CancelledError | GeneratorExit):
        return CANCELLED
    known = api_error(error)
    return known.code or known.type


def log_and_convert(error: Exception, path: str) -> ApiError:
    """The API error for an exception; the log gets those that are the server's own fault."""
    known = api_error(error)
    if known.status == 500 or isinstance(error, MemoryError):
        log_error(log, f"{path} failed", error.__cause__ or error if error is known else error)
    return known


def with_error_responses(handler: Handler) -> Handler:
    """Every exception of the handler becomes a response in OpenAI's shape."""

    async def handle(request: Request) -> Response:
        try:
            return await handler(request)
        except ClientDisconnect:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        except Exception as error:
            response = log_and_convert(error, request.scope["route"].path).response()
            # The request refers to its error, and the error's frames to the request and its body: without
            # this, a body of megabytes stays until the garbage collector's rarest pass.
            traceback.clear_frames(error.__traceback__)
            return response

    return handle


async def not_found(request: Request, error: Exception) -> Response:
    request.state.error = missing = ApiError(404, "no such path")  # for the access log
    return missing.response()


async def not_allowed(request: Request, error: Exception) -> Response:
    allowed = error.headers if isinstance(error, HTTPException) else None
    request.state.error = refused = ApiError(405, "the method is not allowed here")
    return JSONResponse(refused.body, 405, allowed)
