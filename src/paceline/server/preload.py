"""What requests of earlier processes needed is made ready again at the start: pages of the cache, grammars.

Pages are loaded one at a time (target/kv/preload.py). The tools and response formats of the last requests
(recent_outputs.py) are prepared again, in a thread of their own, for a chat that nobody sent. That compiles
their grammars within the limits of any other, and uses the chat template and all else on the way of a request
for the first time. The server waits a little for both. Pages that are left then are loaded by the engine
while it has no requests.
"""

import logging
from contextlib import suppress
from threading import Thread
from time import perf_counter
from typing import Final

from pydantic import ValidationError

from paceline.constraints.cursor import lower_priority
from paceline.engine.engine_thread import EngineThread
from paceline.errors import PacelineError
from paceline.llm import LLM
from paceline.log import log_error
from paceline.server.openai.params import chat_params
from paceline.server.openai.protocol import ChatRequest
from paceline.server.recent_outputs import RecentOutputs
from paceline.web.api_errors import ApiError

SECONDS: Final = 5.0  # of preparing them, at most
WAIT_S: Final = 0.25  # until the server is ready all the same
_CHAT: Final = [{"role": "user", "content": "x"}]

log = logging.getLogger("paceline.server")


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
        count = _compile(llm, outputs)
    except Exception as problem:
        log_error(log, "the tools of the last requests could not be made ready", problem)
        return
    if count:
        log.info(
            "tools and response formats of the last requests are ready: %d, in %.0f ms",
            count,
            1000 * (perf_counter() - began),
        )


def _compile(llm: LLM, outputs: RecentOutputs) -> int:
    """Those used last first; gives their number."""
    began, count = perf_counter(), 0
    for body in outputs.read():
        if perf_counter() - began > SECONDS:
            break
        with suppress(PacelineError, ApiError, ValidationError, ValueError):  # then its request tells
            request = ChatRequest.model_validate({"messages": _CHAT, **body})
            params = chat_params(request, llm.spec, {}, llm.tokenizer.template)
            encoded = llm.encode(params.prompt, params.output)
            llm.prepare(encoded, params.params, params.output, remember=False)
            count += 1
    return count
