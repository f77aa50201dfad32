"""From rounds to text: the output of a request while it is written, and its figures once it has ended.

RequestOutput takes rounds. The server reads deltas from it; `LLM.stream` wraps it in a Stream of Pieces.
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from html import escape
from typing import Any, Protocol

from paceline import notebook
from paceline.config import warn_renamed
from paceline.errors import ConstraintError, short
from paceline.text import (
    CallDelta,
    ContentDelta,
    Delta,
    OfferedTools,
    ReasoningDelta,
    Rejection,
    TextReader,
    ToolCall,
    ToolFormat,
    ToolStream,
    parse_tool_calls,
)
from paceline.trace.record import RequestStats
from paceline.types import Finish, Round, Seq, TokenLogprob


@dataclass(frozen=True, slots=True)
class Piece:
    """One token of an answer. Text may be empty while a character or a stop string is incomplete."""

    text: str
    token_id: int
    source: str  # the drafter that proposed it, or "target"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Result(RequestStats):
    """A whole answer with its figures. A notebook shows the text coloured by drafter."""

    text: str
    token_ids: tuple[int, ...]
    sources: tuple[str, ...]  # the drafter of each token, or "target"
    seed: int
    logprobs: tuple[TokenLogprob, ...] = ()
    tool_calls: tuple[ToolCall, ...] = ()
    content: str = ""  # the text beside the tool calls
    reasoning: str = ""  # of a model whose format marks it: what it wrote to itself before it answered
    value: Any = None  # the answer as the requested `output`; None while incomplete or refused
    refused: str = ""  # why a complete answer has no value: a validator of the output's own
    texts: tuple[str, ...] = ()  # the part of the text that each token adds

    def __repr__(self) -> str:
        return f"Result({short(self.text)}, {self.summary})"

    @property
    def summary(self) -> str:
        """The main figures in one line."""
        lossy = ", lossy" if self.lossy else ""
        return (
            f"{self.output_tokens} tokens in {self.passes} passes, {self.tokens_per_pass:.2f} per pass, "
            f"finish={self.finish}{lossy}"
        )

    def _repr_html_(self) -> str:
        text = notebook.coloured(self.texts, self.sources) if self.texts else escape(self.text)
        return notebook.block(text) + notebook.caption(self.summary, dict.fromkeys(self.sources))

    @property
    def drafted(self) -> Mapping[str, int]:
        """Drafted tokens by drafter: `drafted_by_source`. In `generate --json`, their sum."""
        return self.drafted_by_source

    @property
    def accepted(self) -> Mapping[str, int]:
        """Accepted tokens by drafter: `accepted_by_source`. In `generate --json`, their sum."""
        return self.accepted_by_source

    @property
    def shared_tokens(self) -> int:
        """The old name of `cached_tokens`."""
        warn_renamed("Result.shared_tokens", "Result.cached_tokens")
        return self.cached_tokens

    @property
    def first_token_seconds(self) -> float:
        """The old name of `first_token_s`, and 0 where no token came."""
        warn_renamed("Result.first_token_seconds", "Result.first_token_s")
        return self.first_token_s or 0.0


@dataclass(frozen=True, slots=True)
class OutputParser:
    """Reads tool calls and a value from the text of an answer."""

    parse: Callable[[str], Any] | None = None
    tools: ToolFormat | None = None  # the declared format of calls; None: no calls
    only_calls: bool = False  # the answer has no text beside its tool calls
    offered: OfferedTools | None = None  # whose calls count in other forms too
    parallel: bool = True  # several of those may be in one answer
    calls: bool = True  # False: the format's channels are read, and no calls
    within: bool = False  # the answer continues a message, whose channel stands in the prompt

    def stream(self) -> ToolStream | None:
        if self.tools is None:
            return None
        return ToolStream(self.tools, self.offered, self.parallel, self.calls, self.within)

    def read(self, text: str, complete: bool, cut_off: bool = False) -> dict[str, Any]:
        """Fields of a result. cut_off: the text ends where the model did not end it."""
        content, calls = text, list[ToolCall]()
        if self.tools is not None:
            content, calls, _ = parse_tool_calls(
                text, self.tools, self.offered, self.parallel, self.calls, self.within, cut_off
            )
        read: dict[str, Any] = {"tool_calls": tuple(calls), "content": content}
        if self.parse is None or not complete or calls:
            return read
        try:
            return read | {"value": self.parse(content)}
        except ConstraintError as error:
            return read | {"refused": str(error)}


@dataclass(frozen=True, slots=True)
class OutputDelta:
    """The part of an output that one round adds."""

    texts: tuple[str, ...]  # of each token
    deltas: tuple[Delta, ...]  # content and parts of tool calls
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    finish: Finish | None


@dataclass(slots=True, eq=False)
class RequestOutput:
    """One output in flight: its sequence, and all that its rounds have brought. Ended once `finish` is set.

    Times are seconds since `started`, which a server sets to the arrival of the request.
    """

    seq: Seq
    detokenizer: TextReader
    parser: OutputParser = field(default_factory=OutputParser)
    index: int = 0  # among the choices of the request
    started: float = field(default_factory=time.perf_counter)
    rounds: list[Round] = field(default_factory=list)  # without their drafts' q
    token_ids: list[int] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)  # the drafter of each token, or "target"
    logprobs: list[TokenLogprob] = field(default_factory=list)
    drafted: Counter[str] = field(default_factory=Counter)  # nodes by drafter
    accepted: Counter[str] = field(default_factory=Counter)
    passes: int = 0  # of the target; 0: it ended before its first
    deltas: list[Delta] = field(default_factory=list)
    round_deltas: list[OutputDelta] = field(default_factory=list)  # the same, by round
    content_len: int = 0  # characters
    finish: Finish | None = None
    queue_s: float = 0.0  # until its first pass began
    first_token_s: float | None = None
    last_token_s: float = 0.0
    last_round_s: float = 0.0
    _texts: list[str] = field(default_factory=list)  # of each round
    _tools: ToolStream | None = None

    def __post_init__(self) -> None:
        self._tools = self.parser.stream()

    def take(self, r: Round) -> OutputDelta:
        self._count(r, time.perf_counter() - self.started)
        texts = [self.detokenizer.push(token) for token in r.tokens]
        rest = "" if r.finish is None else self.detokenizer.flush()
        if texts:
            texts[-1] += rest
        text = "".join(texts) if texts else rest
        self._texts.append(text)
        self.finish = r.finish
        deltas = self._read(texts or [rest], r.finish)
        self.deltas += deltas
        self.content_len += sum(len(delta.text) for delta in deltas if isinstance(delta, ContentDelta))
        self.round_deltas.append(OutputDelta(tuple(texts), tuple(deltas), r.tokens, r.logprobs, r.finish))
        return self.round_deltas[-1]

    def _count(self, r: Round, now: float) -> None:
        if not self.rounds:
            self.queue_s = max(0.0, now - (r.draft_us + r.target_us) / 1e6)
        self.rounds.append(r if r.draft.q is None else replace(r, draft=replace(r.draft, q=None)))
        self.passes += r.rows > 0
        self.drafted.update(r.draft.sources)
        self.accepted.update(r.draft.sources[i] for i in r.path)
        self.token_ids += r.tokens
        self.sources += r.sources
        self.logprobs += r.logprobs
        self.last_round_s = now
        if r.tokens:
            self.first_token_s = now if self.first_token_s is None else self.first_token_s
            self.last_token_s = now

    def _read(self, texts: Sequence[str], finish: Finish | None) -> list[Delta]:
        if self._tools is None:
            text = "".join(texts)
            return [ContentDelta(text)] if text else []
        deltas = self._tools.push(*texts)
        if finish is None:
            return deltas
        cut_off = finish != "stop"
        rest = self._tools.flush(cut_off)
        if cut_off and self.parser.only_calls:  # the beginning of a call's mark
            rest = [delta for delta in rest if isinstance(delta, CallDelta)]
        return deltas + rest

    @property
    def text(self) -> str:
        """As the model wrote it, tool calls included."""
        return "".join(self._texts)

    @property
    def content(self) -> str:
        return "".join(delta.text for delta in self.deltas if isinstance(delta, ContentDelta))

    @property
    def reasoning(self) -> str:
        return "".join(delta.text for delta in self.deltas if isinstance(delta, ReasoningDelta))

    @property
    def reasoning_tokens(self) -> int:
        return 0 if self._tools is None else self._tools.reasoning_pieces

    @property
    def calls(self) -> list[tuple[str, str]]:
        """Name and arguments of each tool call."""
        calls: dict[int, tuple[str, str]] = {}
        for delta in self.deltas:
            if isinstance(delta, CallDelta):
                name, arguments = calls.get(delta.index, ("", ""))
                calls[delta.index] = (name or delta.name or "", arguments + delta.arguments)
        return [calls[i] for i in sorted(calls)]

    @property
    def undeclared_calls(self) -> int:
        """Tool calls that were found in another form than the declared one."""
        return 0 if self._tools is None else self._tools.undeclared

    @property
    def rejected_calls(self) -> tuple[Rejection, ...]:
        """Why texts that looked like tool calls were none."""
        return () if self._tools is None else self._tools.rejected

    @property
    def finish_reason(self) -> str:
        """OpenAI's."""
        if self.finish == "stop" and self.calls:
            return "tool_calls"
        return "length" if self.finish == "length" else "stop"

    def stats(self, seconds: float | None = None, **labels: str) -> RequestStats:
        """The figures so far. seconds: None: until the last round. labels: model, route and endpoint."""
        first = self.first_token_s
        return RequestStats(
            **labels,
            prompt_tokens=self.seq.prompt_len,
            cached_tokens=self.seq.cached,
            disk_tokens=self.seq.cached_on_disk,
            output_tokens=len(self.token_ids),
            passes=self.passes,
            drafted_by_source=dict(self.drafted),
            accepted_by_source=dict(self.accepted),
            finish=self.finish,
            lossy=self.seq.spec.lossy,
            choice=self.seq.params.choice,
            queue_s=self.queue_s,
            first_token_s=first,
            decode_s=0.0 if first is None else self.last_token_s - first,
            seconds=self.last_round_s if seconds is None else seconds,
        )

    def result(self) -> Result:
        stats, text, cursor = self.stats(), self.text, self.seq.cursor
        complete = self.finish == "stop" and (cursor is None or cursor.finished)
        read = self.parser.read(text, complete, cut_off=self.finish != "stop")
        if self.finish == "length":
            read["content"] = self.content  # without the beginning of a call that was cut off
        return Result(
            **{f.name: getattr(stats, f.name) for f in fields(stats)},
            text=text,
            token_ids=tuple(self.token_ids),
            sources=tuple(self.sources),
            seed=self.seq.params.noise_seed,
            logprobs=tuple(self.logprobs),
            texts=self._token_texts(),
            reasoning=self.reasoning,
            **read,
        )

    def _token_texts(self) -> tuple[str, ...]:
        """The last token's has what an end without tokens brings."""
        texts = [text for delta in self.round_deltas for text in delta.texts]
        if texts and self.round_deltas and not self.round_deltas[-1].texts:
            texts[-1] += self._texts[-1]
        return tuple(texts)


class Rounds(Protocol):
    """Where a stream's rounds come from."""

    def next_round(self, seq_id: str) -> Round: ...
    def cancel(self, seq_id: str) -> None: ...


class PieceQueue:
    """What streams share: an output, and its pieces that nobody has read yet."""

    def __init__(self, output: RequestOutput) -> None:
        self.output = output
        self.pieces: deque[Piece] = deque()

    @property
    def ended(self) -> bool:
        return self.output.finish is not None

    def take(self, r: Round) -> None:
        if r.error is not None:
            self.output.finish = "error"
            raise r.error
        delta = self.output.take(r)
        self.pieces += [Piece(*p) for p in zip(delta.texts, r.tokens, r.sources, strict=True)]

    def close(self, cancel: Callable[[str], None]) -> None:
        """Drops what is unread; cancels the request if it still runs."""
        self.pieces.clear()
        if not self.ended:
            self.output.finish = "cancelled"
            cancel(self.output.seq.id)


class Stream(Iterator[Piece]):
    """Pieces as they come; `result` sums up those so far. Closing it cancels the request."""

    def __init__(self, rounds: Rounds, output: RequestOutput) -> None:
        self._rounds = rounds
        self._queue = PieceQueue(output)

    def __next__(self) -> Piece:
        while not self._queue.pieces:
            if self._queue.ended:
                raise StopIteration
            self._queue.take(self._rounds.next_round(self._queue.output.seq.id))
        return self._queue.pieces.popleft()

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
        self._queue.close(self._rounds.cancel)

    def __del__(self) -> None:
        self.close()

    @property
    def rounds(self) -> Sequence[Round]:
        """Those so far: each with its draft, the accepted part of it, and its tokens."""
        return tuple(self._queue.output.rounds)

    @property
    def result(self) -> Result:
        return self._queue.output.result()


def as_json(result: Result) -> dict[str, Any]:
    """One machine-readable object. `drafted`, `accepted` and the two names of Result's are old spellings."""
    left_out = ("model", "route", "endpoint", "choice", "texts")  # those of servers, and the text once more
    return {
        **{name: value for name, value in asdict(result).items() if name not in left_out},
        "drafted_tokens": result.drafted_tokens,
        "accepted_tokens": result.accepted_tokens,
        "tokens_by_source": dict(Counter(result.sources)),
        "tokens_per_pass": round(result.tokens_per_pass, 3),
        "drafted": result.drafted_tokens,
        "accepted": result.accepted_tokens,
        "shared_tokens": result.cached_tokens,
        "first_token_seconds": result.first_token_s or 0.0,
    }
