"""The threads of native passes: what they read, and for how long."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support import TESTS
from support.native_targets import a_pool, wanted_path

MB = 256  # long to fetch, compared with the call that follows
# Handlers run last in, first out: this one is the last, as the interpreter is when it frees what it holds.
ENDS = f"""
import atexit, ctypes, sys
atexit.register(lambda: take_away())
sys.path[:0] = [{str(TESTS)!r}]
from pathlib import Path
from support.native_targets import SHAPES, a_net, a_text, beside
from support.native_targets import native_target, tiny_model
from paceline.target.native import block_head
from paceline.target.native.int8_weights import Int8Weights
from paceline.types import Feed, Seq

shape, room = SHAPES["odd"], block_head.bytes_for
block_head.bytes_for = lambda weights: room(weights) + ({MB} << 20)
Int8Weights.used = property(lambda self: len(self._data))
target = native_target(tiny_model(Path(sys.argv[1])), threads=2)
runner = beside(a_net(shape), target.pool)
weights = runner._held[0]
weights._data[weights._at :] = 1  # memory that is there

def take_away():
    target.open(Seq("a text", [1], 1))
    runner.fill([a_text(runner, shape, 3)], 5)
    target.forward([Feed("a text", [1])])  # after which the other thread would fetch
    assert not ctypes.CDLL(None).mprotect(ctypes.c_void_p(weights.start), ctypes.c_size_t({MB} << 20), 0)
    target.forward([Feed("a text", [2])])
    print("nobody read them", flush=True)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="mprotect and its 0 are the system's own")
def test_no_thread_reads_weights_while_the_interpreter_ends(tmp_path: Path) -> None:
    wanted_path()
    done = subprocess.run(
        [sys.executable, "-c", ENDS, str(tmp_path / "model.gguf")],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert (done.returncode, done.stdout) == (0, "nobody read them\n"), done.stderr


def test_nobody_waits_for_threads_that_a_forked_process_does_not_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool, here = a_pool(), os.getpid()
    monkeypatch.setattr(pool, "lib", None)
    with pytest.raises(AttributeError):
        pool.stop_prefetching()
    monkeypatch.setattr("os.getpid", lambda: here + 1)
    pool.stop_prefetching()
