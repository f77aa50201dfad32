"""What requests of earlier processes needed is made ready again at the start: pages of the cache, grammars.

Pages are loaded one at a time (target/kv/preload.py). For grammars, the tools and response formats of the
last requests are kept in a file; in a thread of its own, each is prepared again for a chat that nobody sent.
That compiles its grammar within the limits of any other, and uses the chat template and all else on the way
of a request for the first time. The server waits a little for both. Pages that are left then are loaded by
the engine while it has no requests.
"""

import json
import logging
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from threading import Thread
from time import perf_counter
from typing import Final

from pydantic import ValidationError

from paceline.constraints import OutputSpec
from paceline.constraints.cursor import lower_priority
from paceline.engine.engine_thread import EngineThread
from paceline.errors import PacelineError
from paceline.llm import LLM
from paceline.log import log_error
from paceline.recent_file import RecentFile
from paceline.server.openai.params import chat_params
from paceline.server.openai.protocol import ChatRequest
from paceline.web.api_errors import ApiError

FOLDER: Final = "recent_outputs"  # in the folder of the disk tier of the KV cache
MAX_OUTPUTS: Final = 16
MAX_BYTES: Final = 2**20  # of all of them, as JSON
SECONDS: Final = 5.0  # of preparing them, at most
WAIT_S: Final = 0.25  # until the server is ready all the same
_CHAT: Final = [{"role": "user", "content": "x"}]

log = logging.getLogger("paceline.server")


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

    def prepare(self, llm: LLM) -> int:
        """Compiles their grammars, the one used last first; gives their number."""
        began, count = perf_counter(), 0
        for value in self._file.read():
            if perf_counter() - began > SECONDS:
                break
            with suppress(PacelineError, ApiError, ValidationError, ValueError):  # then its request tells
                body = {"messages": _CHAT, **json.loads(value)}
                request = ChatRequest.model_validate(body)
                params = chat_params(request, llm.spec, {}, llm.tokenizer.template)
                encoded = llm.encode(params.prompt, params.output)
                llm.prepare(encoded, params.params, params.output, remember=False)
                count += 1
        return count


def preload(llm: LLM, thread: EngineThread, outputs: RecentOutputs) -> None:
    """Makes ready what was used last, or begins to. Before the engine's thread is started."""
    until = perf_counter() + WAIT_S
    preparing = Thread(target=_prepare, args=(llm, outputs), name="paceline-preload", daemon=True)
    with suppress(RuntimeError):  # no memory for a thread: requests compile them
        preparing.start()
    if (load_page := llm.target.preload()) is not None:
        more = True
        while more and perf_counter() < until:
            more = load_page()
        if more:
            thread.while_idle(load_page)
    if preparing.ident is not None:
        preparing.join(max(0.0, until - perf_counter()))


def _prepare(llm: LLM, outputs: RecentOutputs) -> None:
    lower_priority()
    began = perf_counter()
    try:
        count = outputs.prepare(llm)
    except Exception as problem:
        log_error(log, "the tools of the last requests could not be made ready", problem)
        return
    if count:
        log.info(
            "tools and response formats of the last requests are ready: %d, in %.0f ms",
            count,
            1000 * (perf_counter() - began),
        )


def clear(folder: Path, weights: Collection[str] | None = None) -> None:
    """Removes what is known of models with these weights, or of all."""
    for pattern in ("*",) if weights is None else [f"{_path(folder, one).name}*" for one in weights]:
        for path in (folder / FOLDER).glob(pattern):  # unfinished ones, too
            with suppress(OSError):
                path.unlink()


def _path(folder: Path, weights: str) -> Path:
    return folder / FOLDER / weights[:32]
