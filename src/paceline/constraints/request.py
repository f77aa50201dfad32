"""From the parameters of a request to one constraint: tools in a model family's format, a schema, a type."""

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

from paceline.constraints.grammars import (
    WHITESPACE,
    Constraint,
    Json,
    RequestPart,
    Spell,
    StructuralTag,
    Whitespace,
    after,
    quoted,
    response_format,
)
from paceline.constraints.json_schema import closed
from paceline.constraints.python_types import Output
from paceline.constraints.python_types import output as output_of
from paceline.errors import ConstraintError, short
from paceline.text import ToolFormat

THINKING: Final = ("<think>", "</think>")  # a prompt may end with the first; the answer follows the second
_SPACES: Final = r"[ \t\r\n]*"
_PUNCTUATION: Final = r"[^A-Za-z0-9{}]*"
_JSON_HEAD: Final = (  # of a call, up to its arguments
    rf'\{{{_SPACES}"name"{_SPACES}:{_SPACES}%s{_SPACES},{_SPACES}"(arguments|parameters)"{_SPACES}:{_SPACES}'
)
# How an answer is written. text: as it is. messages: in the channels of OpenAI's harmony format. message: the
# same, but it continues one whose channel stands in the prompt.
Answer = Literal["text", "messages", "message"]
FINAL: Final = "<|channel|>final<|message|>"
ANALYSIS: Final = ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant")  # around reasoning
_IN_HEADER: Final = re.compile(r"[\w.-]+")  # a tool's name there
NO_ARGUMENTS: Final[Mapping[str, Any]] = {"type": "object", "properties": {}}


@dataclass(frozen=True, slots=True)
class OutputSpec:
    """The form of an answer, as the parameters of a request give it. Without any, every text is allowed.

    A tool_choice of `allowed_tools` becomes its mode: all tools are offered, the allowed ones can be called.
    """

    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: str | Mapping[str, Any] = "auto"
    parallel_tool_calls: bool = True
    response_format: Mapping[str, Any] | None = None
    output: Any = None  # a Python type, a pattern, a constraint
    whitespace: Whitespace = "fixed"
    output_param: str = "output"  # the caller's name for `output`, which errors give
    _tools: Mapping[str, "Arguments"] = field(init=False, repr=False, compare=False)  # arguments by tool
    _read: Output | None = field(init=False, repr=False, compare=False)  # `output`

    def __post_init__(self) -> None:
        if self.whitespace not in WHITESPACE:
            expected = f"expected one of {', '.join(WHITESPACE)}"
            raise ConstraintError(f"{short(self.whitespace)} is not usable: {expected}", "whitespace")
        known = read_tools(self.tools, self.whitespace)
        mode, allowed = read_choice(self.tool_choice, known)
        object.__setattr__(self, "tool_choice", mode)
        object.__setattr__(self, "_tools", {name: known[name] for name in known if name in allowed})
        object.__setattr__(self, "_read", None if self.output is None else self._output())

    @property
    def may_call(self) -> bool:
        """True if the answer may contain tool calls."""
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def unmarked_calls(self) -> "JsonCalls | None":
        """Calls without the declared marks; None if a grammar leaves no free text to write them in."""
        free = self.tool_choice == "auto" and self.output is None and self.response_format is None
        return JsonCalls(tuple(self._tools.items())) if free and self._tools else None

    @property
    def only_calls(self) -> bool:
        """True if the answer is tool calls and nothing else."""
        return bool(self.tools) and self.tool_choice not in ("auto", "none")

    def constraint(
        self, form: ToolFormat, prompt_end: str = "", shape: Answer = "text"
    ) -> Constraint | StructuralTag | None:
        """prompt_end: the end of the prompt's text. Reasoning that it opens is not constrained."""
        if shape == "messages":
            return self._messages(form)
        answer = self._answer()
        if not self.tools:
            if self.tool_choice not in ("auto", "none"):
                raise ConstraintError(
                    f"{short(self.tool_choice)} needs tools: give at least one", "tool_choice"
                )
            return _with_reasoning(answer, prompt_end)
        calls = tool_grammar(self._tools, self.tool_choice, form, self.parallel_tool_calls)
        if isinstance(calls, StructuralTag) and "json" in form.alternatives:
            calls = replace(calls, unmarked=self.unmarked_calls)
        if answer is None or self.tool_choice not in ("auto", "none"):
            return _with_reasoning(calls, prompt_end)
        if isinstance(calls, StructuralTag) and calls.then is not None:
            answer = Alternatives((calls.then, answer))
        return _with_reasoning(answer, prompt_end)

    def _messages(self, form: ToolFormat) -> Constraint | StructuralTag | None:
        """The same for an answer in channels: the model may reason before what is constrained."""
        answer = self._answer()
        final = None if answer is None else Message(FINAL, answer)
        if not self.tools and self.tool_choice not in ("auto", "none"):
            raise ConstraintError(f"{short(self.tool_choice)} needs tools: give at least one", "tool_choice")
        calls = tool_grammar(self._tools, self.tool_choice, form) if self.tools else None
        if self.only_calls and calls is not None and not isinstance(calls, StructuralTag):
            return Messages(calls)
        if final is None:
            return calls
        if isinstance(calls, StructuralTag) and calls.then is not None:
            return Messages(Alternatives((calls.then, final)))
        return Messages(final)

    @property
    def constrained(self) -> bool:
        return bool(self.tools) or self.output is not None or self.response_format is not None

    def _answer(self) -> Constraint | None:
        if self._read is None:
            given = self.response_format
            return None if given is None else response_format(given, self.whitespace)
        if self.response_format is not None:
            raise ConstraintError("output and response_format say the same thing: give one of them")
        return RequestPart(self.output_param, self._read.constraint)

    def _output(self) -> Output:
        try:
            return output_of(self.output, self.whitespace)
        except ConstraintError as error:
            raise error.within(self.output_param) from None

    def parser(self, prompt_end: str = "") -> Callable[[str], Any] | None:
        """Reads the value of a complete answer."""
        if self._read is None:
            return None
        parse = self._read.parse
        return (lambda text: parse(_after_reasoning(text))) if thinks(prompt_end) else parse


@dataclass(frozen=True, slots=True)
class Alternatives:
    """One of several constraints."""

    options: tuple[Constraint, ...]

    def rules(self, name: str, spell: Spell) -> str:
        names = [f"{name}_{i}" for i in range(len(self.options))]
        rules = [option.rules(n, spell) for option, n in zip(self.options, names, strict=True)]
        return "\n".join([f"{name}: {' | '.join(names)}", *rules])


@dataclass(frozen=True, slots=True)
class Message:
    """One message of an answer in channels."""

    header: str
    content: Constraint

    def rules(self, name: str, spell: Spell) -> str:
        return f"{name}: {spell(self.header)} {name}_content\n{self.content.rules(f'{name}_content', spell)}"


@dataclass(frozen=True, slots=True)
class Messages:
    """An answer in channels: reasoning, as much as the model wants, then a message that is constrained."""

    last: Constraint

    def rules(self, name: str, spell: Spell) -> str:
        begin, end = map(spell, ANALYSIS)
        return (
            f"{name}: {name}_analysis* {name}_last\n{name}_analysis: {begin} /(.|\\n)*/ {end}\n"
            f"{self.last.rules(f'{name}_last', spell)}"
        )


def thinks(prompt_end: str) -> bool:
    """True if the prompt leaves the model's reasoning open."""
    begin, end = THINKING
    return prompt_end.rfind(begin) > prompt_end.rfind(end)


def _with_reasoning(
    constraint: Constraint | StructuralTag | None, prompt_end: str
) -> Constraint | StructuralTag | None:
    """Tool calls wait for their trigger anyway; everything else waits for the end of reasoning."""
    if constraint is None or isinstance(constraint, StructuralTag) or not thinks(prompt_end):
        return constraint
    return after(THINKING[1], constraint)


def _after_reasoning(text: str) -> str:
    return text.partition(THINKING[1])[2].lstrip()


@dataclass(frozen=True, slots=True)
class Arguments:
    """The arguments of a tool, and the part of the request that describes them."""

    param: str
    json: Json

    def rules(self, name: str, spell: Spell) -> str:
        return RequestPart(self.param, self.json).rules(name, spell)


@dataclass(frozen=True, slots=True)
class JsonCalls:
    """One call as models write it without the marks of their template: {"name": ..., "arguments": {...}}.

    White space is the model's own. The token with the last brace may go on with punctuation: a model that
    cannot write the token it would write there, such as "}\\n", tends to stop.
    """

    tools: tuple[tuple[str, Arguments], ...]

    @property
    def schemas(self) -> dict[str, str]:
        """As JSON, by tool."""
        return {name: arguments.json.schema for name, arguments in self.tools}

    def rules(self, name: str, spell: Spell) -> str:
        names = [f"{name}_{i}" for i in range(len(self.tools))]
        lines = [f"{name}: {' | '.join(names)}"]
        for rule, (tool, arguments) in zip(names, self.tools, strict=True):
            head = _JSON_HEAD % re.escape(json.dumps(tool, ensure_ascii=False)).replace("/", "\\/")
            flexible = replace(arguments, json=replace(arguments.json, whitespace="flexible"))
            lines.append(f"{rule}: /{head}/ {rule}_arguments /{_SPACES}\\}}{_PUNCTUATION}/")
            lines.append(flexible.rules(f"{rule}_arguments", spell))
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Call:
    """One call of one tool."""

    name: str
    arguments: Constraint
    format: ToolFormat

    def rules(self, name: str, spell: Spell) -> str:
        before, between, end = self.format.call
        written = json.dumps(self.name, ensure_ascii=False)[1:-1]
        inner = f"{name}_arguments"
        head = quoted(before + written + between)
        if self.format.channels:  # its marks are tokens; a blank before them is the model's choice
            head = f'{quoted(before + written)} " "? {spell(between.lstrip())}'
        own = f"{name}: {head} {inner} {quoted(end)}"
        return f"{own}\n{self.arguments.rules(inner, spell)}"


@dataclass(frozen=True, slots=True)
class Calls:
    """One or more calls, with the text that begins and ends them."""

    calls: tuple[Call, ...]
    format: ToolFormat
    several: bool

    def rules(self, name: str, spell: Spell) -> str:
        form = self.format
        call = f"{name}_call"
        begin, end, between = spell(form.begin), spell(form.end), spell(form.between)
        if form.channels:  # the token that ends the call ends the answer
            end = '""'
        one = f"{begin} {call} {end}" if form.wraps_each else call
        whole = f"{one} ({between} {one})*" if self.several else one
        if not form.wraps_each:
            whole = f"{begin} {whole} {end}"
        elif self.several:  # models write the separator before they decide on another call
            whole += f" ({between})?"
        names = [f"{call}_{i}" for i in range(len(self.calls))]
        rules = [c.rules(n, spell) for c, n in zip(self.calls, names, strict=True)]
        return "\n".join([f"{name}: {whole}", f"{call}: {' | '.join(names)}", *rules])


def tool_calls(
    tools: Sequence[Mapping[str, Any]],
    choice: str | Mapping[str, Any],
    form: ToolFormat,
    parallel: bool = True,
    whitespace: Whitespace = "fixed",
) -> Constraint | StructuralTag:
    """From OpenAI's `tools`, `tool_choice` and `parallel_tool_calls`."""
    return tool_grammar(read_tools(tools, whitespace), choice, form, parallel)


def tool_grammar(
    known: Mapping[str, Constraint],
    choice: str | Mapping[str, Any],
    form: ToolFormat,
    parallel: bool = True,
) -> Constraint | StructuralTag:
    """The grammar of calls. known: from `read_tools`.

    auto: free text; every call that the model begins is enforced. required: only calls. A tool's name: only
    calls of it. none: free text without calls.
    """
    parallel = parallel and not form.channels  # where the token after a call ends the answer
    if choice == "none":
        return StructuralTag(form.trigger, None, anywhere=form.anywhere)
    if not known:
        raise ConstraintError(f"{short(choice)} needs tools: give at least one", "tool_choice")
    odd = next((name for name in known if form.channels and not _IN_HEADER.fullmatch(name)), None)
    if odd is not None:
        expected = "this model calls names of letters, digits, _, - and . only"
        raise ConstraintError(f"{short(odd)} cannot be called: {expected}", "tools")
    named = _named(choice, known)
    calls = tuple(Call(n, s, form) for n, s in known.items() if n == named or named is None)
    if choice == "auto":
        several = parallel and not form.wraps_each
        return StructuralTag(
            form.trigger, Calls(calls, form, several), again=parallel, anywhere=form.anywhere
        )
    return Calls(calls, form, several=parallel and named is None)


def read_choice(
    choice: str | Mapping[str, Any], known: Collection[str]
) -> tuple[str | Mapping[str, Any], Collection[str]]:
    """The choice, or the mode of `allowed_tools`, and the tools that can be called.

    The fields of `allowed_tools` stand in an object of that name (chat) or beside the type (responses).
    """
    if not isinstance(choice, Mapping) or choice.get("type") != "allowed_tools":
        return choice, known
    given = choice.get("allowed_tools", choice)
    mode, tools = (given.get(name) for name in ("mode", "tools")) if isinstance(given, Mapping) else ("", ())
    if mode not in ("auto", "required") or not isinstance(tools, Sequence) or not tools:
        expected = 'expected allowed_tools with a mode, "auto" or "required", and a list of tools'
        raise ConstraintError(f"{short(choice)} is not usable: {expected}", "tool_choice")
    names = dict.fromkeys(_name(tool, "tool_choice") for tool in tools)
    if (unknown := next((name for name in names if name not in known), None)) is not None:
        expected = f"expected some of {', '.join(known)}" if known else "no tools are given"
        raise ConstraintError(f"{short(unknown)} is unknown: {expected}", "tool_choice")
    return str(mode), names


def _named(choice: str | Mapping[str, Any], known: Mapping[str, Constraint]) -> str | None:
    """The only tool that may be called; None: any."""
    inner = choice.get("function", choice) if isinstance(choice, Mapping) else {"name": choice}
    name = inner.get("name") if isinstance(inner, Mapping) else None
    if choice in ("auto", "required"):
        return None
    if not isinstance(name, str) or name not in known:
        expected = f"expected auto, required, none or one of {', '.join(known)}"
        raise ConstraintError(f"{short(choice)} is unknown: {expected}", "tool_choice")
    return name


def read_tools(tools: Sequence[Mapping[str, Any]], whitespace: Whitespace) -> dict[str, Arguments]:
    """The arguments of each tool, by its name."""
    known: dict[str, Arguments] = {}
    for i, tool in enumerate(tools):
        name = _name(tool, f"tools[{i}]")
        if name in known:
            raise ConstraintError(f"two tools are called {short(name)}: give each a name of its own", "tools")
        param = f"tools[{i}].function.parameters" if "function" in tool else f"tools[{i}].parameters"
        try:
            known[name] = Arguments(param, _arguments(tool.get("function", tool), name, whitespace))
        except ConstraintError as error:
            raise error.within(param) from None
    return known


def _name(tool: Any, param: str) -> str:
    function = tool.get("function", tool) if isinstance(tool, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not name:
        raise ConstraintError(
            'a tool needs {"type": "function", "function": {"name": ..., "parameters": {...}}}', param
        )
    return name


def _arguments(function: Mapping[str, Any], name: str, whitespace: Whitespace) -> Json:
    parameters = function.get("parameters")
    if parameters is None:
        parameters = NO_ARGUMENTS
    kind = parameters.get("type", "object") if isinstance(parameters, Mapping) else "none"
    if not isinstance(parameters, Mapping) or "object" not in (kind if isinstance(kind, list) else [kind]):
        raise ConstraintError(f"the parameters of tool {short(name)} are no schema of an object")
    try:
        return Json.of(closed({**parameters, "type": "object"}), whitespace)
    except RecursionError:
        raise ConstraintError(f"the parameters of tool {short(name)} are nested too deeply") from None


UNCONSTRAINED: Final = OutputSpec()
