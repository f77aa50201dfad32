"""paceline trace as a user meets it."""

import json
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from paceline.cli import main
from paceline.trace.record import RequestRecord, RoundRecord
from paceline.trace.store import Store
from support.clients import fails

Capture = pytest.CaptureFixture[str]
NOW = 1_800_000_000.0


@pytest.fixture
def url(tmp_path: Path) -> str:
    path = str(tmp_path / "traces.db")
    with closing(Store.open(path)) as store:
        for i, model in enumerate(["small", "small", "large"]):
            record = RequestRecord(
                f"chatcmpl-{i}", NOW + 86400 * i, model, route=f"route{i}", output_tokens=30, passes=10,
                metadata={"run": f"r{i}"},
            )  # fmt: skip
            rounds = [
                RoundRecord(record.id, n, 7 + 3 * n, 8, 4, 2, 3, 1, 5, 31, 20_456, (("suffix", 4),))
                for n in range(10)
            ]
            store.save(record, rounds)
        store.save(RequestRecord("evil\x1b[31m[red]", NOW - 1, "m", output="\ud800\n\x1b]0;x\a"), ())
    return path


def run(capsys: Capture, *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    out, err = capsys.readouterr()
    return int(end.value.code or 0), out, err


def test_ls_lists_newest_first(capsys: Capture, url: str) -> None:
    code, out, _ = run(capsys, "trace", "ls", "--store", url)
    assert code == 0
    places = [out.index(id) for id in ("chatcmpl-2", "chatcmpl-1", "chatcmpl-0", "evil")]
    assert places == sorted(places)
    assert "3.00" in out


def test_ls_filters_and_pages(capsys: Capture, url: str) -> None:
    for options, expected in {
        ("--model", "small"): ["chatcmpl-1", "chatcmpl-0"],
        ("--route", "route2"): ["chatcmpl-2"],
        ("--limit", "1"): ["chatcmpl-2"],
        ("--before", "chatcmpl-1", "--limit", "1"): ["chatcmpl-0"],
        ("--finish", "error"): [],
    }.items():
        _, out, _ = run(capsys, "trace", "ls", "--store", url, "--json", *options)
        assert [request["id"] for request in json.loads(out)] == expected


def test_show_prints_the_rounds(capsys: Capture, url: str) -> None:
    code, out, _ = run(capsys, "trace", "show", "chatcmpl-1", "--store", url)
    assert 'metadata           {"run": "r1"}' in out
    assert code == 0
    assert out.count("suffix:4") == 10
    assert "20456 µs" in out
    _, out, _ = run(capsys, "trace", "show", "chatcmpl-2", "--store", url, "--json")
    assert len(json.loads(out)["rounds"]) == json.loads(out)["passes"] == 10


def test_nothing_stored_reaches_the_terminal_as_a_command(capsys: Capture, url: str) -> None:
    for command in (["ls"], ["show", "evil"]):
        code, out, _ = run(capsys, "trace", *command, "--store", url)
        assert code == 0
        assert r"\x1b[31m[red]" in out
        assert "\x1b" not in out


def test_export_writes_a_line_each(capsys: Capture, url: str, tmp_path: Path) -> None:
    _, out, _ = run(capsys, "trace", "export", "--store", url)
    lines = [json.loads(line) for line in out.splitlines()]
    assert [line["id"] for line in lines][:3] == ["chatcmpl-0", "chatcmpl-1", "chatcmpl-2"]
    assert lines[3]["output"] == "\ud800\n\x1b]0;x\a"
    file = tmp_path / "out.jsonl"
    code, out, _ = run(
        capsys, "trace", "export", "--store", url, "-o", str(file), "--since", "2027-01-16T12:00"
    )
    assert (code, out) == (0, "")
    assert [json.loads(line)["id"] for line in file.read_text().splitlines()] == ["chatcmpl-2"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["show", "nobody"], "there is no request 'nobody'"),
        (["show", "chatcmpl"], "more than one"),
        (["export", "--since", "soon"], "'soon' is no date"),
        (["export", "-o", "/nowhere/at/all"], "cannot be written"),
        (["ls", "--before", "nobody"], "no request 'nobody'"),
    ],
)
def test_mistakes_are_one_line(capsys: Capture, url: str, arguments: list[str], said: str) -> None:
    code, out, err = run(capsys, "trace", *arguments, "--store", url)
    assert (code, out) == (2, "")
    assert said in err
    assert len(err.splitlines()) == 1


def test_without_a_store_it_says_so_and_makes_none(
    capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "home"))
    code, _, err = run(capsys, "trace", "ls")
    assert code == 2
    assert "there is no trace store at" in err
    assert not (tmp_path / "home").exists()


@pytest.mark.slow
def test_needs_no_torch(url: str) -> None:
    code = f"""
import sys
from paceline.cli import main
try:
    main(["trace", "ls", "--store", {url!r}])
except SystemExit as end:
    assert not end.code
sys.exit("torch" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False, capture_output=True).returncode == 0


def test_an_end_that_no_request_has_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    message = fails(capsys, "trace", "ls", "--finish", "foo")
    assert "expected one of stop, tool_calls, length, cancelled, error, refused" in message
