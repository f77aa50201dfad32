"""From the parameters of a request to one constraint."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from paceline.constraints.grammars import (
    WHITESPACE,
    Constraint,
    RequestPart,
    Spell,
    StructuralTag,
    Whitespace,
    after,
    response_format,
)
from paceline.constraints.python_types import Output
from paceline.constraints.python_types import output as output_of
from paceline.constraints.tool_grammar import read_tools, tool_grammar
from paceline.errors import ConstraintError
from paceline.strings import short
from paceline.text import ToolFormat

THINKING: Final = ("<think>", "</think>")  # a prompt may end with the first; the answer follows the second


@dataclass(frozen=True, slots=True)
class OutputSpec:
    """The form of an answer, as the parameters of a request give it. Without any, every text is allowed."""

    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: str | Mapping[str, Any] = "auto"
    parallel_tool_calls: bool = True
    response_format: Mapping[str, Any] | None = None
    output: Any = None  # a Python type, a pattern, a constraint
    whitespace: Whitespace = "fixed"
    output_param: str = "output"  # the caller's name for `output`, which errors give
    _tools: Mapping[str, Constraint] = field(init=False, repr=False, compare=False)  # arguments by tool
    _read: Output | None = field(init=False, repr=False, compare=False)  # `output`

    def __post_init__(self) -> None:
        if self.whitespace not in WHITESPACE:
            expected = f"expected one of {', '.join(WHITESPACE)}"
            raise ConstraintError(f"{short(self.whitespace)} is not usable: {expected}", "whitespace")
        object.__setattr__(self, "_tools", read_tools(self.tools, self.whitespace))
        object.__setattr__(self, "_read", None if self.output is None else self._output())

    @property
    def may_call(self) -> bool:
        """True if the answer may contain tool calls."""
        return bool(self.tools) and self.tool_choice != "none"

    def constraint(self, form: ToolFormat, prompt_end: str = "") -> Constraint | StructuralTag | None:
        """prompt_end: the end of the prompt's text. Reasoning that it opens is not constrained."""
        answer = self._answer()
        if not self.tools:
            if self.tool_choice not in ("auto", "none"):
                raise ConstraintError(
                    f"{short(self.tool_choice)} needs tools: give at least one", "tool_choice"
                )
            return _with_reasoning(answer, prompt_end)
        calls = tool_grammar(self._tools, self.tool_choice, form, self.parallel_tool_calls)
        if answer is None or self.tool_choice not in ("auto", "none"):
            return _with_reasoning(calls, prompt_end)
        if isinstance(calls, StructuralTag) and calls.then is not None:
            answer = Alternatives((calls.then, answer))
        return _with_reasoning(answer, prompt_end)

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


UNCONSTRAINED: Final = OutputSpec()


@dataclass(frozen=True, slots=True)
class Alternatives:
    """One of several constraints."""

    options: tuple[Constraint, ...]

    def rules(self, name: str, spell: Spell) -> str:
        names = [f"{name}_{i}" for i in range(len(self.options))]
        rules = [option.rules(n, spell) for option, n in zip(self.options, names, strict=True)]
        return "\n".join([f"{name}: {' | '.join(names)}", *rules])


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
