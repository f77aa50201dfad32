"""A drafter of one's own: text that repeats itself with a period is expected to go on with it.

    python examples/own_drafter.py [MODEL]                                        plain against speculative
    cd examples && paceline serve smollm2-135m --drafters own_drafter:Period,suffix

A request then names it `period`. Whatever it drafts, the text is the model's.
"""

import sys
from collections.abc import Sequence

from paceline import LLM, Draft, Drafter, SpecConfig
from paceline.types import Ask


class Period(Drafter):
    """Looks for the shortest period that the last tokens have, and continues it."""

    name = "period"

    def __init__(self, longest: int = 64) -> None:
        self._longest = longest  # tokens of a period

    def draft(self, asks: Sequence[Ask]) -> list[Draft]:
        return [Draft(tuple(self._continued([*ask.seq.tokens, *ask.after], ask.budget))) for ask in asks]

    def _continued(self, tokens: Sequence[int], budget: int) -> list[int]:
        """The next tokens; none where the last ones are not a period twice in a row."""
        for period in range(1, min(self._longest, len(tokens) // 2) + 1):
            if tokens[-period:] == tokens[-2 * period : -period]:
                return [tokens[i % period - period] for i in range(budget)]
        return []


def main(model: str = "smollm2-135m") -> None:
    llm = LLM(model, drafters=[Period()])
    prompt = "Mon Tue Wed Thu Fri Sat Sun Mon Tue Wed Thu Fri Sat Sun Mon Tue"
    plain = llm.generate(prompt, spec=SpecConfig(()), max_tokens=48, temperature=0)
    fast = llm.generate(prompt, spec=SpecConfig(("period",)), max_tokens=48, temperature=0)
    print(fast.text)
    print(
        f"{fast.passes} passes instead of {plain.passes}, {fast.accepted['period']} tokens of the drafter's"
    )
    print(f"identical: {'yes' if fast.token_ids == plain.token_ids else 'no'}")


if __name__ == "__main__":
    main(*sys.argv[1:2])
