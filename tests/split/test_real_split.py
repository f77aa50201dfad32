"""A real model: the edge's tokens are those of plain decoding, in fewer passes."""

import asyncio
from pathlib import Path

import pytest

from paceline import LLM, EngineConfig, SamplingParams, SpecConfig
from paceline.drafters.ngram import Ngram
from paceline.drafters.suffix import Suffix
from paceline.split.edge import Edge, EdgeSettings
from paceline.split.wire import MAX_OPEN_BYTES, Mode
from support.servers import running
from support.split_server import LONG_MS, mount_untimed

PROMPT = "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return a - b\n\ndef mul(a, b):\n"


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_text_of_smollm2_is_that_of_plain_decoding(smollm2_path: Path, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, seed=7, max_tokens=64)
    llm = LLM(str(smollm2_path), config=EngineConfig(cache_mb=64))
    plain = llm.generate(PROMPT, params, spec=SpecConfig(("none",), max_draft=0))
    body = {"prompt": PROMPT, "temperature": temperature, "seed": 7, "max_tokens": 64}
    only = {"speculative_config": {"drafters": ["mailbox"]}}
    with running(str(smollm2_path), extend=mount_untimed, max_message=MAX_OPEN_BYTES) as server:
        for mode in (Mode.OPPORTUNISTIC, Mode.PATIENT):
            edge = Edge(server.url, [Suffix(), Ngram()], EdgeSettings(mode, LONG_MS))
            result = asyncio.run(edge.generate({**body, **only}))
            assert (result.token_ids, result.text) == (plain.token_ids, plain.text)
            assert result.passes <= plain.passes
            assert mode is Mode.OPPORTUNISTIC or result.passes < plain.passes
