"""The tool loop: the model's calls are run, and their results sent back, until it answers in text.

ToolLoop holds the conversation and asks nobody; Turns and AsyncTurns drive it with a model.
"""

import asyncio
import contextvars
import inspect
import json
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from html import escape
from typing import Any, Final, Generic, Literal, TypeVar

from paceline import notebook
from paceline.config import SamplingParams
from paceline.constraints import AnyTool, Tool, as_tools
from paceline.errors import (
    ConstraintError,
    PacelineError,
    SettingError,
    UsageError,
    one_line,
    short,
    unknown_name,
)
from paceline.output import Result
from paceline.text import Message, Prompt, ToolCall
from paceline.types import Finish

MAX_TURNS: Final = 8
MAX_ERROR: Final = 500  # characters of a tool's error that the model is told

RunFinish = Finish | Literal["max_turns"]
ToolChoice = str | Mapping[str, Any] | None
AnyTurns = TypeVar("AnyTurns")
AnyRun = TypeVar("AnyRun")


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What became of one call."""

    call: ToolCall
    id: str  # of the call, in the messages
    content: str  # the text that the model was given
    value: Any = None  # what the function returned
    exception: Exception | None = None  # why there is no value; the model was told


@dataclass(frozen=True, slots=True)
class Turn:
    """One answer of the model with its figures, and the results of the calls in it."""

    result: Result
    calls: tuple[ToolResult, ...] = ()  # none: the last turn

    def _repr_html_(self) -> str:
        calls = [
            notebook.block(
                f"<b>{escape(done.call.name)}</b>({escape(done.call.text)}) → {escape(done.content)}"
            )
            for done in self.calls
        ]
        return self.result._repr_html_() + "".join(calls)


@dataclass(frozen=True, slots=True, repr=False)
class Run:
    """The turns of a tool loop. `messages` is the whole conversation: append a question to go on with it."""

    turns: tuple[Turn, ...]
    messages: tuple[Message, ...]  # those given, and those of the run
    # "stop": the model answered. "max_turns": it would have gone on. "length": max_tokens cut its last turn
    # off, and calls in that were not run. None: not ended.
    finish: RunFinish | None = None

    @property
    def text(self) -> str:
        """The model's answer; empty where the run ended with calls."""
        last = self.turns[-1] if self.turns else None
        return "" if last is None or last.calls else last.result.content

    @property
    def value(self) -> Any:
        """The answer as the requested `output`."""
        return self.turns[-1].result.value if self.turns else None

    @property
    def calls(self) -> tuple[ToolResult, ...]:
        """Those of all turns."""
        return tuple(done for turn in self.turns for done in turn.calls)

    @property
    def output_tokens(self) -> int:
        return sum(turn.result.output_tokens for turn in self.turns)

    @property
    def passes(self) -> int:
        return sum(turn.result.passes for turn in self.turns)

    @property
    def tokens_per_pass(self) -> float:
        return self.output_tokens / self.passes if self.passes else 0.0

    @property
    def summary(self) -> str:
        """The main figures in one line."""
        failed = sum(done.exception is not None for done in self.calls)
        calls = _counted(len(self.calls), "call") + (f" ({failed} failed)" if failed else "")
        return (
            f"{_counted(len(self.turns), 'turn')}, {calls}, {self.output_tokens} tokens in "
            f"{self.passes} passes, {self.tokens_per_pass:.2f} per pass, finish={self.finish}"
        )

    def __repr__(self) -> str:
        return f"Run({short(self.text)}, {self.summary})"

    def _repr_html_(self) -> str:
        return "".join(turn._repr_html_() for turn in self.turns) + notebook.caption(self.summary)


@dataclass(slots=True)
class ToolLoop:
    """A conversation between a model and tools, and what comes next in it."""

    messages: list[Message]
    tools: Mapping[str, Tool[..., Any]]
    max_turns: int = MAX_TURNS
    tool_choice: ToolChoice = None
    turns: list[Turn] = field(default_factory=list)
    finish: RunFinish | None = None
    _calls: int = 0  # in the conversation; the next one's id

    def __post_init__(self) -> None:
        if not isinstance(self.max_turns, int) or self.max_turns < 1:
            raise SettingError("max_turns", self.max_turns, "1 or more")
        self._calls = sum(len(message.get("tool_calls") or ()) for message in self.messages)

    @property
    def options(self) -> dict[str, Any]:
        """Of the next request. A call that is required is required once: the model could never answer."""
        choice = _later_choice(self.tool_choice) if self.turns else self.tool_choice
        return {"tools": tuple(self.tools.values()), "tool_choice": choice if self.tools else None}

    @property
    def run(self) -> Run:
        return Run(tuple(self.turns), tuple(self.messages), self.finish)

    def calls(self, result: Result) -> list[tuple[str, ToolCall]]:
        """The calls to run, with their ids, which count on from those in the conversation: equal runs have
        equal prompts. An answer that was cut off may lack a call, so none of its calls is run."""
        if result.finish != "stop":
            return []
        return [(f"call{i:05}", call) for i, call in enumerate(result.tool_calls, self._calls)]

    def take(self, result: Result, done: Sequence[ToolResult]) -> Turn:
        turn = Turn(result, tuple(done))
        self.turns.append(turn)
        self._calls += len(done)
        self.messages += _messages(turn)
        if not done:
            self.finish = result.finish
        elif len(self.turns) >= self.max_turns:
            self.finish = "max_turns"
        return turn

    def bound(self, call: ToolCall) -> tuple[Callable[..., Any], dict[str, Any]]:
        """The function of a call and its arguments."""
        if call.name not in self.tools:
            raise ConstraintError(unknown_name("tool", call.name, self.tools))
        tool = self.tools[call.name]
        return tool.function, tool.arguments(call.arguments)


class ToolRuns(ABC, Generic[AnyTurns, AnyRun]):
    """`turns` and `run` of LLM and AsyncLLM. AnyRun: a Run; of AsyncLLM, a coroutine of one."""

    def turns(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        tools: Sequence[AnyTool],
        max_turns: int = MAX_TURNS,
        tool_choice: ToolChoice = None,
        **options: Any,
    ) -> AnyTurns:
        """The turns of `run` one by one, as they come."""
        return self._turns(tool_loop(prompt, tools, max_turns, tool_choice), {"params": params, **options})

    def run(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        tools: Sequence[AnyTool],
        max_turns: int = MAX_TURNS,
        tool_choice: ToolChoice = None,
        **options: Any,
    ) -> AnyRun:
        """Lets the model call functions until it answers in text, or has had max_turns.

        prompt: a question, or the messages of a chat.
        tools: functions, or `Tool`s. Their results go back to the model: texts as they are, everything else
        as JSON. So do their errors, and calls that do not fit; `Run.calls` has both.
        tool_choice: as for `stream`; a call that is required is required in the first turn only.
        options: as for `stream`, the same for every turn.

        Every turn is a `generate` with the whole conversation: its text is that of plain decoding.
        """
        turns: Any = self.turns(
            prompt, params, tools=tools, max_turns=max_turns, tool_choice=tool_choice, **options
        )
        run: AnyRun = turns.read()
        return run

    @abstractmethod
    def _turns(self, loop: ToolLoop, options: Mapping[str, Any]) -> AnyTurns:
        """options: of each request."""


class Turns(Iterator[Turn]):
    """Turns as they come; `run` sums up those so far. Calls run one after the other, in the model's order."""

    def __init__(self, loop: ToolLoop, generate: Callable[..., Result]) -> None:
        self._loop = loop
        self._generate = generate

    def __next__(self) -> Turn:
        loop = self._loop
        if loop.finish is not None:
            raise StopIteration
        result = self._generate(list(loop.messages), **loop.options)
        return loop.take(result, [self._done(*call) for call in loop.calls(result)])

    def _done(self, id: str, call: ToolCall) -> ToolResult:
        try:
            function, arguments = self._loop.bound(call)
            value = function(**arguments)
            value = _waited(value) if inspect.isawaitable(value) else value
            return ToolResult(call, id, _content(value), value)
        except Exception as problem:
            return ToolResult(call, id, _told(problem), exception=problem)

    def read(self) -> Run:
        """Waits for the rest."""
        for _ in self:
            pass
        return self.run

    @property
    def run(self) -> Run:
        return self._loop.run


class AsyncTurns(AsyncIterator[Turn]):
    """As Turns, for `async for`. The calls of a turn run at once: functions in threads, coroutines beside."""

    def __init__(self, loop: ToolLoop, generate: Callable[..., Awaitable[Result]]) -> None:
        self._loop = loop
        self._generate = generate

    async def __anext__(self) -> Turn:
        loop = self._loop
        if loop.finish is not None:
            raise StopAsyncIteration
        result = await self._generate(list(loop.messages), **loop.options)
        return loop.take(result, await asyncio.gather(*(self._done(*call) for call in loop.calls(result))))

    async def _done(self, id: str, call: ToolCall) -> ToolResult:
        try:
            function, arguments = self._loop.bound(call)
            if inspect.iscoroutinefunction(function):
                value = await function(**arguments)
            else:
                value = await asyncio.to_thread(_called, function, arguments)
                value = await value if inspect.isawaitable(value) else value
            return ToolResult(call, id, _content(value), value)
        except Exception as problem:
            return ToolResult(call, id, _told(problem), exception=problem)

    async def read(self) -> Run:
        async for _ in self:
            pass
        return self.run

    @property
    def run(self) -> Run:
        return self._loop.run


def tool_loop(prompt: Prompt, tools: Sequence[AnyTool], max_turns: int, tool_choice: ToolChoice) -> ToolLoop:
    """prompt: a question, or the messages of a chat."""
    messages: list[Any] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    if not prompt or not all(isinstance(message, Mapping) for message in messages):
        raise UsageError("tools need a chat: give a text, or a list of messages that is not empty")
    functions: dict[str, Tool[..., Any]] = {}
    for tool in as_tools(tools):
        if not isinstance(tool, Tool):
            hint = "give the function itself, or answer the calls of `generate` yourself"
            raise ConstraintError(f"{short(tool)} has no function that could be run: {hint}", "tools")
        if tool.name in functions:
            raise ConstraintError(f"two tools are called {tool.name}: give one Tool(..., name=...)", "tools")
        functions[tool.name] = tool
    return ToolLoop(messages, functions, max_turns, tool_choice)


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _later_choice(choice: ToolChoice) -> ToolChoice:
    if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
        inner = choice.get("allowed_tools")
        return (
            {**choice, "allowed_tools": {**inner, "mode": "auto"}}
            if isinstance(inner, Mapping)
            else {**choice, "mode": "auto"}
        )
    return choice if choice == "none" else None


def _messages(turn: Turn) -> list[Message]:
    """A turn as the next request has it."""
    result = turn.result
    thought = {"reasoning_content": result.reasoning} if result.reasoning else {}
    if not turn.calls:
        return [{"role": "assistant", "content": result.content, **thought}] if result.content else []
    calls = [
        {"id": done.id, "type": "function", "function": {"name": done.call.name, "arguments": done.call.text}}
        for done in turn.calls
    ]
    said: Message = {"role": "assistant", "content": result.content or None, "tool_calls": calls, **thought}
    return [
        said,
        *(
            {"role": "tool", "tool_call_id": done.id, "name": done.call.name, "content": done.content}
            for done in turn.calls
        ),
    ]


def _content(value: Any) -> str:
    """A text as it is, everything else as JSON: dataclasses, Pydantic models, dates; at last, its str."""
    from pydantic_core import to_jsonable_python

    if isinstance(value, str):
        return value
    return json.dumps(to_jsonable_python(value, fallback=str), ensure_ascii=False)


def _told(problem: Exception) -> str:
    """A tool's error for the model."""
    kind = "" if isinstance(problem, PacelineError) else f"{type(problem).__name__}: "
    return f"Error: {kind}{one_line(problem, MAX_ERROR)}"


def _called(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """No future can hold a StopIteration: whoever awaits a thread that raises one waits forever."""
    try:
        return function(**arguments)
    except StopIteration as problem:
        raise RuntimeError("the function raised StopIteration") from problem


def _waited(value: Awaitable[Any]) -> Any:
    """The result of a coroutine, for a caller that is none. Where a loop runs (notebooks), in a thread."""

    async def waited() -> Any:
        return await value

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(waited())
    with ThreadPoolExecutor(1, "paceline-tool") as pool:
        return pool.submit(contextvars.copy_context().run, asyncio.run, waited()).result()
