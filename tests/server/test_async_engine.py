"""The choices of a request: made from one prepared output, and all of them finished."""

import asyncio
from types import SimpleNamespace
from typing import Any

from paceline.config import SamplingParams
from paceline.constraints import UNCONSTRAINED
from paceline.output import RequestOutput
from paceline.server.async_engine import AsyncEngine, GenerateParams
from paceline.types import Draft, Round, Seq

N = 3


class NoText:
    def push(self, token: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


class CountingLLM:
    def __init__(self) -> None:
        self.prepared = 0

    def encode(self, *_: Any, **__: Any) -> Any:
        return SimpleNamespace(tokens=[1])

    def prepare(self, prompt: Any, params: SamplingParams, *_: Any, **__: Any) -> RequestOutput:
        self.prepared += 1
        return self._output(params)

    def another_choice(self, first: RequestOutput, choice: int) -> RequestOutput:
        return self._output(SamplingParams(choice=choice))

    def _output(self, params: SamplingParams) -> RequestOutput:
        return RequestOutput(Seq(f"r{params.choice}", [1], 1, params), NoText())


class EndsAtOnce:
    """Admits everything, and ends it before its first token."""

    def submit(self, seq: Seq, deliver: Any, answer: Any, slots: int) -> None:
        answer(None)
        deliver(an_end(seq.id))

    def cancel(self, seq_id: str) -> None: ...


def an_end(request: str) -> Round:
    return Round(request, 1, (), Draft((), None, ()), (), (), 0, 1, 1, 0, 0, finish="length")


def test_choices_whose_first_ends_without_a_token_all_end_and_are_prepared_once() -> None:
    llm, context = CountingLLM(), a_context()
    metrics = SimpleNamespace(set_route=lambda *_: None)
    engine = AsyncEngine(llm, EndsAtOnce(), metrics)  # type: ignore[arg-type]
    params = GenerateParams("x", SamplingParams(), UNCONSTRAINED, None, N, "")

    async def run() -> list[int]:
        prepared = await engine.prepare(context, params)
        assert prepared.first.seq.route == "default"  # by which the engine's controller learns
        return [output.index async for output, _ in engine.generate(context, prepared)]

    assert asyncio.run(asyncio.wait_for(run(), 60)) == list(range(N))
    assert llm.prepared == 1


def a_context() -> Any:
    return SimpleNamespace(
        tenant="",
        client="",
        anonymous=False,
        large=False,
        remember=True,
        priority=0,
        deadline=None,
        arrived=0.0,
        outputs=[],
        tool_prediction=None,
        route=SimpleNamespace(name="default"),
        check_prompt_length=lambda tokens: None,
    )
