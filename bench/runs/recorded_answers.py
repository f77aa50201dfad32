"""python -m bench.runs.recorded_answers serve ...: paceline's command line; answers are those of a recording.

A request with `structured_outputs: {"choice": [TEXT]}` and tools is answered with exactly that text, which
may hold calls in the model's own markup. Everything else is the server's: the model computes every token in
passes under a mask, drafts are verified, calls are parsed and predicted.
"""

from dataclasses import dataclass

from paceline.constraints import Answer, Choice, OutputSpec
from paceline.constraints.grammars import Constraint, Spell, StructuralTag
from paceline.text import ToolFormat


@dataclass(frozen=True, slots=True)
class Exactly:
    """One text, with the special tokens that it names."""

    text: str

    def rules(self, name: str, spell: Spell) -> str:
        return f"{name}: {spell(self.text)}"


_constraint = OutputSpec.constraint


def constraint(
    spec: OutputSpec, form: ToolFormat, prompt_end: str = "", shape: Answer = "text"
) -> Constraint | StructuralTag | None:
    if isinstance(spec.output, Choice) and len(spec.output.options) == 1:
        return Exactly(spec.output.options[0])
    return _constraint(spec, form, prompt_end, shape)


if __name__ == "__main__":
    from paceline.cli import main

    OutputSpec.constraint = constraint  # type: ignore[method-assign,assignment]
    main()
