"""The Python API: `LLM`."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial, wraps
from itertools import count
from typing import Any, Concatenate, Final, ParamSpec, TypeGuard

from paceline import hub
from paceline.batches import Batch, Batches, Outcome, window
from paceline.config import EngineConfig, SamplingParams, SpecConfig, settings, warn_renamed
from paceline.constraints import (
    UNCONSTRAINED,
    Answer,
    AnyTool,
    Compiler,
    GrammarLimits,
    OutputSpec,
    ToolSchemas,
    Whitespace,
    tool_schemas,
)
from paceline.drafters.draft_model import DraftVocab
from paceline.drafters.prediction import PredictionIndex
from paceline.engine.control import Rate
from paceline.engine.engine import Engine
from paceline.engine.engine_thread import EngineThread
from paceline.engine.pooling import Pooler
from paceline.engine.saved_estimates import SavedEstimates, estimates_path
from paceline.errors import ConstraintError, PacelineError, PromptTooLong, SettingError, TextError, UsageError
from paceline.loading import Name, check_drafters, load_model
from paceline.output import OutputParser, RequestOutput, Result, Stream
from paceline.target.cost import CostMonitor, machine_key
from paceline.target.kv.disk_cache import cache_folder
from paceline.target.weights.pooling import read_pooling
from paceline.text import Detokenizer, Message, Prompt, StopChecker, named_format, read_chat_template
from paceline.tool_loop import Run, ToolLoop, ToolRuns, Turns
from paceline.types import Cursor, Drafter, Round, Seq, Sink, Target

MAX_TOKEN_CHARACTERS: Final = 8  # of a prediction that are read for each token of the context
READ_ONLY: Final = SpecConfig(("none",), max_draft=0)  # of a prompt that is read ahead
PROMPT_END: Final = 16  # last characters of a plain prompt that may open the model's reasoning
P = ParamSpec("P")
_ids = count()  # of sequences: those of several models in one process, whose records go to one place, differ


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A prompt that fits the context, and the end of its text that may open the model's reasoning."""

    tokens: list[int]
    end: str
    answer: Answer = "text"


def _streaming(
    prepare: "Callable[Concatenate[LLM, P], RequestOutput]",
) -> "Callable[Concatenate[LLM, P], Stream]":
    """A method that starts the request which another one prepares, which any thread may call."""

    @wraps(prepare)
    def stream(self: "LLM", /, *args: P.args, **options: P.kwargs) -> Stream:
        return self._submit(prepare(self, *args, **options))

    return stream


def _reading(
    prepare: "Callable[Concatenate[LLM, P], RequestOutput]",
) -> "Callable[Concatenate[LLM, P], Result]":
    """The same for one that waits for the end."""

    @wraps(prepare)
    def read(self: "LLM", /, *args: P.args, **options: P.kwargs) -> Result:
        return self._submit(prepare(self, *args, **options)).read()

    return read


class LLM(ToolRuns[Turns, Run], Batches[list[Result], list[Outcome]]):
    """A loaded model. Several streams may be open at once and share passes; one thread only.

    model: a name in the catalogue, a folder or a GGUF file.
    spec: None: the drafters grammar, suffix and ngram, then those below. `self` and `quantized` are loaded
    only if it names them.
    drafters: your own, as objects or as import paths (`mymodule:Echo`). The spec may have such paths too.
    trained: heads that `paceline train` made for this model, by name or folder, one or several.
    draft_model: a smaller model, as the drafter `model`.
    draft_vocab: for a draft model with another tokenizer. intersection: it drafts tokens that both
    vocabularies have; text: its text is tokenized again; auto: the better of the two for the request.
    chat_template: a Jinja template or its file, instead of the model's own.
    tool_format: how the model writes tool calls, if its template does not show it: hermes, llama3, mistral,
    smollm2 or harmony.

    Attributes: `spec`, the settings of requests that bring none; `tokenizer`, whose `fingerprint` is equal
    for models with the same vocabulary and merges; `target` and `engine`, the model and its scheduler;
    `saved_estimates`, whose `load` and `save` let what the controller has learned outlive the process.
    """

    def __init__(
        self,
        model: str = hub.DEFAULT_MODEL,
        *,
        draft_model: str | None = None,
        draft_vocab: DraftVocab = "auto",
        drafters: Sequence[Drafter | str] = (),
        trained: Name | Sequence[Name] | None = None,
        spec: SpecConfig | None = None,
        config: EngineConfig | None = None,
        sinks: Sequence[Sink] = (),
        chat_template: str | None = None,
        tool_format: str | None = None,
    ) -> None:
        config = config or EngineConfig()
        template = None if chat_template is None else read_chat_template(chat_template)
        format = None if tool_format is None else named_format(tool_format)
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
        self.pooling = read_pooling(hub.resolve(model))
        self.tokenizer, self.target, self.cost = loaded.tokenizer, loaded.target, loaded.cost
        if config.max_model_len:
            _limit_context(self.target, config.max_model_len)
        self.tokenizer.override(template, format)
        self.heads, self.drafters, self.spec = loaded.heads, loaded.drafters, loaded.spec
        limits = GrammarLimits(config.max_grammar_s, config.max_grammar_mb, config.max_fixed_text)
        grammars = cache_folder(config.cache_dir) / "grammars" if config.cache_disk_mb else None
        self.constraints = Compiler(self.tokenizer, self.target.vocab_size, limits, grammars)
        private = {name for name, drafter in self.drafters.items() if getattr(drafter, "private", False)}
        controller = Rate(self.cost or None, private)
        self.saved_estimates = SavedEstimates(
            estimates_path(machine_key(self.target)), controller.estimates, self.drafters
        )
        sinks = (*sinks, CostMonitor(self.target, self.cost))
        row_cost = self.cost.prompt_row_ms if self.cost else None
        self.engine = Engine(
            self.target, self.drafters, controller, sinks, config, self.tokenizer.eos_ids, row_cost=row_cost
        )
        self._default_drafters = spec is None
        self._inbox: dict[str, deque[Round]] = {}
        self.thread: EngineThread | None = None  # of the AsyncLLM that has this one, or had it

    @property
    def trained(self) -> dict[str, str]:
        """Names of the trained heads that are loaded, each with its drafter's name."""
        return {head.name: head.kind for head in self.heads}

    def check_unused(self) -> None:
        """An error if an AsyncLLM runs the engine in its thread."""
        if self.thread is not None and self.thread.alive:
            raise UsageError("this LLM is in use by an AsyncLLM: use that one, or close it first")

    def replace_drafter(self, drafter: Drafter) -> None:
        """Replaces the drafter of the same name, between two passes."""
        self.engine.replace_drafter(drafter)
        self.drafters[drafter.name] = drafter

    def encode(
        self,
        prompt: Prompt,
        output: OutputSpec = UNCONSTRAINED,
        *,
        template: Mapping[str, Any] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        prefix: bool = False,
    ) -> EncodedPrompt:
        """Renders and tokenizes a prompt. May be called from any thread.

        template: variables of the chat template. The two after it: as for `stream`. prefix: of a chat, only
        the beginning that stays whatever message comes next, unless one of the two says how it ends.
        """
        rendering = self._rendering(prompt, add_generation_prompt, continue_final_message)
        whole = not prefix or add_generation_prompt is not None or continue_final_message
        if whole or isinstance(prompt, str) or _are_tokens(prompt):
            tokens, end = self._encode(prompt, output, rendering, dict(template or {}))
        else:
            tokens, end = self._encode_prefix(_messages(prompt), output, dict(template or {})), ""
        if len(tokens) >= (limit := self.target.max_context):
            raise PromptTooLong.of(str(len(tokens)), limit, self.engine.config.max_model_len > 0)
        return EncodedPrompt(tokens, end, self._answer(prompt, continue_final_message))

    def prepare(
        self,
        prompt: Prompt | EncodedPrompt,
        params: SamplingParams,
        output: OutputSpec = UNCONSTRAINED,
        *,
        spec: SpecConfig | None = None,
        prediction: str | Sequence[int] = "",
        tenant: str = "",
        remember: bool = True,
    ) -> RequestOutput:
        """Compiles the constraint of a request and indexes its prediction. May be called from any thread.

        prediction: a text, or the index that another prompt of the request has.
        """
        encoded = prompt if isinstance(prompt, EncodedPrompt) else self.encode(prompt, output)
        tokens = encoded.tokens
        if spec is None:
            first = ("prediction",) if prediction and self._default_drafters else ()
            spec = replace(self.spec, drafters=(*first, *self.spec.drafters))
        seq = Seq(
            id=f"r{next(_ids)}",
            tokens=tokens,
            prompt_len=len(tokens),
            params=params,
            spec=spec,
            tenant=tenant,
            prediction=self._prediction(prediction) if isinstance(prediction, str) else prediction,
            cursor=self._cursor(output, encoded, params.ignore_eos),
            remember=remember,
        )
        return self._output(seq, self._parser(output, encoded))

    def prepare_prefill(
        self, prompt: EncodedPrompt, params: SamplingParams, *, tenant: str = "", remember: bool = True
    ) -> RequestOutput:
        """A request that ends once its prompt is in the cache. May be called from any thread."""
        request = self.prepare(prompt, params, spec=READ_ONLY, tenant=tenant, remember=remember)
        request.seq.prefill = True
        return request

    def encode_embedded(self, text: str | Sequence[int]) -> EncodedPrompt:
        """The tokens of a text to be embedded, or these. May be called from any thread."""
        if isinstance(text, str):
            tokens = self.tokenizer.encode_whole(self._within_context(text))
        elif isinstance(text, Sequence) and _are_tokens(text):
            tokens = list(text)
        else:
            raise SettingError("input", text, "a text, or a list of tokens")
        if not tokens:
            raise SettingError("input", text, "at least one token of text")
        if len(tokens) >= (limit := self.target.max_context):
            raise PromptTooLong.of(str(len(tokens)), limit, self.engine.config.max_model_len > 0)
        return EncodedPrompt(tokens, "")

    def prepare_embedding(
        self, text: EncodedPrompt, *, tenant: str = "", remember: bool = True
    ) -> RequestOutput:
        """A request that ends once its text is read; `embedding` then has its vector.

        Where all hidden states are pooled, none may come from the prefix cache: the text is read as that of
        a tenant of its own, whose rows are to be dropped at the end (`forget_embedded`).
        """
        request = self.prepare_prefill(text, SamplingParams(), tenant=tenant, remember=remember)
        pooler = Pooler(self.pooling, self.target.layers - 1, self.target.final_norm)
        request.seq.reader = pooler
        if pooler.needs_all_rows:
            request.seq.tenant, request.seq.remember = f"\0embedding {request.seq.id}", False
        return request

    def forget_embedded(self, request: RequestOutput) -> None:
        """Between two passes, after the end of such a request: drops rows that nobody else can use."""
        reader = request.seq.reader
        if isinstance(reader, Pooler) and reader.needs_all_rows:
            self.target.forget(request.seq.tenant)

    def _answer(self, prompt: Prompt, continues: bool) -> Answer:
        chat = not isinstance(prompt, str) and not _are_tokens(prompt)
        if not chat or not self.tokenizer.tool_format.channels:
            return "text"
        return "message" if continues else "messages"

    def _parser(self, output: OutputSpec, prompt: EncodedPrompt) -> OutputParser:
        parse, format = output.parser(prompt.end), self.tokenizer.tool_format
        if prompt.answer != "text":
            return OutputParser(parse, format, calls=output.may_call, within=prompt.answer == "message")
        if not output.may_call:
            return OutputParser(parse)
        unmarked = output.unmarked_calls if format.alternatives else None
        offered = None
        if unmarked is not None:
            with suppress(ConstraintError):  # too large to be checked: the declared format is still read
                fits_text = self.constraints.checker(unmarked)
                offered = ToolSchemas(unmarked.schemas, fits_text, "json" in format.alternatives)
        return OutputParser(parse, format, output.only_calls, offered, output.parallel_tool_calls)

    def _prediction(self, text: str) -> Sequence[int]:
        """As much of the text as the context could hold, indexed once for all choices of a request."""
        limit = self.target.max_context
        if not text:
            return ()
        tokens = self.tokenizer.encode(text[: MAX_TOKEN_CHARACTERS * limit], special=False)
        return PredictionIndex(tokens[:limit])

    def another_choice(self, first: RequestOutput, choice: int) -> RequestOutput:
        """A further choice of a prepared request that is not yet submitted: nothing is encoded again."""
        seq = replace(
            first.seq,
            id=f"r{next(_ids)}",
            tokens=list(first.seq.tokens),
            params=replace(first.seq.params, choice=choice),
            cursor=None if first.seq.cursor is None else first.seq.cursor.clone(),
        )
        return self._output(seq, first.parser)

    def _output(self, seq: Seq, parser: OutputParser) -> RequestOutput:
        marks = frozenset() if parser.tools is None else self.tokenizer.tool_marks
        stop, min_tokens = seq.params.stop, seq.params.min_tokens
        if not stop:
            return RequestOutput(seq, Detokenizer(self.tokenizer, keep=marks), parser)
        seq.stopped_by = checker = StopChecker(self.tokenizer, stop, keep=marks, min_tokens=min_tokens)
        return RequestOutput(seq, checker, parser)

    def request(
        self,
        /,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        tools: Sequence[AnyTool] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool = True,
        response_format: Mapping[str, Any] | None = None,
        output: Any = None,
        whitespace: Whitespace = "fixed",
        spec: SpecConfig | None = None,
        prediction: str = "",
        tenant: str = "",
        remember: bool = True,
        learn: bool | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        **sampling: Any,
    ) -> RequestOutput:
        """Starts an answer.

        prompt: plain text, its tokens, or the messages of a chat.
        sampling: fields of SamplingParams, which override those of `params`. Without a seed, the request
        draws one.
        tools: functions or OpenAI's objects; every call that the model makes fits its tool's schema, and
        `run` runs the calls, too. tool_choice: auto, required, none, or a tool's name.
        output: the type of the answer: a Python type, a Pydantic model, a pattern, a constraint.
        `Result.value` then has this type. whitespace: that of JSON.
        prediction: a text that the answer may resemble; without a spec it is the first drafter.
        remember=False: drafters remember nothing of it for later requests (`learn` is the name before 0.2).
        continue_final_message: the answer continues the text of the last message, which need not be the
        assistant's. add_generation_prompt=False: it follows the last message without a new turn.
        """
        if learn is not None:
            warn_renamed("learn", "remember", stacklevel=4)  # whoever called `stream`
        output_spec = OutputSpec(
            tool_schemas(tools),
            tool_choice or "auto",
            parallel_tool_calls,
            response_format,
            output,
            whitespace,
        )
        request = self.prepare(
            self.encode(
                prompt,
                output_spec,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
            ),
            _params(params, sampling),
            output_spec,
            spec=spec,
            prediction=prediction,
            tenant=tenant,
            remember=remember if learn is None else learn,
        )
        check_drafters(request.seq.spec, self.drafters)
        return request

    stream = _streaming(request)

    def generate(self, prompt: Prompt, params: SamplingParams | None = None, **options: Any) -> Result:
        """The whole answer at once; options as for `stream`."""
        return self.stream(prompt, params, **options).read()

    def _submit(self, request: RequestOutput) -> Stream:
        self.check_unused()
        self.engine.submit(request.seq)
        self._inbox[request.seq.id] = deque()
        return Stream(self, request)

    def _cursor(self, output: OutputSpec, prompt: EncodedPrompt, ignore_eos: bool) -> Cursor | None:
        constraint = output.constraint(self.tokenizer.tool_format, prompt.end, prompt.answer)
        return None if constraint is None else self.constraints.cursor(constraint, ignore_eos)

    def prefill_request(
        self,
        /,
        prompt: Prompt,
        *,
        tools: Sequence[AnyTool] | None = None,
        tenant: str = "",
        remember: bool = True,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
    ) -> RequestOutput:
        """Reads a prompt, or the beginning of one, into the cache and generates nothing.

        Of a chat, the part is read that stays whatever message comes next: after the call of a tool, all but
        its result. The last two: as for `stream`, for a prompt that is complete. `Result.cached_tokens` of
        `Result.prompt_tokens` were in the cache before.
        """
        encoded = self.encode(
            prompt,
            OutputSpec(tool_schemas(tools)),
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            prefix=True,
        )
        return self.prepare_prefill(encoded, SamplingParams(), tenant=tenant, remember=remember)

    prefill = _reading(prefill_request)

    def embed(
        self, texts: str | Sequence[str] | Sequence[Sequence[int]], *, tenant: str = ""
    ) -> list[list[float]]:
        """The embedding of each text, or of its tokens: a vector of length 1.

        Hidden states after the final norm, pooled as the model's files say (`pooling`): their mean, or the
        state of the last or the first token.
        """
        requests, size = self.embedding_requests(texts, tenant=tenant), window(self.engine.config)
        for start in range(0, len(requests), size):
            for stream in [self._submit(request) for request in requests[start : start + size]]:
                stream.read()
        for request in requests:
            self.forget_embedded(request)
        return [embedding(request) for request in requests]

    def embedding_requests(
        self, texts: str | Sequence[str] | Sequence[Sequence[int]], *, tenant: str = ""
    ) -> list[RequestOutput]:
        """The requests of `embed`. May be called from any thread."""
        if not isinstance(texts, Sequence) or isinstance(texts, bytes):
            raise SettingError("texts", texts, "a text, or a list of texts or of lists of tokens")
        return [
            self.prepare_embedding(self.encode_embedded(text), tenant=tenant)
            for text in ([texts] if isinstance(texts, str) else texts)
        ]

    def _batch(self, batch: Batch) -> list[Outcome]:
        outcomes: dict[int, Outcome] = {}
        with batch.progress_bar() as report:
            for number, outcome in self._outcomes(batch):
                outcomes[number] = outcome
                report(outcome)
        return batch.in_order(outcomes)

    def _outcomes(self, batch: Batch) -> Iterator[tuple[int, Outcome]]:
        """Of numbered prompts, as they end."""
        left, running = enumerate(batch.prompts), dict[int, tuple[Stream, deque[Round]]]()
        while True:
            while len(running) < window(self.engine.config) and (numbered := next(left, None)):
                number, prompt = numbered
                try:
                    request = self.request(prompt, **batch.options)
                    running[number] = self._submit(request), self._inbox[request.seq.id]
                except PacelineError as error:
                    yield number, error
            if not running:
                return
            self._step()
            ended = [number for number, (_, inbox) in running.items() if inbox and inbox[-1].finish]
            for number in ended:
                stream, _ = running.pop(number)
                try:
                    yield number, stream.read()
                except PacelineError as error:
                    yield number, error

    def _turns(self, loop: ToolLoop, options: Mapping[str, Any]) -> Turns:
        return Turns(loop, partial(self.generate, **options))

    def _rendering(self, prompt: Prompt, generation_prompt: bool | None, continues: bool) -> dict[str, bool]:
        """Arguments of `Tokenizer.render`."""
        if not isinstance(prompt, Sequence) or not prompt:
            raise SettingError("prompt", prompt, "a text, a list of messages or a list of tokens, not empty")
        chat = not isinstance(prompt, str) and not _are_tokens(prompt)
        if continues and not chat:
            raise SettingError("continue_final_message", True, "false: the prompt has no messages")
        if continues and generation_prompt:
            raise SettingError("add_generation_prompt", True, "false, as continue_final_message is true")
        adds = not continues if generation_prompt is None else generation_prompt
        return {"add_generation_prompt": adds, "continue_final_message": continues}

    def _encode(
        self, prompt: Prompt, output: OutputSpec, rendering: dict[str, bool], variables: dict[str, Any]
    ) -> tuple[list[int], str]:
        """The prompt's tokens, and the end of its text that may open the model's reasoning.

        In a chat that end is the template's own, or the assistant's message that is continued: what a user
        writes never counts.
        """
        if isinstance(prompt, str):
            return self._encode_text(prompt, output.tools), prompt[-PROMPT_END:]
        if _are_tokens(prompt):
            return [int(token) for token in prompt], ""
        messages, tools = _messages(prompt), list(output.tools) or None
        text = self.tokenizer.render(messages, tools, **rendering, **variables)
        tokens = self.tokenizer.encode(self._within_context(text), bos=False)
        if rendering["continue_final_message"]:
            own = messages[-1].get("role") == "assistant"
            return tokens, str(messages[-1].get("content")) if own else ""
        if not output.constrained or not rendering["add_generation_prompt"]:
            return tokens, ""
        return tokens, self.tokenizer.generation_prompt(text, messages, tools, **variables)

    def _encode_prefix(
        self, messages: Sequence[Message], output: OutputSpec, variables: Mapping[str, Any]
    ) -> list[int]:
        """The tokens that all continuations of a chat begin with."""
        texts = self.tokenizer.template.continuations(messages, list(output.tools) or None, variables)
        tokens = _common_prefix([self.tokenizer.encode(self._within_context(t), bos=False) for t in texts])
        if not tokens:
            raise TextError("the chat template writes nothing that stays whatever message comes next")
        return tokens

    def _encode_text(self, prompt: str, tools: Sequence[Mapping[str, Any]] | None) -> list[int]:
        if tools:
            raise UsageError("tools need chat messages: give a list of messages instead of a plain prompt")
        tokens = self.tokenizer.encode(self._within_context(prompt))
        if not tokens:
            raise SettingError("prompt", prompt, "at least one token of text")
        return tokens

    def _within_context(self, text: str) -> str:
        """Refuses text that cannot fit before it is tokenized."""
        size, limit = len(text.encode("utf-8", "surrogatepass")), self.target.max_context
        if size >= limit and (tokens := size // self.tokenizer.longest_piece) >= limit:
            raise PromptTooLong.of(f"at least {tokens}", limit, self.engine.config.max_model_len > 0)
        return text

    def next_round(self, seq_id: str) -> Round:
        """For streams: runs passes until one has a round for this sequence."""
        inbox = self._inbox[seq_id]
        while not inbox:
            self._step()
        r = inbox.popleft()
        if r.finish is not None:
            del self._inbox[seq_id]
        return r

    def _step(self) -> None:
        for r in self.engine.step():
            if r.request in self._inbox:
                self._inbox[r.request].append(r)

    def cancel(self, seq_id: str) -> None:
        self._inbox.pop(seq_id, None)
        self.engine.cancel(seq_id)


def embedding(request: RequestOutput) -> list[float]:
    """Of a request of `LLM.prepare_embedding` that has ended."""
    assert isinstance(request.seq.reader, Pooler)
    return request.seq.reader.vector().tolist()


def _limit_context(target: Target, tokens: int) -> None:
    if tokens > target.max_context:
        hint = "raise cache_mb" if target.max_context == target.capacity else ""
        expected = f"at most {target.max_context}, which the model and its cache hold"
        raise SettingError("max_model_len", tokens, expected, hint)
    target.max_context = tokens


def _messages(prompt: Prompt) -> list[Message]:
    messages = [message for message in prompt if isinstance(message, Mapping)]
    if len(messages) != len(prompt):
        raise UsageError("a prompt is a text, a list of messages, or a list of tokens")
    return messages


def _common_prefix(sequences: Sequence[list[int]]) -> list[int]:
    """In lexical order all sequences lie between the first and the last, and share what these two share."""
    first, last = min(sequences), max(sequences)
    pairs = enumerate(zip(first, last, strict=False))
    return first[: next((i for i, (a, b) in pairs if a != b), min(len(first), len(last)))]


def _are_tokens(prompt: Sequence[Any]) -> TypeGuard[Sequence[int]]:
    return all(isinstance(token, int) for token in prompt)


def _params(params: SamplingParams | None, sampling: Mapping[str, Any]) -> SamplingParams:
    return settings(SamplingParams, {**(asdict(params) if params else {}), **sampling})
