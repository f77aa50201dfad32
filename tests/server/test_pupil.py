"""The process that learns: it stops when it is told, says what it does, and never outlives its server."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pupils import state
from running import until

from paceline.config import EngineConfig
from paceline.heads.traffic import LearnJob
from paceline.server.pupil import Pupil

SPEAKS = """
import sys, time
given = sys.stdin.read()
print('{"got": %d}' % len(given), flush=True)
sys.stdout.write('{"half":'); sys.stdout.flush(); time.sleep(0.3); print(' 1}\\nno JSON', flush=True)
time.sleep(100)
"""
WAIT_S = 60


def python(code: str) -> tuple[str, ...]:
    return sys.executable, "-c", code


@pytest.fixture
def pupil() -> Iterator[Pupil]:
    made = Pupil(b"a job", python(SPEAKS))
    yield made
    made.kill()


def test_it_hears_its_job_and_is_heard_line_by_line(pupil: Pupil) -> None:
    heard: list[dict[str, int]] = []

    def more() -> bool:
        heard.extend(pupil.told())
        return len(heard) >= 2

    assert until(more, WAIT_S)
    assert heard == [{"got": 5}, {"half": 1}]
    assert pupil.exit_code is None


def test_it_stops_and_goes_on(pupil: Pupil) -> None:
    assert os.getpriority(os.PRIO_PROCESS, pupil.pid) == 19
    for _ in range(2):
        pupil.pause()
        pupil.pause()
        assert until(lambda: state(pupil.pid) == "T", WAIT_S)
        pupil.go_on()
        assert until(lambda: state(pupil.pid) in ("S", "R"), WAIT_S)


def test_a_stopped_one_can_be_killed(pupil: Pupil) -> None:
    pupil.pause()
    pupil.kill()
    assert pupil.exit_code == -signal.SIGKILL
    pupil.pause()  # of one that is gone
    pupil.go_on()
    assert state(pupil.pid) == ""


STAYS = "import sys, time; from paceline.train import refresh; refresh.run = lambda *_: time.sleep(300)\n"
STAYS += "refresh.main(int(sys.argv[1]))"


@pytest.mark.parametrize("paused", [True, False])
def test_it_goes_when_its_server_is_killed(paused: bool) -> None:
    job = LearnJob("m", (), EngineConfig(), ())
    server = f"""
import os, signal, sys
sys.path.append({str(Path(__file__).parent)!r})
from paceline.server.pupil import Pupil
from pupils import state
pupil = Pupil({job.encode()!r}, (sys.executable, "-c", {STAYS!r}))
if {paused}: pupil.pause()
while {paused} and state(pupil.pid) != "T": pass
print(pupil.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run(python(server), capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == -signal.SIGKILL
    assert until(lambda: state(int(done.stdout)) == "", WAIT_S)
