"""The training process: it pauses at a signal, reports line by line, and never outlives its server."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.config import EngineConfig
from paceline.server.online.process import TrainerProcess
from paceline.trace.online import RefreshJob
from support import TESTS
from support.processes import state
from support.servers import until

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
def process() -> Iterator[TrainerProcess]:
    made = TrainerProcess(b"a job", python(SPEAKS))
    yield made
    made.kill()


def test_it_hears_its_job_and_is_heard_line_by_line(process: TrainerProcess) -> None:
    heard: list[dict[str, int]] = []

    def more() -> bool:
        heard.extend(process.messages())
        return len(heard) >= 2

    assert until(more, WAIT_S)
    assert heard == [{"got": 5}, {"half": 1}]
    assert process.exit_code is None


def test_it_stops_and_goes_on(process: TrainerProcess) -> None:
    assert os.getpriority(os.PRIO_PROCESS, process.pid) == 19
    for _ in range(2):
        process.pause()
        process.pause()
        assert until(lambda: state(process.pid) == "T", WAIT_S)
        process.resume()
        assert until(lambda: state(process.pid) in ("S", "R"), WAIT_S)


def test_a_stopped_one_can_be_killed(process: TrainerProcess) -> None:
    process.pause()
    process.kill()
    assert process.exit_code == -signal.SIGKILL
    process.pause()  # of one that is gone
    process.resume()
    assert state(process.pid) == ""


def test_the_kernel_takes_it_before_the_server() -> None:
    own = Path("/proc/self/oom_score_adj")
    if not own.exists():
        pytest.skip("this system has no such score")
    made = TrainerProcess(b"", python(SPEAKS))
    try:
        assert int(Path(f"/proc/{made.pid}/oom_score_adj").read_text()) >= max(500, int(own.read_text()))
    finally:
        made.kill()


def test_it_sees_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    made = TrainerProcess(
        b"", python("import os; print('{\"sees\": \"%s\"}' % os.environ['CUDA_VISIBLE_DEVICES'])")
    )
    try:
        assert until(lambda: made.exit_code == 0, WAIT_S)
        assert made.messages() == [{"sees": ""}]
    finally:
        made.kill()


STAYS = """
import sys, time, types
from paceline.train.online import process_main
def stay():
    print("{}", flush=True)
    time.sleep(300)
sys.modules["paceline.train.online.refresh"] = types.SimpleNamespace(main=stay)
process_main.main(int(sys.argv[1]))
"""
TRAINS = """
import sys, time
from paceline.train.online import process_main, refresh
def run(*_):
    print("{}", flush=True)
    time.sleep(300)
refresh.run = run
process_main.main(int(sys.argv[1]))
"""
SERVES = """
import os, signal, sys, time
sys.path.append({tests!r})
from paceline.server.online.process import TrainerProcess
from support.processes import state
process = TrainerProcess({job!r}, (sys.executable, "-c", {stays!r}))
while not process.messages(): time.sleep(0.01)
if {paused}: process.pause()
while {paused} and state(process.pid) != "T": time.sleep(0.01)
print(process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
TAKES_IN = """
import ctypes, subprocess, sys
ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER: orphans of its children are its own
subprocess.run([sys.executable, "-c", {serves!r}], check=False)
print("its server is gone", flush=True)
sys.stdin.read()
"""


def serves(paused: bool, stays: str = STAYS) -> str:
    job = RefreshJob("m", (), EngineConfig(), ()).encode()
    return SERVES.format(tests=str(TESTS), job=job, stays=stays, paused=paused)


@pytest.mark.parametrize(
    ("paused", "stays"),
    [
        pytest.param(True, STAYS, id="True", marks=pytest.mark.slow),
        pytest.param(False, STAYS, id="False", marks=pytest.mark.slow),
        pytest.param(True, TRAINS, id="True, with all it imports", marks=pytest.mark.slow),
        pytest.param(False, TRAINS, id="False, with all it imports", marks=pytest.mark.slow),
    ],
)
def test_it_goes_when_its_server_is_killed(paused: bool, stays: str) -> None:
    command = python(serves(paused, stays))
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == -signal.SIGKILL
    assert until(lambda: state(int(done.stdout)) == "", WAIT_S)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only there somebody else may take in orphans")
@pytest.mark.parametrize("paused", [True, False])
def test_it_goes_though_somebody_takes_in_orphans(paused: bool) -> None:
    """As in a container with an init of its own: then the system does not end those that are stopped."""
    command = python(TAKES_IN.format(serves=serves(paused)))
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as outer:
        assert outer.stdout is not None
        pid = int(outer.stdout.readline())
        try:
            assert outer.stdout.readline() == "its server is gone\n"
            assert until(lambda: state(pid) == "", WAIT_S)
        finally:
            if state(pid):
                os.kill(pid, signal.SIGKILL)
