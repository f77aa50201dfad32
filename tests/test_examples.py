"""The examples that load a model run, and what they compare is equal.

Those that ask a server are in tests/server/test_example_agents.py.
"""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.mark.model
@pytest.mark.parametrize("name", ["agent.py", "extract.py"])
def test_plain_and_speculative_are_identical(name: str, smollm2_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), str(smollm2_path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].endswith(": yes")
