"""Pairs of answers over HTTP: a request with drafts and the same one without must be answered alike.

Texts, tool calls, finish reasons and log-probabilities of all choices are compared. Requests are drawn over
endpoints, whole and streamed answers, choices, temperatures, penalties, biases, stop strings, constraints and
tools; lists of drafters take turns.
"""

import http.client
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from bench.serve.http_client import Refused, events, post
from bench.serve.servers import CHAT, COMPLETIONS
from bench.serve.soak_load import PATIENCE, BackgroundThreads
from bench.serve.soak_requests import CITIES, FORMAT, SCHEMA, TOOLS
from bench.serve.victims import Span

RESPONSES: Final = "/v1/responses"
ENDPOINTS: Final = (CHAT, COMPLETIONS, RESPONSES)
PLAIN: Final = {"disabled": True}
MAX_CHOICES: Final = 16
TOPICS: Final = ("rivers", "bread", "trains", "maps", "winter", "clocks", "bridges", "tea", "sorting")
STOPS: Final = (["\n\n"], [" the"], [". ", "```"], ["return", ","], "e")
LARK: Final = 'start: item (", " item)*\nitem: /[a-z]{2,8}/ "=" /[0-9]{1,3}/'
CONSTRAINTS: Final[tuple[dict[str, Any], ...]] = (
    {"json": SCHEMA},
    {"regex": "[A-Z][a-z]+( [a-z]+){2,9}\\."},
    {"choice": ["a river", "a road", "a railway line", "nothing at all"]},
    {"grammar": LARK},
    {"json_object": True},
)
ITEM_TOOLS: Final = [{"type": "function", **tool["function"]} for tool in TOOLS]
ITEM_FORMAT: Final = {"type": "json_schema", "name": "task", "schema": SCHEMA}


@dataclass(frozen=True)
class PairRequest:
    """A request that is sent twice."""

    path: str
    body: dict[str, Any]
    drafters: tuple[str, ...]
    spec: dict[str, Any]  # its speculative_config, with drafts
    streamed: tuple[bool, bool]  # with drafts, without

    @property
    def kind(self) -> str:
        return _kind(self.drafters, self.path)


def _kind(drafters: Sequence[str], path: str) -> str:
    return f"{'+'.join(drafters)} on {path}"


@dataclass(slots=True)
class Choice:
    """One answer of those to a request, by the same fields whatever the endpoint and the way it came."""

    text: str = ""
    calls: dict[int, list[str]] = field(default_factory=dict)  # name and arguments
    finish: str = ""
    logprobs: list[Any] = field(default_factory=list)

    def difference(self, other: "Choice") -> str:
        """The first field that differs; empty if none does."""
        for name in ("text", "calls", "finish", "logprobs"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                return f"{name} {mine!r:.200} with drafts, {theirs!r:.200} without"
        return ""


Answer = dict[int, Choice]


def compare(drafted: Answer, plain: Answer) -> str:
    """The first difference of two answers; empty if there is none."""
    if drafted.keys() != plain.keys():
        return f"choices {sorted(drafted)} with drafts, {sorted(plain)} without"
    found = (
        f"choice {index}: {told}" for index in plain if (told := drafted[index].difference(plain[index]))
    )
    return next(found, "")


def read_answer(port: int, path: str, body: Mapping[str, Any], streamed: bool) -> Answer:
    """Raises Refused for anything but a complete answer."""
    if not streamed:
        status, text = post(port, path, body, PATIENCE)
        if status != 200:
            raise Refused(status, text)
        answer = json.loads(text)
        return _items(answer) if path == RESPONSES else {c["index"]: _whole(c) for c in answer["choices"]}
    answers: Answer = {}
    for event in events(port, path, {**body, "stream": True}, PATIENCE):
        if "error" in event or event.get("type") in ("error", "response.failed"):
            raise Refused(500, str(event)[:300])
        _take_item(answers, event) if path == RESPONSES else _take_chunk(answers, event)
    if not answers or not all(choice.finish for choice in answers.values()):
        raise Refused(0, "a stream ended without a finish_reason")
    return answers


def _whole(choice: Mapping[str, Any]) -> Choice:
    message = choice.get("message") or {"content": choice.get("text")}
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    return Choice(
        message["content"] or "",
        {i: [call["name"], call["arguments"]] for i, call in enumerate(calls)},
        choice["finish_reason"],
        _logprobs(choice.get("logprobs")),
    )


def _logprobs(lists: Mapping[str, Any] | None) -> list[Any]:
    """Chat's have one entry a token, those of plain completions a list for each part of it."""
    if not lists:
        return []
    if "content" in lists:
        return list(lists["content"])
    return list(zip(lists["tokens"], lists["token_logprobs"], lists["top_logprobs"], strict=True))


def _take_chunk(answers: Answer, event: Mapping[str, Any]) -> None:
    for chunk in event["choices"]:
        choice, delta = answers.setdefault(chunk["index"], Choice()), chunk.get("delta") or {}
        choice.text += chunk.get("text") or delta.get("content") or ""
        for call in delta.get("tool_calls") or ():
            entry = choice.calls.setdefault(call["index"], ["", ""])
            entry[0] += call["function"].get("name") or ""
            entry[1] += call["function"].get("arguments") or ""
        choice.logprobs += _logprobs(chunk.get("logprobs"))
        choice.finish = chunk["finish_reason"] or choice.finish


def _take_item(answers: Answer, event: Mapping[str, Any]) -> None:
    """The deltas are what is compared; the response at the end has the reason."""
    choice, kind = answers.setdefault(0, Choice()), event["type"]
    if kind == "response.output_text.delta":
        choice.text += event["delta"]
        choice.logprobs += event["logprobs"]
    elif kind == "response.output_item.added" and event["item"]["type"] == "function_call":
        choice.calls[len(choice.calls)] = [event["item"]["name"], ""]
    elif kind == "response.function_call_arguments.delta":
        choice.calls[len(choice.calls) - 1][1] += event["delta"]
    elif kind in ("response.completed", "response.incomplete"):
        choice.finish = _reason(event["response"])


def _items(response: Mapping[str, Any]) -> Answer:
    choice = Choice(finish=_reason(response))
    for item in response["output"]:
        if item["type"] == "function_call":
            choice.calls[len(choice.calls)] = [item["name"], item["arguments"]]
        for part in item.get("content") or ():
            choice.text += part["text"]
            choice.logprobs += part["logprobs"]
    return {0: choice}


def _reason(response: Mapping[str, Any]) -> str:
    return f"{response['status']} {response['incomplete_details'] or ''}"


def pair_request(rng: random.Random, model: str, drafters: tuple[str, ...], path: str) -> PairRequest:
    """Half of the requests are unconstrained; a share of each kind has penalties, stops and many choices."""
    body: dict[str, Any] = {
        "model": model,
        "seed": rng.randrange(1 << 31),
        "user": f"user-{rng.randrange(4)}",
        "temperature": rng.choice((0.0, 0.7, 1.2)),
        "max_output_tokens" if path == RESPONSES else "max_tokens": rng.randint(16, 72),
        **_sampling(rng),
        **_input(rng, path),
        **_constraint(rng, path),
        **_logprobs_wanted(rng, path),
    }
    if path != RESPONSES:
        body["n"] = rng.choices((1, 2, MAX_CHOICES), (12, 3, 2))[0]
    if body.get("n") == MAX_CHOICES:
        body["max_tokens"] = min(24, body["max_tokens"])
    spec = {
        "drafters": list(drafters),
        "max_draft": rng.choice((1, 3, 8, 16)),
        "tree_width": rng.choice((1, 1, 2, 4)),
        "adaptive": rng.random() < 0.3,
    }
    return PairRequest(path, body, drafters, spec, (rng.random() < 0.5, rng.random() < 0.5))


def _sampling(rng: random.Random) -> dict[str, Any]:
    options: list[dict[str, Any]] = [
        {"top_p": rng.choice((0.5, 0.95))},
        {"top_k": rng.choice((5, 40))},
        {"min_p": 0.05},
        {"repetition_penalty": rng.choice((0.9, 1.3))},
        {"presence_penalty": rng.choice((-0.5, 1.0))},
        {"frequency_penalty": rng.choice((-0.3, 0.8))},
        {"logit_bias": {str(rng.randrange(20, 900)): rng.choice((-100, 4, 9)) for _ in range(5)}},
        {"stop": rng.choice(STOPS)},
        {"min_tokens": rng.randint(1, 12)},
        {"ignore_eos": True},
    ]
    chosen: dict[str, Any] = {}
    for option in options:
        if rng.random() < 0.15:
            chosen |= option
    return chosen


def _input(rng: random.Random, path: str) -> dict[str, Any]:
    """Half of them ask for what was written before, so that drafts are accepted."""
    subject = f"{rng.choice(TOPICS)} and {rng.choice(TOPICS)}, {rng.randrange(50)} words"
    line = f"    total_{rng.choice(TOPICS)} = total_{rng.choice(TOPICS)} + {rng.randrange(9)}\n"
    code = "".join(line.replace("total", f"total{i % 3}") for i in range(rng.randint(2, 8)))
    repeated = rng.random() < 0.5
    if path == COMPLETIONS:
        return {"prompt": f"def add():\n{code}\n\ndef add():\n" if repeated else f"On {subject}:\n"}
    question = (
        f"Write this again:\n{code}" if repeated else f"Write about {subject}, and {rng.choice(CITIES)}."
    )
    history = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": code}]
    messages = [*(history if rng.random() < 0.3 else ()), {"role": "user", "content": question}]
    if path == RESPONSES:
        return {"input": messages}
    predicted = {"prediction": {"type": "content", "content": code}} if rng.random() < 0.2 else {}
    return {"messages": messages, **predicted}


def _constraint(rng: random.Random, path: str) -> dict[str, Any]:
    if rng.random() < 0.5:
        return {}
    tools = {
        "tools": ITEM_TOOLS if path == RESPONSES else TOOLS,
        "tool_choice": rng.choice(("required", "auto", "auto")),
    }
    if path == RESPONSES:
        return rng.choice((tools, {"text": {"format": ITEM_FORMAT}}))
    structured = {"structured_outputs": rng.choice(CONSTRAINTS)}
    return structured if path == COMPLETIONS else rng.choice((structured, tools, {"response_format": FORMAT}))


def _logprobs_wanted(rng: random.Random, path: str) -> dict[str, Any]:
    if rng.random() < 0.6:
        return {}
    if path == COMPLETIONS:
        return {"logprobs": rng.choice((0, 3))}
    more = {"top_logprobs": rng.choice((0, 3))}
    if path == RESPONSES:
        return {"include": ["message.output_text.logprobs"], **more}
    return {"logprobs": True, **more}


@dataclass(slots=True)
class PairRecords:
    """Outcomes of all pairs; filled by many threads."""

    compared: Counter[str] = field(default_factory=Counter)  # by PairRequest.kind
    choices: int = 0  # compared
    wrong: list[str] = field(default_factory=list)
    stuck: list[str] = field(default_factory=list)
    refused: list[tuple[int, str]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def total(self) -> int:
        return sum(self.compared.values())

    def short(self) -> str:
        return f"{self.total} pairs, {len(self.wrong)} wrong, {len(self.refused)} refused"

    def rows(
        self, lists: Sequence[tuple[str, ...]], drafted: Mapping[str, tuple[int, int]]
    ) -> list[dict[str, Any]]:
        """One for each list. drafted: tokens drafted and accepted by each drafter."""
        return [
            {
                "drafters": "+".join(names),
                **{path: self.compared[_kind(names, path)] for path in ENDPOINTS},
                "drafted": sum(drafted.get(name, (0, 0))[0] for name in names),
                "accepted": sum(drafted.get(name, (0, 0))[1] for name in names),
            }
            for names in lists
        ]

    def faults(self, lists: Sequence[tuple[str, ...]], drafted: Mapping[str, tuple[int, int]]) -> list[str]:
        """Pairs of a drafter that never drafts show nothing."""
        alone = sorted({names[0] for names in lists if len(names) == 1 and self.total})
        return [f"{name} drafted no token" for name in alone if not drafted.get(name, (0, 0))[0]]

    def add(self, request: PairRequest, drafted: Answer, plain: Answer) -> None:
        told = compare(drafted, plain)
        with self.lock:
            self.compared[request.kind] += 1
            self.choices += len(plain)
            if told:
                self.wrong.append(f"{request.kind}: {told}; {request.spec} {json.dumps(request.body)}")


class PairClients(BackgroundThreads):
    """Send pair after pair while entered and not paused; each client goes through all lists and endpoints."""

    def __init__(
        self, port: int, model: str, lists: Sequence[tuple[str, ...]], clients: int, seed: int = 0
    ) -> None:
        super().__init__()
        self.records = PairRecords()
        self.spans: list[Span] = []  # in which pairs were sent, by time.monotonic
        self._port, self._model = port, model
        self._sending = threading.Event()
        self._since = 0.0
        self._busy = 0  # clients in the middle of a pair
        self._idle = threading.Condition()
        self._kinds = [(drafters, path) for drafters in lists for path in ENDPOINTS]
        self._threads = [
            threading.Thread(target=self._client, args=(random.Random(f"{seed} pairs {i}"),), daemon=True)
            for i in range(clients)
        ]

    def resume(self) -> None:
        if not self._sending.is_set():
            self._since = time.monotonic()
            self._sending.set()

    def pause(self) -> None:
        """Waits until the pairs under way are answered."""
        if self._sending.is_set():
            self._sending.clear()
            with self._idle:
                self._idle.wait_for(lambda: not self._busy, PATIENCE)
            self.spans.append(Span(self._since, time.monotonic() - self._since))

    def _client(self, rng: random.Random) -> None:
        while not self._ending.is_set():
            for drafters, path in rng.sample(self._kinds, len(self._kinds)):
                while not self._begin():
                    if self._ending.is_set():
                        return
                try:
                    self.send(pair_request(rng, self._model, drafters, path), plain_first=rng.random() < 0.5)
                finally:
                    with self._idle:
                        self._busy -= 1
                        self._idle.notify_all()

    def _begin(self) -> bool:
        """True: the next pair may be sent. Waits for that some time."""
        self._sending.wait(0.2)
        with self._idle:
            begins = self._sending.is_set() and not self._ending.is_set()
            self._busy += begins
        return begins

    def send(self, request: PairRequest, plain_first: bool) -> None:
        """Both requests, one after the other."""
        sent = [(request.spec, request.streamed[0]), (PLAIN, request.streamed[1])]
        try:
            answers = [
                read_answer(self._port, request.path, {**request.body, "speculative_config": spec}, streamed)
                for spec, streamed in (sent[::-1] if plain_first else sent)
            ]
        except TimeoutError:
            self.records.stuck.append(f"{request.kind}: {str(request.body)[:200]}")
        except Refused as refused:
            self.records.refused.append((refused.status, f"{refused}; {json.dumps(request.body)}"))
            self._ending.wait(0.2)
        except (OSError, http.client.HTTPException) as problem:
            self.records.refused.append((0, f"connection lost: {type(problem).__name__}: {problem}"))
            self._ending.wait(0.2)
        else:
            drafted, plain = answers[::-1] if plain_first else answers
            self.records.add(request, drafted, plain)
