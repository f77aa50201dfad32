"""A model's code in a child process."""

import pytest

from paceline.gate.code_sandbox import passes_tests, run_code


def test_right_code_passes_its_tests_and_wrong_code_does_not() -> None:
    tests = "def check(f):\n    assert f(3) == 9"
    assert passes_tests("def square(x): return x * x", tests, "square")
    assert not passes_tests("def square(x): return x", tests, "square")


@pytest.mark.parametrize(
    "program",
    [
        "raise SystemExit(0)",
        "import os; os._exit(0)",
        "x = bytearray(2 << 30)",
        "import socket; socket.socket()",
        "import os; os.system('true')",
        "import subprocess; subprocess.run(['true'])",
        "import os; os.fork()",
        "import ctypes; ctypes.CDLL(None)",
        "open('file', 'w')",
        "import os; os.open('file', os.O_CREAT | os.O_WRONLY)",
        "import os, sys; os.kill(os.getppid(), 0)",
        "while True: print('x' * 1000)",
        "import numpy",
    ],
)
def test_code_that_leaves_its_bounds_fails(program: str) -> None:
    assert not run_code(program)


def test_endless_code_ends() -> None:
    assert not run_code("while True: pass", timeout_s=0.5)


def test_the_environment_is_not_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "value")
    assert run_code("import os; assert 'SECRET' not in os.environ")
