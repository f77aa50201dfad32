"""One answer on its way to the client: rounds of tokens become pieces of text, calls and logprobs."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.llm import Prepared
from paceline.text import CallDelta, ContentDelta, Delta, Tokenizer, ToolStream
from paceline.trace.tally import Tally
from paceline.types import Finish, Round, TokenLogprob


@dataclass(slots=True)
class Piece:
    """What a round adds to an answer."""

    deltas: list[Delta]
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    finish: Finish | None


@dataclass(slots=True)
class Choice:
    """Made of every round of one sequence; whole once `finish` is set."""

    index: int
    made: Prepared
    submitted: float = field(default_factory=time.perf_counter)
    rounds: list[Round] = field(default_factory=list)
    tally: Tally = field(default_factory=Tally)
    deltas: list[Delta] = field(default_factory=list)
    text: str = ""  # as the model wrote it, calls and all
    written: int = 0  # characters of content
    finish: Finish | None = None
    queued: float = 0.0  # seconds until the engine took it up
    first_token: float = 0.0  # seconds after it was submitted
    last_token: float = 0.0
    tools: ToolStream | None = None

    def __post_init__(self) -> None:
        form = self.made.reader.tools
        self.tools = None if form is None else ToolStream(form)

    def take(self, r: Round) -> Piece:
        now = time.perf_counter() - self.submitted
        if not self.rounds:
            self.queued = max(0.0, now - (r.draft_us + r.target_us) / 1e6)
        self.rounds.append(r)
        self.tally.add(r)
        if r.tokens:
            self.first_token = self.first_token or now
            self.last_token = now
        text = "".join(self.made.text.push(token) for token in r.tokens)
        if r.finish is not None:
            text += self.made.text.flush()
        self.text += text
        self.finish = r.finish
        deltas = self._read(text, r.finish is not None)
        self.deltas += deltas
        self.written += sum(len(delta.text) for delta in deltas if isinstance(delta, ContentDelta))
        return Piece(deltas, r.tokens, r.logprobs, r.finish)

    def _read(self, text: str, last: bool) -> list[Delta]:
        if self.tools is None:
            return [ContentDelta(text)] if text else []
        deltas = self.tools.push(text)
        return deltas + self.tools.flush() if last else deltas

    @property
    def begun(self) -> bool:
        """Whether it was in a pass."""
        return any(r.rows for r in self.rounds)

    @property
    def content(self) -> str:
        return "".join(delta.text for delta in self.deltas if isinstance(delta, ContentDelta))

    @property
    def calls(self) -> list[tuple[str, str]]:
        """Name and arguments of each tool call."""
        found: dict[int, tuple[str, str]] = {}
        for delta in self.deltas:
            if isinstance(delta, CallDelta):
                name, arguments = found.get(delta.index, ("", ""))
                found[delta.index] = (name or delta.name or "", arguments + delta.arguments)
        return [found[i] for i in sorted(found)]

    @property
    def reason(self) -> str:
        """OpenAI's finish_reason."""
        if self.finish == "stop" and self.calls:
            return "tool_calls"
        return "length" if self.finish == "length" else "stop"


def usage(choices: Sequence[Choice]) -> dict[str, Any]:
    firsts = [choice.made.seq for choice in choices if choice.made.seq.params.choice == 0]  # one per prompt
    prompt = sum(seq.prompt_len for seq in firsts)
    cached = sum(seq.cached for seq in firsts)
    output = sum(len(choice.tally.tokens) for choice in choices)
    drafted = sum(choice.tally.drafted["prediction"] for choice in choices)
    accepted = sum(choice.tally.accepted["prediction"] for choice in choices)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": drafted - accepted,
        },
    }


def chat_logprobs(tokenizer: Tokenizer, found: Sequence[TokenLogprob]) -> dict[str, Any]:
    def one(token: int, logprob: float) -> dict[str, Any]:
        piece = tokenizer.piece(token)
        return {"token": piece.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(piece)}

    return {
        "content": [
            {**one(t.token, t.logprob), "top_logprobs": [one(token, p) for token, p in t.top]} for t in found
        ],
        "refusal": None,
    }


def completion_logprobs(tokenizer: Tokenizer, found: Sequence[TokenLogprob], start: int) -> dict[str, Any]:
    """`start`: characters of the answer before these tokens."""
    texts = [tokenizer.piece(t.token).decode("utf-8", "replace") for t in found]
    offsets = [start + sum(map(len, texts[:i])) for i in range(len(texts))]
    return {
        "tokens": texts,
        "token_logprobs": [t.logprob for t in found],
        "top_logprobs": [
            {tokenizer.piece(token).decode("utf-8", "replace"): p for token, p in t.top} for t in found
        ],
        "text_offset": offsets,
    }
