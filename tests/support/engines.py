"""An engine over a small target, run to the end."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from paceline.config import SamplingParams, SpecConfig
from paceline.drafters.grammar import Grammar
from paceline.drafters.none import NoDrafter
from paceline.engine.control import Fixed
from paceline.engine.engine import Engine
from paceline.target.eager.target import TorchTarget
from paceline.target.weights.model_config import Weights
from paceline.testing import ToyCursor
from paceline.types import Drafter, Round, Seq, Target
from support.models import CONFIG

PLAIN = SpecConfig(("none",), max_draft=0)
Rules = Callable[[tuple[int, ...]], set[int] | None]  # see ToyCursor


def torch_target(weights: Weights) -> TorchTarget:
    """The weights stay as they are: a target may change what it holds."""
    return TorchTarget(Weights(weights.shape, dict(weights.tensors), weights.fingerprint), CONFIG)


def outputs_of(
    target: Target,
    drafters: Sequence[Drafter],
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    spec: SpecConfig,
    rules: Rules | None = None,
) -> tuple[list[list[int]], list[Round]]:
    """The tokens after each prompt, prompt i with choice i, and all rounds. All run in one batch."""
    known: dict[str, Drafter] = {d.name: d for d in (NoDrafter(), Grammar(), *drafters)}
    engine, seqs = Engine(target, known, Fixed()), []
    for i, prompt in enumerate(prompts):
        cursor = ToyCursor(rules) if rules else None
        seqs.append(Seq(f"s{i}", list(prompt), len(prompt), replace(params, choice=i), spec, cursor=cursor))
        engine.submit(seqs[-1])
    rounds = []
    while engine.busy:
        rounds += engine.step()
    return [seq.output for seq in seqs], rounds


def accepted(rounds: Sequence[Round]) -> int:
    return sum(len(r.path) for r in rounds)
