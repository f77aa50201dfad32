"""An answer: piece by piece while it is written, and summed up."""

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from paceline.errors import ConstraintError
from paceline.text import TextStream, ToolCall, ToolFormat, parse_tool_calls
from paceline.trace.tally import Tally
from paceline.types import Finish, Round, Seq, TokenLogprob


class Rounds(Protocol):
    """Where a stream's rounds come from."""

    def next_round(self, seq_id: str) -> Round: ...
    def cancel(self, seq_id: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Piece:
    """One token of an answer. Text may be empty while a character or a stop string is incomplete."""

    text: str
    token_id: int
    source: str  # the drafter that guessed it, or "target"


@dataclass(frozen=True, slots=True)
class Result:
    text: str
    token_ids: tuple[int, ...]
    sources: tuple[str, ...]  # who guessed each token
    finish: Finish | None
    prompt_tokens: int
    shared_tokens: int  # prompt tokens found in the cache
    passes: int  # of the target
    drafted: Mapping[str, int]  # guesses by drafter
    accepted: Mapping[str, int]
    seed: int
    lossy: bool
    seconds: float
    first_token_seconds: float
    logprobs: tuple[TokenLogprob, ...] = ()
    tool_calls: tuple[ToolCall, ...] = ()
    content: str = ""  # the text beside the tool calls
    value: Any = None  # the answer as the `output` that was asked for; None while incomplete or refused
    refused: str = ""  # why the answer is complete and yet no value: a validator of the output's own

    @property
    def tokens_per_pass(self) -> float:
        return len(self.token_ids) / self.passes if self.passes else 0.0


@dataclass(frozen=True, slots=True)
class Reader:
    """What is read from an answer's text once it is complete."""

    parse: Callable[[str], Any] | None = None
    tools: ToolFormat | None = None

    def read(self, text: str, complete: bool) -> dict[str, Any]:
        """Fields of a result."""
        content, calls, _ = parse_tool_calls(text, self.tools) if self.tools else (text, [], [])
        found: dict[str, Any] = {"tool_calls": tuple(calls), "content": content}
        if self.parse is None or not complete or calls:
            return found
        try:
            return found | {"value": self.parse(content)}
        except ConstraintError as error:
            return found | {"refused": str(error)}


class Stream(Iterator[Piece]):
    """Pieces as they come; `result` sums up what has come so far. Closing it cancels the request."""

    def __init__(self, rounds: Rounds, seq: Seq, text: TextStream, reader: Reader | None = None) -> None:
        self._rounds = rounds
        self._seq = seq
        self._text = text
        self._reader = reader or Reader()
        self._tally = Tally()
        self._ready: deque[Piece] = deque()
        self._said: list[str] = []
        self._finish: Finish | None = None
        self._started = time.perf_counter()
        self._first = self._last = 0.0

    def __next__(self) -> Piece:
        while not self._ready:
            if self._finish is not None:
                raise StopIteration
            self._take(self._rounds.next_round(self._seq.id))
        return self._ready.popleft()

    def _take(self, r: Round) -> None:
        if r.error is not None:
            self._finish = "error"
            raise r.error
        self._last = time.perf_counter() - self._started
        self._first = self._first or (self._last if r.tokens else 0.0)
        self._tally.add(r)
        self._finish = r.finish
        texts = [self._text.push(token) for token in r.tokens]
        if r.finish is not None and texts:
            texts[-1] += self._text.flush()
        self._said += texts
        self._ready += [Piece(*p) for p in zip(texts, r.tokens, r.sources, strict=True)]

    def read(self) -> Result:
        """Waits for the rest."""
        for _ in self:
            pass
        return self.result

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._finish is None:
            self._finish = "cancelled"
            self._rounds.cancel(self._seq.id)

    def __del__(self) -> None:
        self.close()

    @property
    def result(self) -> Result:
        tally, text = self._tally, "".join(self._said)
        cursor = self._seq.cursor
        complete = self._finish == "stop" and (cursor is None or cursor.finished)
        return Result(
            text=text,
            token_ids=tuple(tally.tokens),
            sources=tuple(tally.sources),
            finish=self._finish,
            prompt_tokens=self._seq.prompt_len,
            shared_tokens=self._seq.cached,
            passes=tally.passes,
            drafted=dict(tally.drafted),
            accepted=dict(tally.accepted),
            seed=self._seq.params.seed,
            lossy=self._seq.spec.lossy,
            seconds=self._last,
            first_token_seconds=self._first,
            logprobs=tuple(tally.logprobs),
            **self._reader.read(text, complete),
        )


def as_json(result: Result) -> dict[str, Any]:
    """One machine-readable object."""
    by_source = Counter(result.sources)
    return {
        **asdict(result),
        "drafted": sum(result.drafted.values()),
        "accepted": sum(result.accepted.values()),
        "drafted_by_source": dict(result.drafted),
        "accepted_by_source": dict(result.accepted),
        "tokens_by_source": dict(by_source),
        "tokens_per_pass": round(result.tokens_per_pass, 3),
    }
