"""The Python API: a model, and text from it piece by piece."""

import secrets
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any

from paceline import models
from paceline.config import EngineConfig, settings
from paceline.drafters import model_free
from paceline.drafters.model import ModelDrafter
from paceline.engine.control import Rate
from paceline.engine.engine import Engine
from paceline.errors import DrafterMismatch, SettingError
from paceline.target.load import load
from paceline.target.torch_target import TorchTarget, placement
from paceline.text import StopStrings, TextStream, Tokenizer
from paceline.trace.tally import Tally
from paceline.types import Drafter, Finish, Round, SamplingParams, Seq, Sink, SpecConfig, TokenLogprob

Prompt = str | Sequence[Mapping[str, Any]]  # plain text, or chat messages


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

    @property
    def tokens_per_pass(self) -> float:
        return len(self.token_ids) / self.passes if self.passes else 0.0


class Stream(Iterator[Piece]):
    """Pieces as they come; `result` sums up what has come so far. Closing it cancels the request."""

    def __init__(self, llm: "LLM", seq: Seq) -> None:
        self._llm = llm
        self._seq = seq
        self._text = TextStream(llm.tokenizer, seq.params.stop)
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
            self._take(self._llm._next_round(self._seq.id))
        return self._ready.popleft()

    def _take(self, r: Round) -> None:
        self._last = time.perf_counter() - self._started
        self._first = self._first or (self._last if r.tokens else 0.0)
        self._tally.add(r)
        self._finish = r.finish
        texts = [self._text.push(token) for token in r.tokens]
        if r.finish is not None and texts:
            texts[-1] += self._text.flush()
        self._said += texts
        self._ready += [Piece(*p) for p in zip(texts, r.tokens, r.sources, strict=True)]

    def close(self) -> None:
        if self._finish is None:
            self._finish = "cancelled"
            self._llm._cancel(self._seq.id)

    def __del__(self) -> None:
        self.close()

    @property
    def result(self) -> Result:
        tally = self._tally
        return Result(
            text="".join(self._said),
            token_ids=tuple(tally.tokens),
            sources=tuple(tally.sources),
            finish=self._finish,
            prompt_tokens=self._seq.prompt_len,
            shared_tokens=self._seq.shared,
            passes=tally.passes,
            drafted=dict(tally.drafted),
            accepted=dict(tally.accepted),
            seed=self._seq.params.seed,
            lossy=self._seq.spec.lossy,
            seconds=self._last,
            first_token_seconds=self._first,
            logprobs=tuple(tally.logprobs),
        )


class LLM:
    """A model ready to answer. Several streams may be open at once; they share passes of the target."""

    def __init__(
        self,
        model: str = models.DEFAULT_MODEL,
        *,
        draft_model: str | None = None,
        drafters: Sequence[Drafter] = (),
        spec: SpecConfig | None = None,
        config: EngineConfig | None = None,
        sinks: Sequence[Sink] = (),
    ) -> None:
        config = config or EngineConfig()
        path = models.resolve(model)
        self.name = model
        self.spec = spec or SpecConfig()
        self.tokenizer = Tokenizer.load(path)
        self.target = _target(path, config)
        self.drafters: dict[str, Drafter] = model_free()
        if draft_model is not None:
            self.drafters["model"] = self._draft_model(draft_model, config)
        self.drafters |= {drafter.name: drafter for drafter in drafters}
        self._ids = count()
        self._inbox: dict[str, deque[Round]] = {}
        self.engine = Engine(self.target, self.drafters, Rate(), sinks, config, self.tokenizer.eos_ids)

    def _draft_model(self, name: str, config: EngineConfig) -> Drafter:
        path = models.resolve(name)
        theirs = Tokenizer.load(path)
        if theirs.fingerprint != self.tokenizer.fingerprint:
            raise DrafterMismatch(
                f"{name} cannot draft for {self.name}: their tokenizers differ "
                f"({theirs.vocab_size} and {self.tokenizer.vocab_size} tokens): use a model of its family"
            )
        return ModelDrafter(_target(path, config), self.target.vocab_size)

    def stream(
        self,
        prompt: Prompt,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        spec: SpecConfig | None = None,
        prediction: str = "",
        tenant: str = "",
        **sampling: Any,
    ) -> Stream:
        """Starts an answer. `sampling` takes the fields of SamplingParams; without a seed one is drawn."""
        params = _params(sampling)
        tokens = self._encode(prompt, tools)
        stop = StopStrings(self.tokenizer, params.stop) if params.stop else None
        seq = Seq(
            id=f"r{next(self._ids)}",
            tokens=tokens,
            prompt_len=len(tokens),
            params=params,
            spec=spec or self.spec,
            tenant=tenant,
            prediction=tuple(self.tokenizer.encode(prediction, special=False)) if prediction else (),
            stopped_by=stop,
        )
        self.engine.submit(seq)
        self._inbox[seq.id] = deque()
        return Stream(self, seq)

    def generate(self, prompt: Prompt, **options: Any) -> Result:
        """The whole answer at once; options as for `stream`."""
        stream = self.stream(prompt, **options)
        for _ in stream:
            pass
        return stream.result

    def batch(self, prompts: Sequence[Prompt], **options: Any) -> list[Result]:
        """Several answers, which share passes of the target."""
        streams = [self.stream(prompt, **options) for prompt in prompts]
        for stream in streams:
            for _ in stream:
                pass
        return [stream.result for stream in streams]

    def _encode(self, prompt: Prompt, tools: Sequence[Mapping[str, Any]] | None) -> list[int]:
        if not isinstance(prompt, str):
            return self.tokenizer.encode_chat(list(prompt), tools=list(tools) if tools else None)
        if tools:
            raise SettingError("tools need chat messages: give a list of messages instead of a plain prompt")
        tokens = self.tokenizer.encode(prompt)
        if not tokens:
            raise SettingError("the prompt is empty: give at least one token of text")
        return tokens

    def _next_round(self, seq_id: str) -> Round:
        inbox = self._inbox[seq_id]
        while not inbox:
            for r in self.engine.step():
                if r.request in self._inbox:
                    self._inbox[r.request].append(r)
        r = inbox.popleft()
        if r.finish is not None:
            del self._inbox[seq_id]
        return r

    def _cancel(self, seq_id: str) -> None:
        self._inbox.pop(seq_id, None)
        self.engine.cancel(seq_id)


def _target(path: Path, config: EngineConfig) -> TorchTarget:
    _, dtype = placement(config)
    return TorchTarget(load(path, dtype), config)


def _params(sampling: Mapping[str, Any]) -> SamplingParams:
    given = dict(sampling)
    if given.get("seed") is None:
        given["seed"] = secrets.randbits(32)
    return settings(SamplingParams, given)


def as_json(result: Result) -> dict[str, Any]:
    """One machine-readable object."""
    by_source = Counter(result.sources)
    return {
        **asdict(result),
        "drafted": sum(result.drafted.values()),
        "accepted": sum(result.accepted.values()),
        "drafted_by_source": dict(result.drafted),
        "tokens_by_source": dict(by_source),
        "tokens_per_pass": round(result.tokens_per_pass, 3),
    }
