"""The offline gate against real HTTP servers: scripted ones, and a toy model with sabotaged candidates."""

import asyncio
import json
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from typer.testing import CliRunner

from bench.gate.sabotage import sabotaged
from paceline.cli.main import app
from paceline.errors import PacelineError, UsageError
from paceline.gate import replay as replay_module
from paceline.gate.cases import Case
from paceline.gate.divergence import first_divergence
from paceline.gate.judge import Judge
from paceline.gate.pair import Divergence, Leg, Pair
from paceline.gate.policy import Policy
from paceline.gate.replay import GateRun, Replay, run_gate
from paceline.gate.upstream import Upstream, http_session, read_metrics, run_leg
from paceline.gate.upstream_metrics import UpstreamCounters, with_counters
from support.scripted_model import last_words, scripted
from support.servers import IDLE_S, Running, toy_running

FAST_S = 0.001  # between chunks: with none, all of them come at once, and there is no TPOT
ANY_SPEED: dict[str, Any] = dict.fromkeys(
    (name for name in Policy.model_fields if name.startswith("max_") and name.endswith("_ratio")), 100
)
QUICK = Policy(rate_margin=0.15, schema_margin=0.15, max_ttft_ratio=100)  # proofs within 30 to 60 pairs


def cases(count: int, text: str = "one two three four", **request: Any) -> Iterator[Case]:
    for i in range(count):
        body = {
            "messages": [{"role": "user", "content": f"{i} {text}"}],
            "temperature": 0,
            "seed": i,
            **request,
        }
        yield Case(id=f"c{i}", request=body, conversation=f"c{i}")


def gate(baseline: str, candidate: str, given: Iterator[Case], **settings: Any) -> GateRun:
    replay = Replay(
        baseline=Upstream(name="baseline", url=baseline),
        candidate=Upstream(name="candidate", url=candidate, extra_body=settings.pop("extra_body", {})),
        **{"policy": QUICK, "warmup": 1, **settings},
    )
    return asyncio.run(run_gate(replay, given))


def failed(run: GateRun) -> set[str]:
    return {f.check for f in run.verdict.findings if f.status == "fail"}


def test_a_first_divergence_is_explained_by_the_baselines_log_probabilities() -> None:
    """The baseline writes its answer again; its lead at the other word says whether it was a tie."""

    def other(request: dict[str, Any]) -> str:
        return "one four" if "c" in last_words(request) else "one two"

    def token(text: str, lead: float) -> dict[str, Any]:
        top = [{"token": text, "logprob": -0.5}, {"token": " four", "logprob": -0.5 - lead}]
        return {"token": text, "logprob": -0.5, "top_logprobs": top}

    for lead, check in ((0.01, set()), (2.0, {"text_agreement"})):
        written = [token("one", 5.0), token(" two", lead)]
        with (
            scripted(lambda request: "one two", logprobs=written) as (baseline, _),
            scripted(other) as (candidate, _),
        ):
            done = gate(baseline, candidate, cases(11, "c"), stop_early=False)
        found = done.pairs[0].divergence
        assert found is not None
        assert found.token == 1
        assert found.margin == pytest.approx(lead)
        assert failed(done) & {"text_agreement"} == check


def test_the_lead_is_over_the_alternative_that_the_other_text_goes_on_with() -> None:
    def entry(text: str, logprob: float) -> dict[str, Any]:
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

    tokens = [
        {**entry("a", -0.1), "top_logprobs": [entry("a", -0.1)]},
        {**entry("bc", -0.2), "top_logprobs": [entry("bc", -0.2), entry("b", -1.0), entry("bd", -2.2)]},
    ]
    for text, character in (("abd!", 2), ("axy", 1)):  # x is less probable than all that are listed
        found = first_divergence(tokens, text)
        assert found is not None
        assert (found.character, found.token) == (character, 1)
        assert found.margin == pytest.approx(2.0)
    assert first_divergence(tokens, "a") == Divergence(1, 1, None)  # it ends where the other goes on
    assert first_divergence(tokens, "abc") is None


def grade(request: dict[str, Any]) -> str:
    """A judge that likes the word good."""
    return json.dumps({"score": 10 if "good" in json.loads(last_words(request))["answer"] else 0})


def test_a_judge_model_scores_both_legs_without_their_names() -> None:
    with (
        scripted(lambda request: "good answer") as (baseline, _),
        scripted(lambda request: "bad answer") as (candidate, _),
        scripted(grade) as (url, judge),
    ):
        chosen = Judge(Upstream(name="judge", url=url, model="large", api_key="k"))
        done = gate(baseline, candidate, cases(31), judge=chosen, policy=Policy(lossless=False, **ANY_SPEED))
    assert done.verdict.decision == "roll back"
    assert failed(done) == {"judge"}
    first = judge.requests[0]
    assert (first["temperature"], first["model"], first["response_format"]["type"]) == (
        0,
        "large",
        "json_schema",
    )
    assert first["max_tokens"] <= 32
    assert not any(name in json.dumps(judge.requests) for name in ("baseline", "candidate"))


def test_equal_answers_are_judged_once_and_a_judge_that_fails_gives_no_score() -> None:
    with scripted(last_words) as (url, _), scripted(grade) as (grading, judge):
        done = gate(url, url, cases(4), judge=Judge(Upstream(name="judge", url=grading)))
        assert len(judge.requests) == 4
        broken = gate(url, url, cases(2), judge=Judge(Upstream(name="judge", url=url)))  # no JSON
        away = gate(url, url, cases(2), judge=Judge(Upstream(name="judge", url="http://127.0.0.1:9")))
    assert all(leg.scores["judge"] == 0 for pair in done.pairs for leg in pair.legs())
    assert not any(
        "judge" in leg.scores for run in (broken, away) for pair in run.pairs for leg in pair.legs()
    )


@pytest.mark.slow
def test_a_biased_sampler_is_caught_though_each_answer_is_fine() -> None:
    words = ("red", "green", "blue")

    def sampler(weights: tuple[int, ...], salt: str) -> Any:
        def answer(request: dict[str, Any]) -> str:
            rng = Random(f"{salt} {last_words(request)} {request.get('seed')}")
            return " ".join(rng.choices(words, weights, k=8))

        return answer

    given = {"policy": Policy(max_ttft_ratio=100), "stop_early": False}
    with (
        scripted(sampler((1, 1, 1), "a")) as (baseline, _),
        scripted(sampler((1, 1, 1), "b")) as (equal, _),
        scripted(sampler((1, 1, 4), "b")) as (biased, _),
    ):
        fair = gate(baseline, equal, cases(101, temperature=1.0), **given)
        unfair = gate(baseline, biased, cases(101, temperature=1.0), **given)
    assert "distribution" not in failed(fair)
    assert "distribution" in failed(unfair)
    assert unfair.verdict.decision == "roll back"


def test_an_upstream_that_is_not_there_is_named() -> None:
    with scripted(last_words) as (url, _), pytest.raises(UsageError, match="the candidate cannot be used"):
        gate(url, "http://127.0.0.1:9", cases(1))


def test_errors_of_the_candidate_are_findings() -> None:
    def breaks(request: dict[str, Any]) -> str:
        raise RuntimeError

    with scripted(last_words) as (url, _), scripted(breaks) as (broken, _):
        done = gate(url, broken, cases(31))
    assert done.verdict.decision == "roll back"
    assert "errors" in failed(done)
    assert done.pairs[0].candidate.error == "http_500"


def timed(monkeypatch: pytest.MonkeyPatch, **chunk_s: float) -> None:
    """Legs whose clock says that each chunk took about so long, by the name of their upstream."""
    random = Random(0)

    async def run(session: Any, upstream: Upstream, *given: Any, **more: Any) -> Leg:
        now = 0.0

        def clock() -> float:
            nonlocal now
            now += chunk_s[upstream.name] * random.uniform(0.9, 1.1)
            return now

        return await run_leg(session, upstream, *given, **more, clock=clock)

    monkeypatch.setattr(replay_module, "run_leg", run)


@pytest.mark.parametrize(
    ("baseline_s", "candidate_s", "code", "decision"),
    [
        pytest.param(0.001, 0.012, 4, "roll back", marks=pytest.mark.slow),
        pytest.param(0.012, 0.001, 0, "promote", marks=pytest.mark.slow),
        (0.001, 0.012, 3, "hold"),
    ],
)
def test_the_command_exits_with_its_verdict_and_writes_reports(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    baseline_s: float,
    candidate_s: float,
    code: int,
    decision: str,
) -> None:
    count = 5 if decision == "hold" else 80
    timed(monkeypatch, baseline=baseline_s, candidate=candidate_s)
    traces = traces_file(tmp_path, count)
    policy = tmp_path / "policy.yaml"
    policy.write_text("rate_margin: 0.15\nmax_ttft_ratio: 100.0\n")
    files = [tmp_path / name for name in ("r.json", "r.html", "pairs.jsonl")]
    with (
        scripted(last_words, delay_s=FAST_S) as (baseline, _),
        scripted(last_words, delay_s=FAST_S) as (candidate, _),
    ):
        arguments = ["gate", "run", "--baseline", baseline, "--candidate", candidate, "--traces", str(traces)]
        arguments += ["--policy", str(policy), "--json", str(files[0]), "--html", str(files[1])]
        result = CliRunner().invoke(app, [*arguments, "--pairs", str(files[2])])
    assert result.exit_code == code, result.output
    report = json.loads(files[0].read_text())
    assert report["verdict"] == decision
    pairs = [Pair.from_json(line) for line in files[2].read_text().splitlines()]
    assert report["pairs"] == len(pairs)
    assert len(pairs) < count - 2 or decision == "hold"  # it ends as soon as the verdict is clear
    assert {pair.order for pair in pairs} == {"baseline_first", "candidate_first"}
    assert all(leg.completion_tokens == 5 for pair in pairs for leg in pair.legs())
    assert {"check", "interval", "margin", "status", "missing_pairs"} <= set(report["findings"][0])
    page = files[1].read_text()
    assert "<script" not in page
    assert "http" not in page.replace(baseline, "").replace(candidate, "")
    assert "a <b> c" not in files[2].read_text()  # no texts unless they are wanted


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        ([], "either --traces or --suite"),
        (["--traces", "x.jsonl", "--baseline-body", "[]"], "a JSON object"),
        (["--suite", "bfl"], "bfcl"),
        (["--traces", "x.jsonl", "--html", "no-such-folder/r.html"], "no folder no-such-folder"),
    ],
)
def test_a_wrong_option_is_explained(arguments: list[str], fault: str) -> None:
    url = "http://127.0.0.1:9"
    result = CliRunner().invoke(app, ["gate", "run", "--baseline", url, "--candidate", url, *arguments])
    assert fault in str(result.exception)


@pytest.mark.parametrize("content", [None, "{", '{"a": 1}'])
def test_traces_that_cannot_be_used_are_found_before_any_progress(
    tmp_path: Path, content: str | None
) -> None:
    traces, url = tmp_path / "traces.jsonl", "http://127.0.0.1:9"
    if content is not None:
        traces.write_text(content)
    arguments = ["gate", "run", "--baseline", url, "--candidate", url, "--traces", str(traces)]
    result = CliRunner().invoke(app, arguments)
    assert isinstance(result.exception, PacelineError)
    assert result.output == ""


def traces_file(folder: Path, count: int) -> Path:
    file = folder / "traces.jsonl"
    lines = [{"messages": [{"role": "user", "content": f"{i} a <b> c d"}]} for i in range(count)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def test_a_file_without_requests_is_a_mistake_and_no_verdict(tmp_path: Path) -> None:
    traces = traces_file(tmp_path, 2)  # both only warm up
    with scripted(last_words) as (url, _):
        arguments = ["gate", "run", "--baseline", url, "--candidate", url, "--traces", str(traces)]
        result = CliRunner().invoke(app, arguments)
    assert isinstance(result.exception, UsageError)
    assert "no request to compare" in str(result.exception)


def test_ctrl_c_keeps_the_pairs_so_far(tmp_path: Path) -> None:
    """The report names the bodies, too: one server with two of them is an experiment."""
    traces, pairs, page = traces_file(tmp_path, 9), tmp_path / "pairs.jsonl", tmp_path / "r.html"
    requests = 0

    def answer(request: dict[str, Any]) -> str:
        nonlocal requests
        requests += 1
        if requests == 10:  # of the fifth pair, the third that counts
            signal.raise_signal(signal.SIGINT)
        return last_words(request)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # as where a command is started
    try:
        with scripted(answer) as (url, _):
            arguments = ["gate", "run", "--baseline", url, "--candidate", url, "--traces", str(traces)]
            arguments += ["--candidate-body", '{"top_k": 7}', "--pairs", str(pairs), "--html", str(page)]
            result = CliRunner().invoke(app, arguments)
    finally:
        signal.signal(signal.SIGINT, before)
    assert result.exit_code == 130, result.output
    assert len(pairs.read_text().splitlines()) in (2, 3)
    assert "end_to_end_gain" in result.output  # no name is cut on 80 columns
    assert "top_k" in page.read_text()


def test_a_run_that_was_cut_goes_on_with_its_pairs(tmp_path: Path) -> None:
    """What warmed up before warms up again, so that no request is lost or counted twice."""
    traces, pairs = traces_file(tmp_path, 9), tmp_path / "pairs.jsonl"
    with scripted(last_words) as (url, model):
        arguments = ["gate", "run", "--baseline", url, "--candidate", url, "--traces", str(traces)]
        arguments += ["--pairs", str(pairs)]
        CliRunner().invoke(app, [*arguments, "--max-pairs", "3"])
        first, asked = pairs.read_text().splitlines(), len(model.requests)
        result = CliRunner().invoke(app, [*arguments, "--resume", str(pairs)])
        second = pairs.read_text().splitlines()
    assert (result.exit_code, len(first), len(second)) == (3, 3, 7)
    assert second[:3] == first
    assert len({Pair.from_json(line).id for line in second}) == 7
    assert len(model.requests) - asked == 2 * (2 + 4)  # of both legs
    assert "hold after 7 pairs" in result.output


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with toy_running(tmp_path_factory.mktemp("toy")) as server:
        yield server


SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}
ALWAYS = {"speculative_config": {"adaptive": False}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}


@pytest.mark.slow
def test_speculation_changes_no_text_and_reports_its_acceptance(toy: Running) -> None:
    """Plain and speculative decoding of one server, as two upstreams with caches of their own."""
    replay = Replay(
        baseline=Upstream(
            name="baseline",
            url=toy.url,
            extra_body={"speculative_config": {"disabled": True}, "cache_salt": "a", "remember": False},
        ),
        candidate=Upstream(name="candidate", url=toy.url, extra_body={**ALWAYS, "cache_salt": "b"}),
        policy=QUICK,
    )
    for temperature in (0, 1.0):
        run = asyncio.run(run_gate(replay, cases(14, max_tokens=24, temperature=temperature)))
        assert all(pair.same for pair in run.pairs)
        assert all(pair.baseline.passes for pair in run.pairs)
        assert any(pair.candidate.draft_tokens for pair in run.pairs)
        assert not any(pair.baseline.draft_tokens for pair in run.pairs)


def test_counters_tell_what_a_response_does_not(toy: Running) -> None:
    """Passes, drafts and their acceptance, by the growth of the server's counters: as the response says."""
    fields = ("passes", "draft_tokens", "accepted_tokens")

    async def legs() -> list[tuple[Leg, UpstreamCounters]]:
        made = []
        async with http_session() as session:
            told = Upstream(name="a", url=toy.url, extra_body={**ALWAYS, "metrics": True}, counts_chunks=True)
            for case in cases(4, max_tokens=24):
                before = await read_metrics(session, told)
                assert before is not None
                leg = await run_leg(session, told, case.endpoint, case.request)
                growth = UpstreamCounters()
                while growth.generated_tokens < (leg.completion_tokens or 0):
                    after = await read_metrics(session, told)
                    assert after is not None
                    growth = after - before
                made.append((leg, growth))
        return made

    found = asyncio.run(asyncio.wait_for(legs(), IDLE_S))
    for leg, growth in found:
        silent = replace(leg, passes=None, draft_tokens=None, accepted_tokens=None, acceptance_histogram=())
        counted = with_counters(silent, growth)
        assert [getattr(counted, n) or 0 for n in fields] == [getattr(leg, n) or 0 for n in fields]
        assert sum(counted.accepted_by_position) == (leg.accepted_tokens or 0)
        assert 0 < sum(leg.chunk_tokens) <= (leg.completion_tokens or 0)
        assert counted.gpu_s is not None
        assert 0 < counted.gpu_s < leg.seconds
    assert any(leg.accepted_tokens for leg, _ in found)


def test_a_replay_reads_the_counters_around_each_request(
    toy: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay_module, "COUNTED_S", 5.0)
    silent = {"metrics": False}
    arms = [Upstream(name=arm, url=toy.url, extra_body=silent) for arm in ("baseline", "candidate")]
    replay = Replay(baseline=arms[0], candidate=arms[1], warmup=0)
    run = asyncio.run(run_gate(replay, cases(3, max_tokens=24)))
    found = {finding.check: finding for finding in run.verdict.findings}
    assert found["cost_gpu"].pairs == found["cost_passes"].pairs == len(run.pairs) == 3
    assert 0 < found["cost_gpu"].details["utilization"] <= 1
    assert found["acceptance"].details["by_position"]


def test_counters_of_a_server_with_other_requests_are_not_used() -> None:
    leg = Leg(completion_tokens=20, seconds=1.0)
    assert with_counters(leg, UpstreamCounters(generated_tokens=21, drafts=3, draft_tokens=9)) is leg


@pytest.mark.slow
def test_sabotaged_candidates_are_caught_by_the_check_that_is_theirs(toy: Running) -> None:
    with sabotaged(toy.url, "changed", every=5) as url:
        run = gate(toy.url, url, cases(13, max_tokens=16), stop_early=False)
    assert "text_agreement" in failed(run)
    with sabotaged(toy.url, "schemas", every=3) as url:
        run = gate(toy.url, url, cases(41, response_format=FORMAT, max_tokens=40, stop=[]), stop_early=False)
    assert run.verdict.decision == "roll back"
    assert {"schema_validity", "text_agreement"} & failed(run)
    schema = next(f for f in run.verdict.findings if f.check == "schema_validity")
    assert schema.estimate == pytest.approx(1 / 3, abs=0.1)
    with sabotaged(toy.url, "slower", delay_s=0.02) as url:
        run = gate(toy.url, url, cases(42, max_tokens=12))
    assert run.verdict.decision == "roll back"
    assert "end_to_end" in failed(run)
