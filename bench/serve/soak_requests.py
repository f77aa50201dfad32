"""Requests of a soak: good ones with the answer they must have, and bad ones."""

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any, Final

from bench import workload
from bench.serve.servers import CHAT, COMPLETIONS
from paceline import LLM, EngineConfig, SamplingParams, SpecConfig

Messages = list[dict[str, Any]]
PLAIN: Final = SpecConfig(("none",), max_draft=0)
LONGEST: Final = 400  # tokens of a prompt
SCHEMA: Final = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 24},
        "priority": {"enum": ["low", "normal", "high"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["title", "priority", "count"],
    "additionalProperties": False,
}
TOOLS: Final[list[dict[str, Any]]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": told,
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "maxLength": 16}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
    for name, told in (("get_weather", "The weather in a city."), ("get_time", "The time in a city."))
]
CITIES: Final = ("Paris", "Oslo", "Lima", "Cairo", "Rome", "Bern", "Quito", "Hanoi")
FORMAT: Final = {"type": "json_schema", "json_schema": {"name": "task", "schema": SCHEMA}}


@dataclass(frozen=True)
class Expected:
    """A request and the only right answer to it."""

    kind: str
    path: str
    body: dict[str, Any]
    text: str
    calls: tuple[tuple[str, str], ...]  # name and arguments as JSON text


def expectations(model: str, threads: int, count: int, seed: int) -> list[Expected]:
    """Written by the engine in this process, without drafts. The kinds take turns."""
    llm = LLM(model, spec=PLAIN, config=EngineConfig(threads=threads, cache_mb=256))
    rng = random.Random(seed)
    prompts = cycle(_prompts(llm, rng))
    makers: list[Callable[[LLM, list[int], random.Random], Expected]]
    makers = [_completion, _chat, _sampled, _tools, _schema]
    return [make(llm, next(prompts), rng) for make in islice(cycle(makers), count)]


def _prompts(llm: LLM, rng: random.Random) -> list[list[int]]:
    found = [
        list(prompt.tokens)
        for name, path in workload.known().items()
        for prompt in workload.choose(name, path, llm.tokenizer, 6, LONGEST, rng.randrange(1000))
    ]
    rng.shuffle(found)
    return found


def _completion(llm: LLM, prompt: list[int], rng: random.Random, **sampling: Any) -> Expected:
    how: dict[str, Any] = {"temperature": 0.0, "seed": 0, "max_tokens": rng.randint(16, 80), **sampling}
    result = llm.generate(prompt, SamplingParams(**how))
    kind = "sampled" if sampling else "greedy completion"
    return Expected(kind, COMPLETIONS, {"prompt": prompt, **how}, result.text, ())


def _sampled(llm: LLM, prompt: list[int], rng: random.Random) -> Expected:
    return _completion(llm, prompt, rng, temperature=0.8, seed=rng.randrange(1 << 31), top_p=0.95)


def _chat(llm: LLM, prompt: list[int], rng: random.Random) -> Expected:
    question = (
        f"Tell me about {rng.choice(CITIES)}, its river and its food, in {rng.randint(2, 9)} sentences."
    )
    return _answered(llm, "greedy chat", question, rng.randint(24, 96))


def _tools(llm: LLM, prompt: list[int], rng: random.Random) -> Expected:
    question = f"What is the {rng.choice(('weather', 'time'))} in {rng.choice(CITIES)} now?"
    return _answered(llm, "greedy tool call", question, 96, tools=TOOLS, tool_choice="required")


def _schema(llm: LLM, prompt: list[int], rng: random.Random) -> Expected:
    question = (
        f"Make a task of this: order {rng.randint(2, 40)} maps of {rng.choice(CITIES)}. Answer in JSON."
    )
    return _answered(llm, "greedy schema", question, 96, response_format=FORMAT)


def _answered(llm: LLM, kind: str, question: str, max_tokens: int, **more: Any) -> Expected:
    messages: Messages = [{"role": "user", "content": question}]
    how: dict[str, Any] = {"temperature": 0.0, "seed": 0, "max_tokens": max_tokens}
    result = llm.generate(messages, SamplingParams(**how), **more)
    calls = tuple((call.name, call.text or json.dumps(call.arguments)) for call in result.tool_calls)
    return Expected(kind, CHAT, {"messages": messages, **how, **more}, result.content, calls)


def bad_bodies(model: str) -> Iterator[tuple[str, str, bytes]]:
    """The mistake, the path and the body of each; each must get a status from 400 to 499."""
    hello: Messages = [{"role": "user", "content": "Hello"}]
    good = {"model": model, "messages": hello, "max_tokens": 8}

    def chat(what: str, **changed: Any) -> tuple[str, str, bytes]:
        return what, CHAT, json.dumps({**good, **changed}).encode()

    yield "no JSON", CHAT, b'{"model": '
    yield "no UTF-8", CHAT, b'{"model": "\xff\xfe"}'
    yield "a list", CHAT, b"[1, 2]"
    yield "nested too deep", CHAT, b"[" * 500 + b"]" * 500
    yield "a key twice", CHAT, b'{"model": "a", "model": "b"}'
    yield chat("an unknown model", model="nobody")
    yield chat("an unknown parameter", colour="blue")
    yield chat("a temperature below 0", temperature=-1)
    yield chat("too many choices", n=1000)
    yield chat("no messages", messages=[])
    yield chat("a role nobody has", messages=[{"role": "nobody", "content": "x"}])
    yield chat(
        "a broken schema", response_format={"type": "json_schema", "json_schema": {"schema": {"type": 7}}}
    )
    yield chat(
        "a tool that is not there", tools=TOOLS, tool_choice={"type": "function", "function": {"name": "x"}}
    )
    yield chat("an unknown drafter", speculative_config={"drafters": ["nobody"]})
    yield chat("a prompt beyond the context", messages=[{"role": "user", "content": "word " * 20000}])
    yield chat("a bias of no token", logit_bias={"-5": 1})
    yield "no prompt", COMPLETIONS, json.dumps({"model": model}).encode()
    yield (
        "tokens beyond the vocabulary",
        COMPLETIONS,
        json.dumps({"model": model, "prompt": [1 << 40]}).encode(),
    )
    yield "an unknown path", "/v1/nothing", b"{}"
