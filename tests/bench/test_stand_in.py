"""The stand-in for a GPU answers what it was told, however it is drafted."""

import pytest

from bench.stand_in import StandIn
from paceline import SamplingParams, SpecConfig
from paceline.drafters import model_free
from paceline.engine.control import Fixed, Rate
from paceline.engine.engine import Engine
from paceline.target.cost import CostTable
from paceline.types import Controller, Seq

PROMPT = [1, 2, 3, 4, 1, 2, 3]
ANSWER = [4, 1, 2, 9, 4, 1, 2, 3, 4, 1, 2, 9]


@pytest.mark.parametrize("controller", [Fixed(), Rate()])
@pytest.mark.parametrize("width", [1, 3])
def test_answers_are_replayed(controller: Controller, width: int) -> None:
    target = StandIn(10, CostTable({256: {1: 0.01, 8: 0.02}}))
    target.answers = {tuple(PROMPT): ANSWER}
    engine = Engine(target, model_free(), controller)
    params = SamplingParams(max_tokens=len(ANSWER))
    specs = SpecConfig(("none",), max_draft=0), SpecConfig(("suffix", "ngram"), 4, tree_width=width)
    seqs = [Seq(f"{i}", list(PROMPT), len(PROMPT), params, spec) for i, spec in enumerate(specs)]
    for seq in seqs:
        engine.submit(seq)
    drafted = passes = 0
    while engine.busy:
        drafted += sum(len(r.draft) for r in engine.step())
        passes += 1
    assert [seq.output for seq in seqs] == [ANSWER, ANSWER]
    assert target.busy_s >= passes * 1e-5
    assert drafted or isinstance(controller, Rate)
