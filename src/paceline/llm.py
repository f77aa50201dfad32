"""The Python API: a model ready to answer."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from itertools import count
from typing import Any, Final, TypeGuard

from paceline import hub
from paceline.config import EngineConfig, SamplingParams, SpecConfig, settings
from paceline.constraints import ANYTHING, Compiler, OutputSpec, Whitespace
from paceline.drafters.draft_model import DraftVocab
from paceline.engine.control import Rate
from paceline.engine.engine import Engine
from paceline.errors import PromptTooLong, SettingError, UsageError
from paceline.loading import Name, check_drafters, load_model
from paceline.output import OutputParser, RequestOutput, Result, Stream
from paceline.text import StopStrings, TextStream
from paceline.types import Cursor, Drafter, Round, Seq, Sink

PROMPT_END: Final = 16  # characters at its end in which a plain prompt may open the model's reasoning
Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]  # plain text, its tokens, or chat messages


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
        trained: Name | Sequence[Name] | None = None,
        spec: SpecConfig | None = None,
        config: EngineConfig | None = None,
        sinks: Sequence[Sink] = (),
    ) -> None:
        config = config or EngineConfig()
        loaded = load_model(
            hub.resolve(model),
            draft_model=draft_model,
            draft_vocab=draft_vocab,
            drafters=drafters,
            trained=trained,
            spec=spec,
            config=config,
        )
        self.name = model
        self.tokenizer, self.target, self.cost = loaded.tokenizer, loaded.target, loaded.cost
        self.heads, self.drafters, self.spec = loaded.heads, loaded.drafters, loaded.spec
        self.constraints = Compiler(self.tokenizer, self.target.vocab_size)
        controller = Rate(self.cost or None)
        self.engine = Engine(self.target, self.drafters, controller, sinks, config, self.tokenizer.eos_ids)
        self._default_drafters = spec is None
        self._ids = count()
        self._inbox: dict[str, deque[Round]] = {}

    @property
    def trained(self) -> dict[str, str]:
        """Names of the trained heads that are loaded, each with its drafter's name."""
        return {head.name: head.kind for head in self.heads}

    def replace_drafter(self, drafter: Drafter) -> None:
        """Between two passes: from now on this one guesses in place of the one with its name."""
        self.engine.replace_drafter(drafter)
        self.drafters[drafter.name] = drafter

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
    ) -> RequestOutput:
        """Everything a request needs before the engine sees it. May be called from any thread.

        template: variables of the chat template.
        """
        tokens, prompt_end = self._encode(prompt, wanted, dict(template or {}))
        marks = self.tokenizer.tool_marks if wanted.calls else frozenset()
        guess = prediction and self._default_drafters
        if spec is None:
            spec = replace(self.spec, drafters=("prediction", *self.spec.drafters)) if guess else self.spec
        check_drafters(spec, self.drafters)
        seq = Seq(
            id=f"r{next(self._ids)}",
            tokens=tokens,
            prompt_len=len(tokens),
            params=params,
            spec=spec,
            tenant=tenant,
            prediction=tuple(self.tokenizer.encode(prediction, special=False)) if prediction else (),
            stopped_by=StopStrings(self.tokenizer, params.stop, keep=marks) if params.stop else None,
            cursor=self._cursor(wanted, prompt_end, params.ignore_eos),
            learn=learn,
        )
        parser = OutputParser(wanted.parser(prompt_end), self.tokenizer.tool_format if wanted.calls else None)
        return RequestOutput(seq, TextStream(self.tokenizer, params.stop, keep=marks), parser)

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

        Without a seed in either, each request draws one.

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
        request = self.prepare(
            prompt,
            _params(params, sampling),
            wanted,
            spec=spec,
            prediction=prediction,
            tenant=tenant,
            learn=learn,
        )
        self.engine.submit(request.seq)
        self._inbox[request.seq.id] = deque()
        return Stream(self, request)

    def _cursor(self, wanted: OutputSpec, prompt_end: str, ignore_eos: bool) -> Cursor | None:
        constraint = wanted.constraint(self.tokenizer.tool_format, prompt_end)
        return None if constraint is None else self.constraints.cursor(constraint, ignore_eos)

    def generate(self, prompt: Prompt, params: SamplingParams | None = None, **options: Any) -> Result:
        """The whole answer at once; options as for `stream`."""
        return self.stream(prompt, params, **options).read()

    def batch(
        self, prompts: Sequence[Prompt], params: SamplingParams | None = None, **options: Any
    ) -> list[Result]:
        """Several answers, which share passes of the target."""
        return [stream.read() for stream in [self.stream(prompt, params, **options) for prompt in prompts]]

    def _encode(self, prompt: Prompt, wanted: OutputSpec, variables: dict[str, Any]) -> tuple[list[int], str]:
        """The prompt's tokens, and the end of its text that may open the model's reasoning.

        In a chat that end is the template's own: what a user writes never counts.
        """
        if not prompt:
            raise SettingError("prompt", prompt, "a text or a list of messages, not empty")
        if isinstance(prompt, str):
            return self._encode_text(prompt, wanted.tools), prompt[-PROMPT_END:]
        if _are_tokens(prompt):
            return [int(token) for token in prompt], ""
        messages = [message for message in prompt if isinstance(message, Mapping)]
        if len(messages) != len(prompt):
            raise UsageError("a prompt is a text, a list of messages, or a list of tokens")
        tools = list(wanted.tools) or None
        text = self.tokenizer.render(messages, tools, **variables)
        tokens = self.tokenizer.encode(self._within_context(text), bos=False)
        if not wanted.bound:
            return tokens, ""
        return tokens, self.tokenizer.generation_prompt(text, messages, tools, **variables)

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
    return settings(SamplingParams, {**(asdict(params) if params else {}), **sampling})
