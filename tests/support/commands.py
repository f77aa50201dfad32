"""Commands run in this process, and what they say."""

import pytest

from paceline.cli import main


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    out, err = capsys.readouterr()
    return int(end.value.code or 0), out, err


def fails(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line of a command that ends with exit code 2."""
    code, out, err = run(capsys, *arguments)
    assert code == 2
    assert out == ""
    assert len(err.strip().splitlines()) == 1, err
    assert err.startswith("paceline: ")
    return err
