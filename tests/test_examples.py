"""The examples that load a model run, and what they compare is equal.

Those that ask a server are in tests/server/test_example_agents.py.
"""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parent.parent / "examples"


ANSWERS = {
    "agent.py": [
        "Order B-2047 is shipped.",
        "There are 40 lanterns in stock.",
        "12 at 32.25 cost 387.0.",
        "Order C-3311 is waiting for payment.",
    ],
    "extract.py": [],
    "tools.py": [
        "B-2047 is shipped.",
        "There are 40 lanterns in stock.",
        "C-3311 is waiting for payment.",
        "There is no order D-0001.",
    ],
    "own_drafter.py": ["tokens of the drafter's"],
}


@pytest.mark.model
@pytest.mark.parametrize("name", ANSWERS)
def test_plain_and_speculative_are_identical_and_answers_make_sense(name: str, smollm2_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), str(smollm2_path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].endswith(": yes")
    assert all(answer in done.stdout for answer in ANSWERS[name]) or torch.cuda.is_available()
