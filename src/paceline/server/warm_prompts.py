"""Beginnings of requests that are read into the prefix cache before anybody sends them."""

import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import ValidationError

from paceline.config import SamplingParams
from paceline.engine.engine_thread import EngineThread
from paceline.errors import PacelineError, UsageError
from paceline.llm import LLM
from paceline.output import RequestOutput
from paceline.server.openai.params import chat_params
from paceline.server.openai.protocol import ChatRequest
from paceline.server.routes import Route
from paceline.types import Round
from paceline.web.api_errors import ApiError
from paceline.web.api_keys import Key, tenant

log = logging.getLogger("paceline.server")


@dataclass(frozen=True, slots=True)
class WarmPrompt:
    """The beginning of requests: a system prompt and tools. file: what it was read from."""

    file: str
    request: ChatRequest


def read_warm_prompt(path: Path) -> WarmPrompt:
    """A file that holds the body of a chat request, or a text, which is then the system prompt."""
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        reason = problem.strerror if isinstance(problem, OSError) else "it is not UTF-8 text"
        raise UsageError(f"cannot read {path}: {reason}") from None
    if path.suffix != ".json":
        text = json.dumps({"messages": [{"role": "system", "content": text.rstrip("\n")}]})
    try:
        return WarmPrompt(path.name, ChatRequest.model_validate_json(text))
    except ValidationError as problem:
        first = problem.errors(include_url=False)[0]
        where = f"{'.'.join(map(str, first['loc']))}: " if first["loc"] else ""
        raise UsageError(f"{path.name} is no chat request: {where}{first['msg']}") from None


def route_prompts(routes: Iterable[Route], folder: Path) -> list[WarmPrompt]:
    """Those of the routes that have any. folder: of the routes file."""
    return [read_warm_prompt(folder / route.warm) for route in routes if route.warm is not None]


def prepared(
    llm: LLM, prompt: WarmPrompt, keys: Sequence[Key], single_user: bool = False
) -> Iterator[RequestOutput]:
    """One for each key, as caches of different keys are apart; without keys, one for requests without any.

    Each ends once the part that stays, whatever message comes next, is in the cache.
    """
    try:
        params = chat_params(prompt.request, llm.spec, {}, llm.tokenizer.template)
    except ApiError as error:
        raise UsageError(f"{prompt.file}: {error.message}") from None
    request = prompt.request
    names = (request.end_user, request.cache_key, request.cache_salt)
    encoded = llm.encode(params.prompt, params.output, template=params.template, prefix=True)
    for key in keys or (None,):
        own = replace(encoded, tokens=list(encoded.tokens))
        output = llm.prepare_prefill(own, SamplingParams(), tenant=tenant(key, *names))
        output.seq.anonymous = key is None and not single_user and all(name is None for name in names)
        yield output


def warm(
    llm: LLM, thread: EngineThread, prompts: Sequence[WarmPrompt], keys: Sequence[Key], single_user: bool
) -> None:
    """Has the engine read prompts while no request waits for it. One that cannot be read is logged."""
    for prompt in prompts:
        try:
            for output in prepared(llm, prompt, keys, single_user):
                _submit(thread, prompt.file, output)
        except PacelineError as error:
            log.warning("%s is not read ahead: %s", prompt.file, error)


def _submit(thread: EngineThread, file: str, output: RequestOutput) -> None:
    def deliver(r: Round) -> None:
        if r.finish is not None:
            seq = output.seq
            log.info("%s is read ahead: %d tokens, %d were cached", file, seq.prompt_len, seq.cached)

    def answer(error: PacelineError | None) -> None:
        if error is not None:
            log.warning("%s is not read ahead: %s", file, error)

    thread.submit(output.seq, deliver, answer)
