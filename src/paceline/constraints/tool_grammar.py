"""Grammars of tool calls in a model family's own format."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from paceline.constraints.grammars import (
    Constraint,
    Json,
    RequestPart,
    Spell,
    StructuralTag,
    Whitespace,
    quoted,
)
from paceline.constraints.json_schema import closed
from paceline.errors import ConstraintError
from paceline.strings import short
from paceline.text import ToolFormat

NO_ARGUMENTS: Final[Mapping[str, Any]] = {"type": "object", "properties": {}}


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
        own = f"{name}: {quoted(before + written + between)} {inner} {quoted(end)}"
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
    if choice == "none":
        return StructuralTag(form.trigger, None, anywhere=form.anywhere)
    if not known:
        raise ConstraintError(f"{short(choice)} needs tools: give at least one", "tool_choice")
    named = _named(choice, known)
    calls = tuple(Call(n, s, form) for n, s in known.items() if n == named or named is None)
    if choice == "auto":
        several = parallel and not form.wraps_each
        return StructuralTag(
            form.trigger, Calls(calls, form, several), again=parallel, anywhere=form.anywhere
        )
    return Calls(calls, form, several=parallel and named is None)


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


def read_tools(tools: Sequence[Mapping[str, Any]], whitespace: Whitespace) -> dict[str, Constraint]:
    """The arguments of each tool, by its name."""
    known: dict[str, Constraint] = {}
    for i, tool in enumerate(tools):
        name = _name(tool, f"tools[{i}]")
        if name in known:
            raise ConstraintError(f"two tools are called {short(name)}: give each a name of its own", "tools")
        param = f"tools[{i}].function.parameters" if "function" in tool else f"tools[{i}].parameters"
        try:
            known[name] = RequestPart(param, _arguments(tool.get("function", tool), name, whitespace))
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
