"""paceline advise: its options. tests/advise has the rest."""

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.advise.advice import TrainingGain
from paceline.advise.report import Training
from paceline.cli import main
from paceline.cli.advise import (
    HELD_OUT,
    EffortOptions,
    TrafficOptions,
    _drafter_bytes,
    _fitted,
    _fitted_drafter,
)
from paceline.cli.options import EngineOptions
from paceline.train.data.held_out import is_held_out
from paceline.web.api_keys import tenant
from support.advice import advised, an_advice, around


def failure(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as end:
        main(["advise", "--target", "no-such-model", *arguments])
    out, err = capsys.readouterr()
    assert (end.value.code, out) == (2, "")
    return err


def test_traffic_comes_from_files_or_from_a_store(capsys: pytest.CaptureFixture[str]) -> None:
    assert "either --traces FILE, or --store URL" in failure(capsys)
    assert "either --traces" in failure(capsys, "--traces", "a.jsonl", "--store", "b.db")


def test_a_routes_file_that_is_unusable_is_found_before_any_time_is_spent(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    routes = tmp_path / "routes.yaml"
    routes.write_text("routes: [{nam: a}]")
    assert "nam" in failure(capsys, "--traces", str(tmp_path / "none.jsonl"), "--routes", str(routes))


def test_a_report_that_cannot_be_written_is_found_before_any_time_is_spent(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for option in ("--html", "--routes", "--json"):
        file = str(tmp_path / "none" / "report")
        assert "there is no folder" in failure(capsys, "--traces", "a.jsonl", option, file)
    assert "is a folder" in failure(capsys, "--traces", "a.jsonl", "--html", str(tmp_path))


@pytest.mark.parametrize(
    ("conversations", "sample"),
    [
        (6, "6 conversations that it was not fitted on"),
        (1, "1 conversation that it was not fitted on: too few for intervals to mean much"),
    ],
)
def test_a_route_says_what_training_would_bring(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, conversations: int, sample: str
) -> None:
    gain = TrainingGain(12, conversations, around(3.0), around(2.5), around(1.3))
    advice = an_advice(advised("agents", training=gain), advised("chats"))
    monkeypatch.setattr("paceline.cli.advise._advice", lambda *options: advice)
    with pytest.raises(SystemExit):
        main(["advise", "--target", "any", "--traces", "a.jsonl"])
    lines = capsys.readouterr().out.splitlines()
    (found,) = [number for number, line in enumerate(lines) if "fitted on part" in line]
    assert lines[found - 1].startswith("agents: ")
    assert lines[found] == (
        "  with a drafter fitted on part of it, decoding is 2.50 x plain and 1.30 x (1.26 to 1.34) the best "
        f"list, on 12 outputs of {sample}"
    )


@pytest.mark.parametrize(("measured", "reached"), [(12, "1.62 tokens per pass"), (0, "too little traffic")])
def test_a_fit_that_could_not_be_measured_has_no_figure(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, measured: int, reached: str
) -> None:
    fit = Training("block", 3.0, 40, measured, 1.62 if measured else 0.0, None)
    monkeypatch.setattr("paceline.cli.advise._advice", lambda *options: an_advice(advised(), training=fit))
    with pytest.raises(SystemExit):
        main(["advise", "--target", "any", "--traces", "a.jsonl"])
    assert f"A drafter fitted for 3 minutes: {reached}" in capsys.readouterr().out


@pytest.mark.parametrize("decision", ["speculate", "leave it off", "too little data"])
def test_a_server_is_named_only_for_routes_that_are_set(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, decision: Any
) -> None:
    advice, routes = an_advice(advised(decision=decision)), tmp_path / "routes.yaml"
    monkeypatch.setattr("paceline.cli.advise._advice", lambda *options: advice)
    with pytest.raises(SystemExit) as end:
        main(["advise", "--target", "any", "--traces", "a.jsonl", "--routes", str(routes)])
    assert end.value.code == 0
    last = capsys.readouterr().out.splitlines()[-1]
    empty = "routes: []" in routes.read_text()
    assert last.startswith("there is nothing to set" if empty else "paceline serve ")
    assert empty == (decision == "too little data")


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--minutes", "0", "--minutes=0.0 is not usable: expected more than 0"),
        ("--minutes", "nan", "--minutes=nan is not usable"),
        ("--fit-minutes", "-1", "--fit-minutes=-1.0 is not usable: expected 0 or more"),
        ("--fit-minutes", "nan", "--fit-minutes=nan is not usable"),
    ],
)
def test_times_that_are_unusable_are_named_as_given(
    capsys: pytest.CaptureFixture[str], option: str, value: str, message: str
) -> None:
    assert message in failure(capsys, "--traces", "none.jsonl", option, value)


def test_traffic_without_a_request_is_found_before_any_time_is_spent(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('not json\n{"messages": 3}\n')
    why = f"there is no request in {file} (not JSON: 1, `messages` is missing: 1)"
    assert why in failure(capsys, "--traces", str(file))
    file.write_text("")
    assert "(it is empty)" in failure(capsys, "--traces", str(file))
    assert f"{tmp_path} cannot be read: Is a directory" in failure(capsys, "--traces", str(tmp_path))


def test_missing_traffic_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "none.jsonl does not exist" in failure(capsys, "--traces", str(tmp_path / "none.jsonl"))


def test_a_fit_is_bounded_in_time_and_measured_on_other_conversations(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    jobs: list[Any] = []

    def run(job: Any, report: Any) -> SimpleNamespace:
        jobs.append(job)
        data = {"answers": 40, "measured_answers": 12, "before": {"tokens_per_pass": [1.2, 1.4]}}
        return SimpleNamespace(kind="block", data=data, tokens_per_pass=(1.3, 1.6))

    monkeypatch.setattr("paceline.train.head_pipeline.run", run)
    monkeypatch.setattr("paceline.cli.advise._fitting_heads", lambda target: [])
    traffic = TrafficOptions("smollm2-135m", traces=[tmp_path / "a.jsonl"])
    folder = tmp_path / "fit"
    assert _fitted(traffic, EffortOptions(), folder) is None
    fit = _fitted(traffic, EffortOptions(fit_minutes=2.5, requests=10), folder)
    assert fit is not None
    assert (fit.tokens_per_pass, fit.before, fit.answers, fit.measured_answers) == (1.6, 1.4, 40, 12)
    (job,) = jobs
    assert job.train.minutes == 2.5
    assert job.answers.max_prompts == 40
    assert job.answers.held_out > 0
    assert job.folder == folder


def test_the_fitted_drafter_is_removed_with_its_folder(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folders: list[Path] = []

    def advice(*options: Any) -> Any:
        folders.append(options[-1])
        (options[-1] / "weights").mkdir(parents=True)
        return an_advice(advised())

    monkeypatch.setattr("paceline.cli.advise._advice", advice)
    with pytest.raises(SystemExit) as end:
        main(["advise", "--target", "any", "--traces", "a.jsonl"])
    assert end.value.code == 0
    assert capsys.readouterr().out
    (folder,) = folders
    assert not folder.parent.exists()


def talk(opening: str) -> Mapping[str, Any]:
    words = (("user", opening), ("assistant", "yes"))
    return {"messages": [{"role": role, "content": text} for role, text in words]}


def test_a_fitted_drafter_comes_with_the_conversations_that_it_has_seen(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Requests of the traffic are told apart as in training; a system text alone is one of a group."""
    group = next(name for name in "abcdefgh" if not is_held_out(name, HELD_OUT))
    alone = {"messages": [{"role": role, "content": "Hi."} for role in ("system", "assistant")]}
    records = [*(talk(f"word {i}") for i in range(40)), alone | {"group": group}]
    file, made = tmp_path / "a.jsonl", object()
    file.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    monkeypatch.setattr("paceline.hub.resolve", lambda name: Path(name))
    monkeypatch.setattr("paceline.loading.find_heads", lambda name: [name])
    monkeypatch.setattr("paceline.loading.read_heads", lambda heads, model: heads)
    monkeypatch.setattr("paceline.loading.head_drafters", lambda target, heads, config: [(made, heads)])
    traffic, llm = TrafficOptions("any", traces=[file]), SimpleNamespace(target=None)
    fitted: Any = _fitted_drafter(llm, traffic, tmp_path / "fit", EngineOptions())  # type: ignore[arg-type]
    assert fitted.drafter == (made, [tmp_path / "fit"])
    unseen = {r.opening for r in traffic.read().requests if r.opening not in fitted.seen}
    kept_back = {f"word {i}" for i in range(40) if is_held_out(f"word {i}", HELD_OUT)}
    assert 5 < len(kept_back) < 25
    assert unseen == kept_back


@pytest.mark.parametrize("single_user", [False, True])
def test_recorded_requests_that_name_nobody_are_strangers_but_for_a_single_user(
    tmp_path: Path, single_user: bool
) -> None:
    """As in the server that the advice is for. Conversations of a file are one user's."""
    file = tmp_path / "a.jsonl"
    message = [{"role": "user", "content": "Hi."}]
    traced = [
        {"id": name, "messages": message, "output_ids": [1, 2], "tenant": tenant(None, name)}
        for name in (None, "me")
    ]
    file.write_text("".join(f"{json.dumps(one)}\n" for one in (*traced, talk("Hello."))))
    found = TrafficOptions("any", traces=[file], single_user=single_user).read()
    assert [one.anonymous for one in found.requests] == [not single_user, False, False]


def test_the_memory_of_drafters_includes_a_draft_model_and_its_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "a.safetensors").write_bytes(b"x" * 50)
    head = SimpleNamespace(kind="block", version=SimpleNamespace(folder=tmp_path))
    monkeypatch.setattr("paceline.loading.draft_model_path", Path)
    monkeypatch.setattr("paceline.loading.weight_bytes", lambda path: {Path("small"): 900}[path])
    llm: Any = SimpleNamespace(heads=[head])
    assert _drafter_bytes(llm, None, 64) == {"block": 50}
    with_model = {"block": 50, "model": 900, "model, its KV cache as set": 64 << 20}
    assert _drafter_bytes(llm, "small", 64) == with_model
