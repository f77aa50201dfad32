"""The planner's figures at a real server."""

import asyncio
import json

import pytest

from paceline.cli import main
from paceline.errors import PacelineError, UsageError
from paceline.split.measured_costs import Measured, measure
from support.split_server import SplitServer

BODY = {"prompt": "one two three one two", "max_tokens": 32, "temperature": 0}


def test_a_server_gives_the_figures_of_a_plan(split_server: SplitServer) -> None:
    found = asyncio.run(measure(split_server.url, BODY))
    assert found.tokens == 32
    assert found.rtt_ms > 0
    assert found.target_ms > 0
    assert found.verified > 0
    assert found.acceptance is not None
    assert 0 < found.acceptance <= 0.99  # a tiny model repeats itself
    costs = found.costs(acceptance=0.5, max_draft=4)
    assert (costs.acceptance, costs.max_draft, costs.rtt_ms) == (0.5, 4, found.rtt_ms)


def test_the_command_measures_what_is_not_given(
    split_server: SplitServer, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["split", "plan", split_server.url, "--rtt", "80", "--max-tokens", "16", "--json"])
    made = json.loads(capsys.readouterr().out)
    assert end.value.code == 0
    assert made["costs"]["rtt_ms"] == 80
    assert made["measured"]["rtt_ms"] != 80
    assert made["costs"]["target_ms"] == made["measured"]["target_ms"]
    assert {one["mode"] for one in made["modes"]} >= {"one-shot", "opportunistic", "patient"}
    with pytest.raises(SystemExit):
        main(["split", "plan", split_server.url, "--max-tokens", "16"])
    out = capsys.readouterr().out
    assert "95th percentile" in out
    assert "break-even" in out


def test_an_acceptance_that_could_not_be_measured_must_be_given() -> None:
    nothing = Measured(40.0, 20.0, 0.1, None, 31, 0)
    with pytest.raises(UsageError, match="--acceptance"):
        nothing.costs()
    assert nothing.costs(acceptance=0.5).acceptance == 0.5


def test_a_server_that_is_not_there_is_named() -> None:
    with pytest.raises(PacelineError, match="cannot be reached"):
        asyncio.run(measure("http://127.0.0.1:9", BODY))
