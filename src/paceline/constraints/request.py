"""From what a request says to the one constraint it means."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from paceline.constraints.grammars import (
    WHITESPACE,
    Constraint,
    RequestPart,
    Spell,
    Triggered,
    Whitespace,
    after,
    response_format,
)
from paceline.constraints.python_types import Output
from paceline.constraints.python_types import output as output_of
from paceline.constraints.tool_grammar import read_tools, tool_calls
from paceline.errors import ConstraintError
from paceline.strings import short
from paceline.text import ToolFormat

THINKING: Final = (
    "<think>",
    "</think>",
)  # a prompt may end with the first; the answer begins after the second


@dataclass(frozen=True, slots=True)
class OutputSpec:
    """What an answer must look like, as a request says it. Without any of it, anything goes."""

    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: str | Mapping[str, Any] = "auto"
    parallel_tool_calls: bool = True
    response_format: Mapping[str, Any] | None = None
    output: Any = None  # a Python type, a pattern, a constraint
    whitespace: Whitespace = "fixed"
    output_param: str = "output"  # the caller's name for `output`, which errors give

    def __post_init__(self) -> None:
        if self.whitespace not in WHITESPACE:
            expected = f"expected one of {', '.join(WHITESPACE)}"
            raise ConstraintError(f"{short(self.whitespace)} is not usable: {expected}", "whitespace")
        read_tools(self.tools, self.whitespace)

    @property
    def calls(self) -> bool:
        """Whether the answer may hold tool calls."""
        return bool(self.tools) and self.tool_choice != "none"

    def constraint(self, form: ToolFormat, opening: str = "") -> Constraint | Triggered | None:
        """`opening`: how the prompt lets the model begin. Reasoning that it opens is free."""
        answer = self._answer()
        if not self.tools:
            if self.tool_choice not in ("auto", "none"):
                raise ConstraintError(
                    f"{short(self.tool_choice)} needs tools: give at least one", "tool_choice"
                )
            return _thought(answer, opening)
        calls = tool_calls(self.tools, self.tool_choice, form, self.parallel_tool_calls, self.whitespace)
        if answer is None or self.tool_choice not in ("auto", "none"):
            return _thought(calls, opening)
        if isinstance(calls, Triggered) and calls.then is not None:
            answer = Either((calls.then, answer))
        return _thought(answer, opening)

    @property
    def bound(self) -> bool:
        return bool(self.tools) or self.output is not None or self.response_format is not None

    def _answer(self) -> Constraint | None:
        if self.output is None:
            given = self.response_format
            return None if given is None else response_format(given, self.whitespace)
        if self.response_format is not None:
            raise ConstraintError("output and response_format say the same thing: give one of them")
        return RequestPart(self.output_param, self._output().constraint)

    def _output(self) -> Output:
        try:
            return output_of(self.output, self.whitespace)
        except ConstraintError as error:
            raise error.within(self.output_param) from None

    def parser(self, opening: str = "") -> Callable[[str], Any] | None:
        """From a complete answer's text to its value."""
        if self.output is None:
            return None
        parse = self._output().parse
        return (lambda text: parse(_said(text))) if thinks(opening) else parse


ANYTHING: Final = OutputSpec()


@dataclass(frozen=True, slots=True)
class Either:
    """One constraint or another."""

    options: tuple[Constraint, ...]

    def rules(self, name: str, spell: Spell) -> str:
        names = [f"{name}_{i}" for i in range(len(self.options))]
        rules = [option.rules(n, spell) for option, n in zip(self.options, names, strict=True)]
        return "\n".join([f"{name}: {' | '.join(names)}", *rules])


def thinks(opening: str) -> bool:
    """Whether the prompt leaves the model's reasoning open."""
    begun, ended = THINKING
    return opening.rfind(begun) > opening.rfind(ended)


def _thought(constraint: Constraint | Triggered | None, opening: str) -> Constraint | Triggered | None:
    """Tool calls wait for their trigger in any case; everything else waits for the end of reasoning."""
    if constraint is None or isinstance(constraint, Triggered) or not thinks(opening):
        return constraint
    return after(THINKING[1], constraint)


def _said(text: str) -> str:
    """What follows the reasoning."""
    return text.partition(THINKING[1])[2].lstrip()
