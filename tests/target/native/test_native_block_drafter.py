"""The block drafter on the C++ runner: the text is the target's own, and the drafts are the network's."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from paceline.config import SamplingParams, SpecConfig
from paceline.drafters.heads.block import BlockDrafter
from paceline.drafters.none import NoDrafter
from paceline.engine import accept, verify
from paceline.engine.control import Fixed
from paceline.engine.engine import Engine
from paceline.heads.runner import BlockRunner, TorchBlock
from paceline.types import ROOT, Draft, Drafter, Round, Seq, Verdict
from support.engines import PLAIN, accepted, outputs_of, torch_target
from support.native_targets import a_pool, a_target, a_trained_net, beside, its_words

pytestmark = pytest.mark.slow

LENGTH = 24


def drafter(runner: BlockRunner | None = None) -> BlockDrafter:
    net = a_trained_net()
    return BlockDrafter(runner or beside(net, a_pool()))


def run(
    spec: SpecConfig, params: SamplingParams, drafters: Sequence[Drafter] = (), batch: int = 1
) -> tuple[list[list[int]], list[Round]]:
    prompts = [its_words()[i][: 3 + 2 * i] for i in range(batch)]
    return outputs_of(torch_target(a_target()), drafters, prompts, params, spec)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("width", [1, 3])
def test_text_equals_plain_decoding(temperature: float, batch: int, width: int) -> None:
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=LENGTH)
    plain, _ = run(PLAIN, params, batch=batch)
    text, rounds = run(SpecConfig(("block",), tree_width=width, adaptive=False), params, [drafter()], batch)
    assert text == plain
    assert accepted(rounds) > batch


@pytest.mark.parametrize("more", [{}, {"top_p": 0.9}, {"logit_bias": ((7, 3.0),)}], ids=str)
def test_chains_that_the_runner_draws_are_those_of_the_long_way(more: dict[str, Any]) -> None:
    params = SamplingParams(temperature=0.9, seed=3, max_tokens=LENGTH, **more)
    spec, long = SpecConfig(("block",), adaptive=False), drafter()
    long.runner.samples = False
    one, other = (run(spec, params, [by], 3)[1] for by in (drafter(), long))
    assert [r.draft for r in one] == [r.draft for r in other]


@pytest.mark.parametrize("rule", ["residual", "block"])
def test_sampled_drafts_are_accepted_too(rule: str) -> None:
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=LENGTH)
    spec = SpecConfig(("block",), adaptive=False, accept=rule)  # type: ignore[arg-type]
    _, rounds = run(spec, params, [drafter()], 2)
    assert accepted(rounds) > 2


def accept_one_more(draft: Draft, choice: Callable[[int], int]) -> Verdict:
    """Wrong: keeps the first guess that was refused too."""
    verdict = accept.match(draft, choice)
    children = draft.children(verdict.path[-1] if verdict.path else ROOT)
    return Verdict((*verdict.path, children[0]), verdict.token) if children else verdict


def test_a_wrong_accept_rule_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(max_tokens=LENGTH)
    plain, _ = run(PLAIN, params)
    monkeypatch.setattr(verify, "match", accept_one_more)
    assert run(SpecConfig(("block",), adaptive=False), params, [drafter()])[0] != plain


def test_it_is_right_as_often_as_with_torch() -> None:
    params, spec = SamplingParams(max_tokens=LENGTH), SpecConfig(("block",), adaptive=False)
    native, torch = (
        accepted(run(spec, params, [drafter(runner)], 8)[1]) for runner in (None, TorchBlock(a_trained_net()))
    )
    assert torch > 20
    assert native == pytest.approx(torch, rel=0.1)


def test_a_prompt_of_one_token_gets_drafts_too(caplog: pytest.LogCaptureFixture) -> None:
    weights = a_target()
    texts = []
    for spec in (PLAIN, SpecConfig(("block",), adaptive=False)):
        engine = Engine(torch_target(weights), {"none": NoDrafter(), "block": drafter()}, Fixed())
        seqs = [Seq(str(n), its_words()[0][:n], n, SamplingParams(max_tokens=8), spec) for n in (1, 6)]
        for seq in seqs:
            engine.submit(seq)
        rounds = []
        while engine.busy:
            rounds += engine.step()
        texts.append([seq.output for seq in seqs])
    assert texts[0] == texts[1]
    assert len(next(r.draft for r in rounds if r.request == "1"))
    assert not caplog.records
