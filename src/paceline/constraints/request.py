"""From what a request says to the one constraint it means."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from paceline.constraints.grammars import Constraint, Spell, Switched, Whitespace, after, response_format
from paceline.constraints.outputs import output as output_of
from paceline.constraints.tools import tool_calls
from paceline.errors import ConstraintError
from paceline.text import ToolFormat

THINKING: Final = (
    "<think>",
    "</think>",
)  # a prompt may end with the first; the answer begins after the second


@dataclass(frozen=True, slots=True)
class Wanted:
    """What an answer must look like, as a request says it. Without any of it, anything goes."""

    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: str | Mapping[str, Any] = "auto"
    parallel_tool_calls: bool = True
    response_format: Mapping[str, Any] | None = None
    output: Any = None  # a Python type, a pattern, a constraint
    whitespace: Whitespace = "fixed"

    def constraint(self, form: ToolFormat, prompt: str = "") -> Constraint | Switched | None:
        """`prompt`: the end of the text to be continued. Reasoning that it opens is free."""
        answer = self._answer()
        if not self.tools:
            if self.tool_choice not in ("auto", "none"):
                raise ConstraintError(f"tool_choice={self.tool_choice!r} needs tools: give at least one")
            return _thought(answer, prompt)
        calls = tool_calls(self.tools, self.tool_choice, form, self.parallel_tool_calls, self.whitespace)
        if answer is None or self.tool_choice not in ("auto", "none"):
            return _thought(calls, prompt)
        if isinstance(calls, Switched) and calls.then is not None:
            answer = Either((calls.then, answer))
        return _thought(answer, prompt)

    def _answer(self) -> Constraint | None:
        if self.output is None:
            given = self.response_format
            return None if given is None else response_format(given, self.whitespace)
        if self.response_format is not None:
            raise ConstraintError("output and response_format say the same thing: give one of them")
        return output_of(self.output, self.whitespace).constraint

    def parser(self) -> Callable[[str], Any] | None:
        """From a complete answer's text to its value."""
        return None if self.output is None else output_of(self.output, self.whitespace).parse


ANYTHING: Final = Wanted()


@dataclass(frozen=True, slots=True)
class Either:
    """One constraint or another."""

    options: tuple[Constraint, ...]

    def rules(self, name: str, spell: Spell) -> str:
        names = [f"{name}_{i}" for i in range(len(self.options))]
        rules = [option.rules(n, spell) for option, n in zip(self.options, names, strict=True)]
        return "\n".join([f"{name}: {' | '.join(names)}", *rules])


def _thought(constraint: Constraint | Switched | None, prompt: str) -> Constraint | Switched | None:
    """Tool calls wait for their trigger in any case; everything else waits for the end of reasoning."""
    begun, ended = THINKING
    thinking = prompt.rfind(begun) > prompt.rfind(ended)
    if constraint is None or isinstance(constraint, Switched) or not thinking:
        return constraint
    return after(ended, constraint)
