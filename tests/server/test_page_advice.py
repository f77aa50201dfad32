"""What the page takes for a report of advice, and what it says of a fitted drafter: its module under node."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

import paceline.server.page
from paceline.advise.advice import MIN_CONVERSATIONS, TrainingGain
from support.advice import advised, an_advice, around

NODE = shutil.which("node")
VIEW = Path(paceline.server.page.__file__).parent / "views" / "advice.js"

pytestmark = pytest.mark.skipif(NODE is None, reason="needs node, which is not installed")


def evaluated(expression: str, given: Any) -> Any:
    script = (
        'import { readFileSync } from "node:fs";'
        f'import {{ isReport, fitted }} from "{VIEW.as_uri()}";'
        f"const given = JSON.parse(readFileSync(0)); console.log(JSON.stringify({expression}));"
    )
    command = [str(NODE), "--input-type=module", "-e", script]
    done = subprocess.run(
        command, input=json.dumps(given), capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_report_of_another_version_is_told_from_other_files() -> None:
    report = json.loads(json.dumps(an_advice(advised(), advised("chats")).as_dict()))
    assert evaluated("isReport(given)", report) is None
    others: list[Any] = [None, [], {"findings": []}, {"routes": []}]
    for other in others:
        assert "is no report of advise" in evaluated("isReport(given)", other)
    report["routes"][1]["candidates"][0]["turn_speedup"] = 1.4
    assert "make it anew with `paceline advise --json FILE`" in evaluated("isReport(given)", report)
    report["routes"][1] = {"route": "chats"}
    assert "another version" in evaluated("isReport(given)", report)


@pytest.mark.parametrize("conversations", [1, MIN_CONVERSATIONS])
def test_intervals_of_few_conversations_are_named_so(conversations: int) -> None:
    gain = TrainingGain(9, conversations, around(3.0), around(2.5), around(1.3))
    report = an_advice(advised(training=gain)).as_dict()
    said = evaluated("fitted(given.routes[0].training, given.min_conversations)", report)
    count = "1 other conversation" if conversations == 1 else f"{conversations} other conversations"
    assert said.startswith(f"1.30 × the best list, 1.26 to 1.34, on {count}")
    assert ("too few for intervals to mean much" in said) == (conversations == 1)
