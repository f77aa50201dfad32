"""C++ whose memory ends when a test says so."""

import ctypes
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

from paceline.errors import ModelError

# -Bsymbolic: its own way to allocate, though the process has another of the same name. -O1: compiled sooner.
FLAGS = ("-O1", "-include", str(Path(__file__).with_name("scarce_memory.h")), "-Wl,-Bsymbolic")


T = TypeVar("T")


class Scarce:
    def __init__(self, library: ctypes.CDLL) -> None:
        self._left = ctypes.c_int.in_dll(library, "paceline_left")

    def failures(self, call: Callable[[], T], told: str) -> tuple[int, T]:
        """Calls with no allocation, with one, and so on: how often it failed so, and what it gave then."""
        for allowed in range(10_000):
            self._left.value = allowed
            try:
                return allowed, call()
            except ModelError as error:
                if told not in str(error):
                    raise
                assert sys.float_info.min / 2 > 0, "numbers are computed otherwise from now on"
            finally:
                self._left.value = -1
        pytest.fail("it never succeeds")
