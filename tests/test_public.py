"""Every public name loads, and is listed wherever it must be."""

import subprocess
import sys

import paceline


def test_every_public_name_loads() -> None:
    assert set(paceline.__all__) == set(paceline._HOME)
    for name in paceline.__all__:
        assert getattr(paceline, name).__name__ == name


def test_unknown_names_are_attribute_errors() -> None:
    assert not hasattr(paceline, "Nothing")


def test_names_that_load_late_are_listed() -> None:
    """In a new process, where none has been loaded."""
    code = "import sys, paceline; print(*dir(paceline)); sys.exit('torch' in sys.modules)"
    listed = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert {*paceline.__all__, "__version__"} <= set(listed.stdout.split())
