"""Records read from texts, once plain and once speculatively: the same tokens, fewer passes.

Every answer is a record: the model cannot write anything else. Whether it is right is up to the model.

    python examples/extract.py [MODEL]
"""

import json
import sys

from pydantic import BaseModel, Field
from rich.console import Console
from rich.table import Table

from paceline import LLM, Result, SpecConfig


class Order(BaseModel):
    order_id: str = Field(pattern="^[A-Z]-[0-9]{4}$")
    item: str = Field(min_length=3, max_length=24)
    quantity: int = Field(ge=1, le=999)
    urgent: bool


TEXTS = [
    "Order B-2047: 12 lanterns, and it is urgent.",
    "Order C-3311: 2 kettles, no hurry.",
    "Order D-0415: 150 spoons, and it is urgent.",
]

# Worked examples: a model of 135M parameters needs to see the form.
EXAMPLES = [
    (
        "Order A-1001: 3 teapots, no hurry.",
        Order(order_id="A-1001", item="teapots", quantity=3, urgent=False),
    ),
    (
        "Order F-8620: 40 plates, and it is urgent.",
        Order(order_id="F-8620", item="plates", quantity=40, urgent=True),
    ),
]


def prompt(text: str) -> str:
    shown = [f"Text: {said}\nJSON: {json.dumps(order.model_dump())}\n\n" for said, order in EXAMPLES]
    return f"{''.join(shown)}Text: {text}\nJSON:\n"


def run(llm: LLM, spec: SpecConfig, tenant: str) -> list[Result]:
    """The tenant keeps caches and indexes of the runs apart, so that neither has seen the other's text."""
    return [
        llm.generate(prompt(text), output=Order, spec=spec, tenant=tenant, max_tokens=96, seed=7)
        for text in TEXTS
    ]


def main(model: str) -> int:
    out = Console(highlight=False, soft_wrap=True)
    llm = LLM(model)
    llm.generate("warm up", max_tokens=4, tenant="warm-up", seed=0)
    plain = run(llm, SpecConfig(("none",), max_draft=0), "plain")
    fast = run(llm, SpecConfig(("grammar", "suffix", "ngram")), "speculative")
    same = [r.token_ids for r in plain] == [r.token_ids for r in fast]

    for text, result in zip(TEXTS, fast, strict=True):
        out.print(f"{text}\n  {result.value!r}", markup=False)
    table = Table("", "tokens", "target passes", "tokens per pass")
    for name, results in (("plain", plain), ("speculative", fast)):
        tokens, passes = sum(len(r.token_ids) for r in results), sum(r.passes for r in results)
        table.add_row(name, str(tokens), str(passes), f"{tokens / passes:.2f}")
    out.print(table)
    out.print(f"identical token ids: {'yes' if same else 'NO'}")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m"))
