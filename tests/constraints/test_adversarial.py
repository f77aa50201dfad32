"""Constraints made to hold up or break an engine are refused with a reason, or can be followed, soon.

All are tried in one process of their own, whose memory is then theirs alone.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.constraints.grammars import MAX_BYTES
from support import SUPPORT
from support.hostile import CASES

pytestmark = pytest.mark.model

CPU_SECONDS, MEGABYTES = 10, 500  # that one may take
REFUSED = {  # what the reason must say
    "nested 10,000 deep": "nested too deeply",
    "anyOf under allOf, 2^14": "too large",
    "schema of 2 MB": f"at most {MAX_BYTES:,}",
    "reference to elsewhere": "$ref",
    "reference to a file": "$ref",
    "regex with look-ahead": "(?=a)[ab]+",
    "regex with back-reference": "(a|b)",
    "30,000 required properties": "grammar size",
    "9,000 optional properties": "grammar size",
    "false": "Unsatisfiable",
    "schema without end": "fixed text",
}
FOLLOWED = [
    "500 optional properties",
    "4,000 optional properties",
    "enum of 20,000",
    "maxLength 100,000",
    "maxItems 100,000",
    "regex (a+)+b",
    "regex (a|a)*b",
    "ambiguous grammar",
    "rules nested 200 deep",
    "mutual references",
    "schema of 900 kB",
]


@pytest.fixture(scope="module")
def found(smollm2_path: Path) -> dict[str, dict[str, Any]]:
    """By name, what came of each; one that is missing brought the process down."""
    script = SUPPORT / "hostile.py"
    done = subprocess.run(
        [sys.executable, "-P", str(script), str(smollm2_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return {line["name"]: line for line in lines}


@pytest.mark.parametrize("name", CASES)
def test_is_refused_or_followed_within_bounds(name: str, found: dict[str, dict[str, Any]]) -> None:
    case = found[name]
    assert case["crashed"] is None
    assert (case["refused"] is None) != (case["tokens"] is None)
    assert case["cpu_seconds"] < CPU_SECONDS
    assert case["megabytes"] < MEGABYTES


@pytest.mark.parametrize("name", CASES)
def test_a_reason_is_one_line(name: str, found: dict[str, dict[str, Any]]) -> None:
    reason = found[name]["refused"]
    assert reason is None or (reason.strip() and "\n" not in reason and len(reason) < 500)


@pytest.mark.parametrize("name", REFUSED)
def test_a_reason_names_the_cause(name: str, found: dict[str, dict[str, Any]]) -> None:
    assert REFUSED[name] in found[name]["refused"]


@pytest.mark.parametrize("name", FOLLOWED)
def test_is_followed(name: str, found: dict[str, dict[str, Any]]) -> None:
    assert found[name]["tokens"] > 0
