"""The Python API: a model ready to answer."""

import secrets
from collections import deque
from collections.abc import Mapping, Sequence, Set
from dataclasses import asdict, dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any, Final, TypeGuard

from paceline import hub
from paceline.config import EngineConfig, SamplingParams, SpecConfig, settings
from paceline.constraints import ANYTHING, Compiler, OutputSpec, Whitespace
from paceline.drafters import OF_THE_TARGET, model_free
from paceline.drafters.draft_model import DRAFT_VOCABS, DraftVocab, ModelDrafter, SelfDrafter, drafter_for
from paceline.drafters.draft_model.calibration_text import SAMPLES
from paceline.drafters.draft_model.layer_search import TENANT, layers_for
from paceline.engine.control import Rate
from paceline.engine.engine import Engine
from paceline.errors import PromptTooLong, SettingError, UsageError
from paceline.heads.registry import HEAD_TYPES
from paceline.loading import (
    Name,
    Trained,
    draft_model_path,
    drafters_beside,
    find_trained,
    read_trained,
    usual,
)
from paceline.output import Reader, Result, Stream
from paceline.target.cost import cost_table
from paceline.target.load import load_copy, load_draft, load_target
from paceline.text import StopStrings, TextStream, Tokenizer
from paceline.types import Cursor, Drafter, Round, Seq, Sink

PROMPT_END: Final = 16  # characters at its end in which a plain prompt may open the model's reasoning
Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]  # plain text, its tokens, or chat messages


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request ready for the engine, and what makes text of its tokens."""

    seq: Seq
    text: TextStream
    reader: Reader


class LLM:
    """A model ready to answer. Several streams may be open at once and share passes; not for several threads.

    Without a spec, the drafters are grammar, suffix, ngram, those given here, trained ones, and the draft
    model if any. trained: names or folders of drafters that `paceline train` made for this model; None: on a
    GPU, without a spec, one that is in the package for it.
    `self` and `quantized` are made only if the spec given here names them.
    draft_vocab is for a draft model with another tokenizer: it guesses tokens that both have (intersection),
    or writes text (text), or whichever suits the two and the request (auto).
    """

    def __init__(
        self,
        model: str = hub.DEFAULT_MODEL,
        *,
        draft_model: str | None = None,
        draft_vocab: DraftVocab = "auto",
        drafters: Sequence[Drafter] = (),
        trained: Sequence[Name] | None = None,
        spec: SpecConfig | None = None,
        config: EngineConfig | None = None,
        sinks: Sequence[Sink] = (),
    ) -> None:
        config = config or EngineConfig()
        for drafter in drafters:
            if isinstance(drafter, type) or not isinstance(getattr(drafter, "name", None), str):
                raise UsageError(f"{drafter!r} is not usable as a drafter: give an object with a `name`")
        if draft_vocab not in DRAFT_VOCABS:
            raise SettingError("draft_vocab", draft_vocab, f"one of {', '.join(DRAFT_VOCABS)}")
        path = hub.resolve(model)
        found = find_trained(trained or ())
        if trained is None and spec is None:
            given = {drafter.name for drafter in drafters}
            found = [one for one in find_trained(usual(path, config)) if one.kind not in given]
        self.name = model
        self.found = tuple(found)
        self.trained = {one.name: one.kind for one in found}  # names as they were given, and the drafters
        self.drafters: dict[str, Drafter] = model_free() | {drafter.name: drafter for drafter in drafters}
        self._check_kinds(found)
        extra = (*(d.name for d in drafters), *self.trained.values(), *(("model",) if draft_model else ()))
        self._choosing = spec is None
        self.spec = spec or SpecConfig((*SpecConfig().drafters, *extra))
        self._check(self.spec, {*self.drafters, *extra, *OF_THE_TARGET})
        self.tokenizer = Tokenizer.load(path)
        heads = read_trained(found, path)
        self.target = load_target(path, config)
        beside = drafters_beside(self.target, heads, config)
        self.drafters |= {drafter.name: drafter for drafter in beside}
        if draft_model is not None:
            self.drafters["model"] = self._draft_model(draft_model, draft_vocab, config)
        for name in self.spec.drafters:
            if name in OF_THE_TARGET and name not in self.drafters:
                self.drafters[name] = self._own(name, path, config)
        self.constraints = Compiler(self.tokenizer, self.target.vocab_size)
        self.cost = cost_table(self.target)
        self._ids = count()
        self._inbox: dict[str, deque[Round]] = {}
        controller = Rate(self.cost or None)
        self.engine = Engine(self.target, self.drafters, controller, sinks, config, self.tokenizer.eos_ids)

    def replace_drafter(self, drafter: Drafter) -> None:
        """Between two passes: from now on this one guesses in place of the one with its name."""
        self.engine.replace_drafter(drafter)
        self.drafters[drafter.name] = drafter

    def _draft_model(self, name: str, vocab: DraftVocab, config: EngineConfig) -> Drafter:
        path = draft_model_path(name)
        model, tokenizer = load_draft(path, config), Tokenizer.load(path)
        return drafter_for(model, tokenizer, self.tokenizer, self.target.vocab_size, vocab)

    def _own(self, name: str, path: Path, config: EngineConfig) -> Drafter:
        """A drafter made of the model itself; only for those who name it, since it takes time or memory."""
        if name == "quantized":
            copy = load_copy(path, config, self.target)
            cost = copy.bytes_held / self.target.bytes_held
            return ModelDrafter(copy, self.target.vocab_size, cost=cost, name=name)
        layers = layers_for(self.target, self.target.fingerprint, self._samples)
        self.target.forget(TENANT)
        return SelfDrafter(self.target, layers)

    def _samples(self) -> list[list[int]]:
        return [self.tokenizer.encode(text) for text in SAMPLES]

    def prepare(
        self,
        prompt: Prompt,
        params: SamplingParams,
        wanted: OutputSpec = ANYTHING,
        *,
        spec: SpecConfig | None = None,
        prediction: str = "",
        tenant: str = "",
        learn: bool = True,
        template: Mapping[str, Any] | None = None,
    ) -> Prepared:
        """Everything a request needs before the engine sees it. May be called from any thread.

        template: variables of the chat template.
        """
        variables = dict(template or {})
        tokens = self._encode(prompt, wanted.tools, variables)
        marks = self.tokenizer.tool_marks if wanted.calls else frozenset()
        opening = self._opening(prompt, wanted, variables) if wanted.bound else ""
        guess = prediction and self._choosing
        if spec is None:
            spec = replace(self.spec, drafters=("prediction", *self.spec.drafters)) if guess else self.spec
        seq = Seq(
            id=f"r{next(self._ids)}",
            tokens=tokens,
            prompt_len=len(tokens),
            params=params,
            spec=spec,
            tenant=tenant,
            prediction=tuple(self.tokenizer.encode(prediction, special=False)) if prediction else (),
            stopped_by=StopStrings(self.tokenizer, params.stop, keep=marks) if params.stop else None,
            cursor=self._cursor(wanted, opening, params.ignore_eos),
            learn=learn,
        )
        reader = Reader(wanted.parser(opening), self.tokenizer.tool_format if wanted.calls else None)
        return Prepared(seq, TextStream(self.tokenizer, params.stop, keep=marks), reader)

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool = True,
        response_format: Mapping[str, Any] | None = None,
        output: Any = None,
        whitespace: Whitespace = "fixed",
        spec: SpecConfig | None = None,
        prediction: str = "",
        tenant: str = "",
        learn: bool = True,
        **sampling: Any,
    ) -> Stream:
        """Starts an answer. `sampling` takes fields of SamplingParams, and overrides those of `params`.

        Without `params` and a seed, a seed is drawn; `params` are taken as they are.

        A list of messages is one chat. A prediction is tried before other guesses unless a spec is given.
        learn=False: drafters remember nothing of it for later requests.

        With tools, every call the model makes is one that its tool's schema allows; tool_choice is auto,
        required, none, or a tool's name. `output` is what the answer must be: a Python type, a Pydantic
        model, a pattern, a constraint; `Result.value` is then of it. `whitespace` is that of JSON.
        """
        wanted = OutputSpec(
            tuple(tools or ()),
            tool_choice or "auto",
            parallel_tool_calls,
            response_format,
            output,
            whitespace,
        )
        made = self.prepare(
            prompt,
            _params(params, sampling),
            wanted,
            spec=spec,
            prediction=prediction,
            tenant=tenant,
            learn=learn,
        )
        self.engine.submit(made.seq)
        self._inbox[made.seq.id] = deque()
        return Stream(self, made.seq, made.text, made.reader)

    def _opening(self, prompt: Prompt, wanted: OutputSpec, variables: dict[str, Any]) -> str:
        """How the prompt lets the model begin; what the user says in a chat has no part in it."""
        if isinstance(prompt, str):
            return prompt[-PROMPT_END:]
        messages = [message for message in prompt if isinstance(message, Mapping)]
        return self.tokenizer.opening(messages, wanted.tools or None, **variables) if messages else ""

    def _cursor(self, wanted: OutputSpec, opening: str, ignore_eos: bool) -> Cursor | None:
        constraint = wanted.constraint(self.tokenizer.tool_format, opening)
        return None if constraint is None else self.constraints.cursor(constraint, ignore_eos)

    def generate(self, prompt: Prompt, params: SamplingParams | None = None, **options: Any) -> Result:
        """The whole answer at once; options as for `stream`."""
        return self.stream(prompt, params, **options).read()

    def batch(
        self, prompts: Sequence[Prompt], params: SamplingParams | None = None, **options: Any
    ) -> list[Result]:
        """Several answers, which share passes of the target."""
        return [stream.read() for stream in [self.stream(prompt, params, **options) for prompt in prompts]]

    def _check_kinds(self, found: Sequence[Trained]) -> None:
        for one in found:
            if one.kind in self.drafters:
                raise UsageError(
                    f"{one.name} would be called {one.kind!r}, as a drafter given here is: rename that one"
                )

    def _check(self, spec: SpecConfig, known: Set[str]) -> None:
        """Before the weights are read, which takes a while."""
        for name in spec.drafters:
            if name not in known:
                hint = ": give a draft_model" if name == "model" else ""
                hint = ": give a trained one" if name in HEAD_TYPES else hint
                raise UsageError(
                    f"no drafter is called {name!r}{hint}. Known here: {', '.join(sorted(known))}"
                )

    def _encode(
        self, prompt: Prompt, tools: Sequence[Mapping[str, Any]] | None, variables: dict[str, Any]
    ) -> list[int]:
        if not prompt:
            raise SettingError("prompt", prompt, "a text or a list of messages, not empty")
        if isinstance(prompt, str):
            return self._encode_text(prompt, tools)
        if _are_tokens(prompt):
            return [int(token) for token in prompt]
        messages = [message for message in prompt if isinstance(message, Mapping)]
        if len(messages) != len(prompt):
            raise UsageError("a prompt is a text, a list of messages, or a list of tokens")
        text = self.tokenizer.render(messages, list(tools) if tools else None, **variables)
        return self.tokenizer.encode(self._within_context(text), bos=False)

    def _encode_text(self, prompt: str, tools: Sequence[Mapping[str, Any]] | None) -> list[int]:
        if tools:
            raise UsageError("tools need chat messages: give a list of messages instead of a plain prompt")
        tokens = self.tokenizer.encode(self._within_context(prompt))
        if not tokens:
            raise SettingError("prompt", prompt, "at least one token of text")
        return tokens

    def _within_context(self, text: str) -> str:
        """Refuses what cannot fit, before work is spent on its tokens."""
        size, limit = len(text.encode("utf-8", "surrogatepass")), self.target.max_context
        if size >= limit and (least := size // self.tokenizer.longest_piece) >= limit:
            raise PromptTooLong(
                f"the prompt has at least {least} tokens and the model's context holds {limit}, "
                "one of them for the answer: shorten the prompt"
            )
        return text

    def next_round(self, seq_id: str) -> Round:
        """For streams: runs passes until one has something for this sequence."""
        inbox = self._inbox[seq_id]
        while not inbox:
            for r in self.engine.step():
                if r.request in self._inbox:
                    self._inbox[r.request].append(r)
        r = inbox.popleft()
        if r.finish is not None:
            del self._inbox[seq_id]
        return r

    def cancel(self, seq_id: str) -> None:
        self._inbox.pop(seq_id, None)
        self.engine.cancel(seq_id)


def _are_tokens(prompt: Sequence[Any]) -> TypeGuard[Sequence[int]]:
    return all(isinstance(token, int) for token in prompt)


def _params(params: SamplingParams | None, sampling: Mapping[str, Any]) -> SamplingParams:
    if params is not None:
        return settings(SamplingParams, {**asdict(params), **sampling})
    seed = sampling.get("seed")
    return settings(SamplingParams, {**sampling, "seed": secrets.randbits(32) if seed is None else seed})
