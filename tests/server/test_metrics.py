"""The metrics, with their names and labels."""

from collections import Counter
from itertools import permutations
from pathlib import Path
from threading import Thread

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from paceline.drafters import model_free
from paceline.server.telemetry import metrics as module
from paceline.server.telemetry.metrics import Metrics
from paceline.trace.record import RequestStats
from paceline.types import Draft, Finish, Round, Seq
from support.metrics import run, samples, some_metrics, total, value


@pytest.fixture(scope="module")
def ran() -> tuple[Metrics, list[Round]]:
    metrics = some_metrics()
    return metrics, run(metrics)


def test_the_run_has_every_kind_of_round(ran: tuple[Metrics, list[Round]]) -> None:
    rounds = ran[1]
    assert any(not r.tokens for r in rounds)
    assert any(r.tokens and not len(r.draft) for r in rounds)
    assert any(len(r.path) > module.MAX_POSITIONS for r in rounds)
    assert any(r.draft.parents and r.path for r in rounds)
    assert any(r.finish == "stop" and len(r.path) == len(r.tokens) for r in rounds)
    assert any("grammar" in r.draft.sources for r in rounds)
    assert value(ran[0], "paceline_metrics_faults_total") == 0


def test_counters_say_what_the_rounds_say(ran: tuple[Metrics, list[Round]]) -> None:
    metrics, rounds = ran
    drafted = [r for r in rounds if len(r.draft)]
    accepted = sum(len(r.path) for r in rounds)
    assert value(metrics, "vllm:generation_tokens_total") == sum(len(r.tokens) for r in rounds)
    assert value(metrics, "vllm:spec_decode_num_drafts_total") == len(drafted)
    assert value(metrics, "vllm:spec_decode_num_draft_tokens_total") == sum(len(r.draft) for r in rounds)
    assert value(metrics, "vllm:spec_decode_num_accepted_tokens_total") == accepted
    assert total(metrics, "paceline_drafted_total") == sum(len(r.draft) for r in rounds)
    assert total(metrics, "paceline_accepted_total") == accepted
    plain = [r for r in rounds if r.tokens and not len(r.draft)]
    assert total(metrics, "paceline_plain_rounds_total") == len(plain)


def test_own_counters_tell_route_drafter_and_position(ran: tuple[Metrics, list[Round]]) -> None:
    metrics, rounds = ran
    drafted: Counter[tuple[str, str, str]] = Counter()
    accepted: Counter[tuple[str, str, str]] = Counter()
    for r in rounds:
        route = "agents" if r.request in ("s1", "s3") else "default"
        for node, source in enumerate(r.draft.sources):
            position = r.draft.depth(node) - 1
            key = (route, source, str(position) if position < 16 else "16+")
            drafted[key] += 1
            accepted[key] += node in r.path
    assert ("agents", "fork", "1") in drafted
    assert any(where == "16+" for _, _, where in drafted)
    for key, n in drafted.items():
        labels = dict(zip(("route", "drafter", "position"), key, strict=True))
        assert value(metrics, "paceline_drafted_total", **labels) == n
        assert value(metrics, "paceline_accepted_total", **labels) == accepted[key]


def test_positions_count_drafts_that_got_so_far(ran: tuple[Metrics, list[Round]]) -> None:
    metrics, rounds = ran
    for position in range(16):
        got_there = sum(1 for r in rounds if len(r.path) >= position + 1)
        name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
        assert value(metrics, name, position=str(position)) == got_there
    positions = {dict(labels)["position"] for (n, labels) in samples(metrics) if n == name}
    assert positions == {str(i) for i in range(16)}


def test_the_formulas_of_vllms_bench(ran: tuple[Metrics, list[Round]]) -> None:
    """From the lines, as its client reads them: those of a name are added up."""
    metrics, rounds = ran
    found: Counter[str] = Counter()
    per_position: Counter[int] = Counter()
    for line in metrics.render()[0].decode().splitlines():
        if line.startswith("vllm:spec_decode"):
            name, number = line.split("{")[0], int(float(line.split()[-1]))
            if "per_pos" in name:
                per_position[int(line.split('position="')[1].split('"')[0])] += number
            else:
                found[next(k for k in ("num_drafts", "num_draft_tokens", "num_accepted") if k in name)] += (
                    number
                )
    drafted = [r for r in rounds if len(r.draft)]
    nodes, kept = sum(len(r.draft) for r in drafted), sum(len(r.path) for r in drafted)
    assert found["num_accepted"] / found["num_draft_tokens"] == kept / nodes
    assert 1 + found["num_accepted"] / found["num_drafts"] == 1 + kept / len(drafted)
    first = sum(1 for r in drafted if r.path) / len(drafted)
    assert per_position[0] / found["num_drafts"] == first


def test_time_and_sizes_of_passes(ran: tuple[Metrics, list[Round]]) -> None:
    metrics, rounds = ran
    passes = {id_: r for r in rounds for id_ in [(r.batch, r.rows, r.draft_us, r.target_us)]}
    spent = total(metrics, "paceline_verify_seconds_total") + total(metrics, "paceline_prefill_seconds_total")
    assert spent == pytest.approx(sum(r.target_us / r.batch for r in rounds) / 1e6)
    guessing = total(metrics, "paceline_draft_seconds_total")
    assert guessing == pytest.approx(sum(r.draft_us / r.batch for r in rounds) / 1e6)
    assert value(metrics, "paceline_batch_size_sum") == len(rounds)
    assert value(metrics, "paceline_batch_size_count") >= len(passes)
    assert total(metrics, "paceline_tokens_per_pass_sum") == sum(len(r.tokens) for r in rounds)
    assert total(metrics, "paceline_tokens_per_pass_count") == sum(1 for r in rounds if r.tokens)
    gaps = sum(1 for r in rounds if r.tokens) - 4  # none before an output's first tokens
    assert value(metrics, "vllm:inter_token_latency_seconds_count") == gaps


def test_time_is_counted_by_drafter(ran: tuple[Metrics, list[Round]]) -> None:
    metrics, rounds = ran
    for name in ("suffix", "ngram", "fork", "grammar"):
        spent = sum(r.draft_us_by.get(name, 0) / r.batch for r in rounds) / 1e6
        assert total(metrics, "paceline_draft_seconds_total", drafter=name) == pytest.approx(spent)
    assert any(r.draft_us_by.get("suffix") for r in rounds)
    assert all(sum(r.draft_us_by.values()) <= r.draft_us for r in rounds)


def test_rounds_are_counted_by_list_of_drafters(ran: tuple[Metrics, list[Round]]) -> None:
    metrics, rounds = ran
    for names in {r.drafters for r in rounds}:
        wrote = [r for r in rounds if r.drafters == names and r.tokens]
        label = "+".join(names)
        assert total(metrics, "paceline_tokens_per_pass_count", drafter=label) == len(wrote)
        plain = sum(not len(r.draft) for r in wrote)
        assert total(metrics, "paceline_plain_rounds_total", drafter=label) == plain
        assert total(metrics, "paceline_verify_seconds_total", drafter=label) > 0


def test_lists_of_drafters_make_so_many_labels_and_no_more() -> None:
    metrics = some_metrics()
    lists = list(permutations(model_free(), 3))
    assert len(lists) > module.MAX_LISTS
    for i, names in enumerate(lists):
        metrics.round(Round(f"s{i}", 0, names, Draft(), (), (1,), 0, 1, 1, 0, 5))
    found = {labels for (n, labels) in samples(metrics) if n == "paceline_plain_rounds_total"}
    assert len(found) == module.MAX_LISTS + 1
    assert total(metrics, "paceline_plain_rounds_total", drafter="other") == len(lists) - module.MAX_LISTS


def test_passes_are_distinct_even_if_they_cost_the_same() -> None:
    metrics = some_metrics()
    for _ in range(3):
        for name in ("a", "b"):
            metrics.round(Round(name, 0, (), Draft(), (), (1,), 0, 2, 2, 5, 5))
    metrics.round(Round("c", 0, (), Draft(), (), (), 0, 1, 0, 0, 0, "error"))
    assert value(metrics, "paceline_batch_size_count") == 3
    assert value(metrics, "paceline_batch_size_sum") == 6


def a_finished(reason: Finish = "stop", lossy: bool = False, first: float | None = 0.3) -> RequestStats:
    return RequestStats(
        model="toy",
        route="agents",
        endpoint="/v1/completions",
        prompt_tokens=10,
        cached_tokens=4,
        output_tokens=6 if first else 0,
        passes=1,
        queue_s=0.1,
        first_token_s=first,
        decode_s=0.5,
        seconds=0.9,
        finish=reason,
        lossy=lossy,
    )


def test_requests() -> None:
    metrics = some_metrics()
    metrics.finished(a_finished())
    metrics.finished(a_finished("cancelled", lossy=True))
    metrics.finished(a_finished("error", first=None))
    assert value(metrics, "vllm:request_success_total", finished_reason="stop") == 1
    assert value(metrics, "vllm:request_success_total", finished_reason="abort") == 1
    assert value(metrics, "vllm:request_success_total", finished_reason="length") == 0
    assert value(metrics, "vllm:prompt_tokens_total") == 30
    assert value(metrics, "vllm:prefix_cache_queries_total") == 30
    assert value(metrics, "vllm:prefix_cache_hits_total") == 12
    assert value(metrics, "vllm:time_to_first_token_seconds_sum") == pytest.approx(0.6)
    assert value(metrics, "vllm:request_prefill_time_seconds_sum") == pytest.approx(0.4)
    assert value(metrics, "vllm:request_decode_time_seconds_sum") == pytest.approx(1.0)
    assert value(metrics, "vllm:request_time_per_output_token_seconds_sum") == pytest.approx(0.2)
    assert value(metrics, "vllm:request_queue_time_seconds_count") == 3
    assert value(metrics, "vllm:e2e_request_latency_seconds_count") == 3
    assert value(metrics, "vllm:time_to_first_token_seconds_bucket", le="0.25") == 0
    assert value(metrics, "vllm:time_to_first_token_seconds_bucket", le="0.5") == 2
    assert value(metrics, "paceline_lossy_requests_total", route="agents") == 1


def test_gauges_are_read_at_each_scrape() -> None:
    metrics = some_metrics()
    assert value(metrics, "vllm:num_requests_running") == 3
    assert value(metrics, "vllm:num_requests_waiting") == 2
    assert value(metrics, "vllm:kv_cache_usage_perc") == value(metrics, "paceline_cache_use") == 0.25


def test_a_gauge_that_cannot_be_read_spoils_no_other() -> None:
    metrics = Metrics("toy", [], lambda: 1 / 0, lambda: 2, lambda: 0.5)
    assert value(metrics, "vllm:num_requests_running") != value(metrics, "vllm:num_requests_running")
    assert value(metrics, "vllm:num_requests_waiting") == 2


def test_names_from_outside_make_no_labels() -> None:
    metrics = some_metrics()
    for i in range(50):
        draft = Draft((1,), None, (f"drafter{i}",), rejected_sources=(f"drafter{i}",) * 2)
        metrics.set_route(f"s{i}", f"route{i}")
        metrics.round(Round(f"s{i}", 0, (), draft, (0,), (1, 2), 1, 1, 2, 1, 1))
        metrics.refused(f"reason{i}")
    other = {"route": "other", "drafter": "other"}
    assert value(metrics, "paceline_drafted_total", **other, position="0") == 50
    assert value(metrics, "paceline_rejected_by_grammar_total", route="other", drafter="other") == 100
    assert value(metrics, "paceline_refused_total", reason="other") == 50
    assert total(metrics, "paceline_drafted_total") == 50
    metrics.refused("queue_full")
    assert value(metrics, "paceline_refused_total", reason="queue_full") == 1
    metrics.add_routes(f"late{i}" for i in range(500))
    assert len({labels for (n, labels) in samples(metrics) if n == "paceline_prefill_seconds_total"}) == 64


def test_what_is_remembered_of_outputs_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_LIVE", 10)
    metrics = some_metrics()
    for i in range(100):
        metrics.set_route(f"s{i}", "agents")
    assert len(metrics._live) == 10
    metrics.finish(Seq("s99", [1], 1), "stop")
    assert "s99" not in metrics._live
    assert "s98" in metrics._live
    metrics.finish(Seq("never seen", [1], 1), "cancelled")
    assert value(metrics, "paceline_metrics_faults_total") == 0


def test_a_finished_run_leaves_nothing_behind(ran: tuple[Metrics, list[Round]]) -> None:
    assert not ran[0]._live


def test_a_fault_is_counted_and_never_raised() -> None:
    metrics = some_metrics()
    metrics.round(None)  # type: ignore[arg-type]
    metrics.finish(None, "stop")  # type: ignore[arg-type]
    metrics.finished(None)  # type: ignore[arg-type]
    assert value(metrics, "paceline_metrics_faults_total") == 3


def test_both_formats(ran: tuple[Metrics, list[Round]]) -> None:
    body, kind = ran[0].render()
    assert kind.startswith("text/plain")
    assert b"_created" not in body
    asked = "application/openmetrics-text;version=1.0.0,text/plain;q=0.5"
    body, kind = ran[0].render(asked)
    assert kind.startswith("application/openmetrics-text")
    families = {f.name: f.type for f in parse_openmetrics(body.decode())}  # type: ignore[no-untyped-call]
    assert families["vllm:spec_decode_num_drafts"] == "counter"
    assert families["vllm:num_requests_running"] == "gauge"
    assert families["vllm:inter_token_latency_seconds"] == "histogram"


def test_metrics_do_not_share_a_registry() -> None:
    one, other = some_metrics(), some_metrics()
    one.refused("draining")
    assert total(other, "paceline_refused_total") == 0


def test_the_page_names_every_metric() -> None:
    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    for family in text_string_to_metric_families(some_metrics().render()[0].decode()):
        wire = family.name + "_total" if family.type == "counter" else family.name
        assert f"`{wire}`" in page or f"`{wire}{{" in page, wire


def test_rounds_are_counted_while_others_read() -> None:
    metrics = some_metrics()
    draft = Draft(tuple(range(20)), None, ("ngram",) * 20)
    r = Round("a", 0, (), draft, (0, 1), (1, 2, 3), 20, 1, 21, 1, 1)
    writers = [Thread(target=lambda: [metrics.round(r) for _ in range(300)]) for _ in range(3)]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        metrics.render()
    assert value(metrics, "vllm:generation_tokens_total") == 2700
    assert value(metrics, "paceline_accepted_total", route="default", drafter="ngram", position="1") == 900
    assert value(metrics, "paceline_metrics_faults_total") == 0
