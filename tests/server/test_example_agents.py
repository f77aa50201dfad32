"""The agents in examples/ finish against the real server, and what they call is valid."""

import json
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from support.servers import Running

pytestmark = pytest.mark.model

EXAMPLES = Path(__file__).parents[2] / "examples"
TIMEOUT_S = 300


def arguments(**types: str) -> dict[str, Any]:
    properties = {name: {"type": kind} for name, kind in types.items()}
    return {
        "type": "object",
        "properties": properties,
        "required": list(types),
        "additionalProperties": False,
    }


ITEM = arguments(item="string")
TOOLS = {
    "find_order": arguments(order_id="string"),
    "get_price": ITEM,
    "check_stock": ITEM,
    "total": arguments(quantity="integer", price="number"),
}


def run_example(name: str, server: Running, *options: str) -> str:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), f"{server.url}/v1", *options],
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def check_calls(printed: str) -> None:
    """There were some, and each fits its tool's schema."""
    calls = re.findall(r"^  (?:tool|call) +(\w+)\((.*)\)$", printed, re.M)
    assert calls
    assert f"{len(calls)} tool calls" in printed
    for name, given in calls:
        jsonschema.validate(json.loads(given), TOOLS[name])


def test_the_agent_of_the_openai_client(server: Running) -> None:
    printed = run_example("openai_agent.py", server)
    check_calls(printed)
    for step in ("planner", "verifier", "answer"):
        assert len(re.findall(rf"^  {step} +\S", printed, re.M)) >= 2, step  # for each question
    cached = [int(n) for n in re.findall(r"(\d+) of them cached", printed)]
    assert max(cached) > 100  # the second question shares its prompts with the first
    found = re.search(r"([\d.]+) tokens per pass", printed)
    assert found is not None
    assert float(found[1]) > 1.5


@pytest.mark.parametrize(
    ("name", "package"), [("pydantic_ai_agent.py", "pydantic_ai"), ("langchain_agent.py", "langchain_openai")]
)
def test_agents_of_frameworks(name: str, package: str, server: Running) -> None:
    if find_spec(package) is None:
        pytest.skip(f"{package} is not here: pip install 'paceline[examples]'")
    printed = run_example(name, server)
    check_calls(printed)
    assert len(re.findall(r"^  answer +\S", printed, re.M)) == 2


def test_prefetching_changes_the_waiting_and_nothing_else(server: Running) -> None:
    printed = run_example("agent_prefetch.py", server, "--tool-ms", "50")
    found = re.search(r"^(\d+) of 12 calls prefetched, (\d+) in vain$", printed, re.M)
    assert found is not None
    assert int(found[1]) >= 9
    assert int(found[2]) <= 3
    assert printed.endswith("same conversations: yes\n")
    assert re.search(r"answer  Order A-1497, a teapot, waits in Hanoi\.$", printed, re.M)
