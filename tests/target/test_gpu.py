"""The same promise on a GPU: rows do not depend on their company, and speculative text is plain text."""

import pytest
import torch

from paceline.config import EngineConfig, SamplingParams, SpecConfig
from paceline.drafters import model_free
from paceline.engine.control import Fixed
from paceline.engine.engine import Engine
from paceline.target.eager.target import TorchTarget
from paceline.types import Seq
from support.models import open_with, random_weights, rows_in_one_pass, rows_one_by_one, some_tokens

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU"),
]


@pytest.fixture(scope="module")
def target() -> TorchTarget:
    return TorchTarget(random_weights(), EngineConfig(device="cuda", cache_mb=64))


@pytest.mark.parametrize("context", [5, 255, 700, 1020, 2040])
def test_row_bits_do_not_depend_on_the_rows_around_them(target: TorchTarget, context: int) -> None:
    name, new = f"context of {context}", some_tokens(16, seed=1)
    open_with(target, name, some_tokens(context), tenant=name)
    alone = rows_one_by_one(target, name, context, new)
    for n in range(2, 17):
        assert torch.equal(rows_in_one_pass(target, name, context, new[:n]), alone[:n])


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("width", [1, 2])
def test_speculative_text_is_plain_text(target: TorchTarget, temperature: float, width: int) -> None:
    def text(spec: SpecConfig) -> list[int]:
        engine = Engine(target, model_free(), Fixed())
        params = SamplingParams(temperature=temperature, seed=5, max_tokens=64)
        seq = Seq("s", some_tokens(40) * 2, 80, params, spec, tenant=repr(spec))
        engine.submit(seq)
        while engine.busy:
            engine.step()
        return seq.output

    fast = SpecConfig(("suffix", "ngram"), adaptive=False, tree_width=width)
    assert text(fast) == text(SpecConfig((), max_draft=0))
