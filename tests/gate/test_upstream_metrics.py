"""Figures of a whole upstream, by the text of its metrics."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from paceline.gate.pair import Leg
from paceline.gate.policy import Policy
from paceline.gate.store import GateStore
from paceline.gate.upstream_metrics import UpstreamCounters, UpstreamWindow, read_counters, with_counters
from paceline.gate.verdict import decide
from support.gate_pairs import pairs

EXPOSITION = """\
# HELP vllm:generation_tokens_total Number of generation tokens processed.
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{engine="0",model_name="m"} 100.0
vllm:generation_tokens_total{engine="1",model_name="m"} 20.0
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 30.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="m"} 10.0
# TYPE vllm:spec_decode_num_drafts_created gauge
vllm:spec_decode_num_drafts_created{engine="0",model_name="m"} 1.79e+09
# TYPE vllm:spec_decode_num_draft_tokens_total counter
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 160.0
# TYPE vllm:spec_decode_num_accepted_tokens_total counter
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 80.0
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos_total counter
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 40.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="2"} 15.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",model_name="m",position="0"} 5.0
# TYPE python_gc_objects_collected_total counter
python_gc_objects_collected_total{generation="0"} 7.0
"""


RECORDED = """\
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="smollm2"} 242.0
# HELP vllm:spec_decode_num_drafts_created Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_created gauge
vllm:spec_decode_num_drafts_created{engine="0",model_name="smollm2"} 1.7948646865871923e+09
# HELP vllm:spec_decode_num_draft_tokens_total Number of draft tokens.
# TYPE vllm:spec_decode_num_draft_tokens_total counter
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="smollm2"} 695.0
# HELP vllm:spec_decode_num_draft_tokens_created Number of draft tokens.
# TYPE vllm:spec_decode_num_draft_tokens_created gauge
vllm:spec_decode_num_draft_tokens_created{engine="0",model_name="smollm2"} 1.7948646865872219e+09
# HELP vllm:spec_decode_num_accepted_tokens_total Number of accepted tokens.
# TYPE vllm:spec_decode_num_accepted_tokens_total counter
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="smollm2"} 283.0
# HELP vllm:spec_decode_num_accepted_tokens_created Number of accepted tokens.
# TYPE vllm:spec_decode_num_accepted_tokens_created gauge
vllm:spec_decode_num_accepted_tokens_created{engine="0",model_name="smollm2"} 1.7948646865872383e+09
# HELP vllm:spec_decode_num_accepted_tokens_per_pos_total Accepted tokens per draft position.
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos_total counter
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="smollm2",position="0"} 108.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="smollm2",position="1"} 63.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="smollm2",position="2"} 41.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="smollm2",position="3"} 30.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="smollm2",position="4"} 28.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="smollm2",position="5"} 13.0
# HELP vllm:spec_decode_num_accepted_tokens_per_pos_created Accepted tokens per draft position.
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos_created gauge
# HELP vllm:generation_tokens_total Number of generation tokens processed.
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{engine="0",model_name="smollm2"} 574.0
# HELP vllm:generation_tokens_created Number of generation tokens processed.
# TYPE vllm:generation_tokens_created gauge
vllm:generation_tokens_created{engine="0",model_name="smollm2"} 1.7948646865879798e+09
"""  # of vLLM 0.32 with paceline's proposer, six tokens at most


def test_the_text_of_a_running_vllm_is_read() -> None:
    counters = read_counters(RECORDED)
    assert counters == UpstreamCounters(242, 695, 283, (108, 63, 41, 30, 28, 13), 574)
    assert counters.passes == 291
    assert sum(counters.acceptance_histogram) == counters.drafts


def test_engines_are_added_up() -> None:
    counters = read_counters(EXPOSITION)
    assert counters == UpstreamCounters(40, 160, 80, (45, 0, 15), 120)
    assert (counters.accepted_per_draft, counters.acceptance) == (2.0, 0.5)
    assert (counters.passes, counters.tokens_per_pass) == (40, 3.0)


def test_a_server_without_speculation_has_written_a_token_with_each_pass() -> None:
    plain = read_counters("# TYPE vllm:generation_tokens_total counter\nvllm:generation_tokens_total{} 9.0\n")
    assert plain == UpstreamCounters(generated_tokens=9)
    assert (plain.tokens_per_pass, plain.acceptance, plain.accepted_per_draft) == (1.0, 0.0, 0.0)


def test_growth_is_counted_from_one_reading_to_the_next() -> None:
    before, after = UpstreamCounters(1, 4, 2, (1, 1), 10), UpstreamCounters(3, 12, 7, (3, 2, 2), 30)
    assert after - before == UpstreamCounters(2, 8, 5, (2, 1, 2), 20)
    assert before + (after - before) == after


def test_a_server_that_was_restarted_counts_from_zero() -> None:
    assert UpstreamCounters(1, 2, 1, (1,), 5) - UpstreamCounters(9, 9, 9, (9,), 90) == UpstreamCounters(
        1, 2, 1, (1,), 5
    )


def test_pacelines_own_metrics_are_read_alike_and_tell_the_time_of_its_engine() -> None:
    from prometheus_client import CollectorRegistry, generate_latest

    from paceline.server.telemetry.metric_definitions import PacelineMetrics, VllmMetrics

    registry = CollectorRegistry()
    metrics, own = VllmMetrics(registry, "m"), PacelineMetrics(registry)
    for route in ("a", "b"):
        own.prefill_seconds.labels(route).inc(1)
        own.verify_seconds.labels(route, "suffix").inc(0.5)
    own.draft_seconds.labels("a", "suffix").inc(0.25)
    metrics.generation_tokens.inc(12)
    metrics.drafts.inc(3)
    metrics.draft_tokens.inc(9)
    metrics.accepted_tokens.inc(6)
    assert read_counters(generate_latest(registry).decode()) == UpstreamCounters(3, 9, 6, (), 12, 3.25)


DCGM = """\
# TYPE DCGM_FI_DEV_GPU_UTIL gauge
DCGM_FI_DEV_GPU_UTIL{gpu="0",UUID="GPU-1",modelName="NVIDIA H200"} 80
DCGM_FI_DEV_GPU_UTIL{gpu="1",UUID="GPU-2",modelName="NVIDIA H200"} 40
"""


def test_gpu_time_is_the_engines_own_or_by_utilization() -> None:
    exported = read_counters(EXPOSITION + DCGM)
    assert exported.gpus == 2
    assert exported.gpu_utilization == pytest.approx(0.6)
    assert exported.gpu_s(10.0) == pytest.approx(12.0)
    assert read_counters(EXPOSITION).gpu_s(10.0) is None
    assert UpstreamCounters(engine_s=3.0).gpu_s(10.0) == 3.0
    both = exported + UpstreamCounters(gpu_utilization=0.0, gpus=2)
    assert both.gpus == 4
    assert both.gpu_utilization == pytest.approx(0.3)
    later = UpstreamCounters(generated_tokens=200, drafts=50, engine_s=5.0, gpu_utilization=0.2, gpus=2)
    grown = later - UpstreamCounters(
        generated_tokens=120, drafts=40, engine_s=2.0, gpu_utilization=0.6, gpus=2
    )
    assert grown.engine_s == 3.0
    assert grown.gpu_utilization == pytest.approx(0.4)


def test_a_leg_gets_the_figures_that_its_response_does_not_have() -> None:
    leg = Leg(completion_tokens=20, seconds=2.0, passes=None)
    counted = with_counters(leg, UpstreamCounters(6, 24, 9, (5, 3, 1), 20, engine_s=1.5))
    assert (counted.passes, counted.draft_tokens, counted.accepted_tokens) == (11, 24, 9)
    assert counted.acceptance_histogram == (1, 2, 2, 1)
    assert counted.accepted_by_position == (5, 3, 1)
    assert (counted.gpu_s, counted.gpu_utilization) == (1.5, 0.75)
    told = replace(leg, passes=12, draft_tokens=30, accepted_tokens=8, acceptance_histogram=(1, 8))
    kept = with_counters(told, UpstreamCounters(6, 24, 9, (5, 3, 1), 20))
    assert kept == told  # its own figures are better
    plain = with_counters(leg, UpstreamCounters(generated_tokens=20))
    assert (plain.passes, plain.draft_tokens) == (20, None)  # speculation is off
    assert with_counters(leg, UpstreamCounters(generated_tokens=21)) is leg  # others were served meanwhile


def window(number: int, passes: float, load: float = 1.0) -> UpstreamWindow:
    """passes: the candidate's for a token; the baseline's is one. load: engine time for a token."""
    accepted = round(1000 * (1 - passes))
    candidate = UpstreamCounters(600, 1200, accepted, (accepted, 0), 1000, engine_s=10.0 * load)
    baseline = UpstreamCounters(generated_tokens=2000, engine_s=20.0)
    return UpstreamWindow(created=30.0 * number, seconds=30.0, baseline=baseline, candidate=candidate)


def test_windows_stand_in_for_figures_that_the_pairs_do_not_have() -> None:
    rng = np.random.default_rng(0)
    windows = [window(i, passes) for i, passes in enumerate(rng.uniform(0.5, 0.7, 200))]
    found = {f.check: f for f in decide(pairs(60, 0.7), Policy(), windows=windows).findings}
    assert (found["cost_passes"].status, found["cost_passes"].pairs) == ("pass", 200)
    assert found["cost_passes"].estimate == pytest.approx(0.6, abs=0.02)
    assert found["acceptance"].estimate == pytest.approx(1 / 3, abs=0.02)
    assert found["acceptance"].details["by_position"] == [pytest.approx(2 / 3, abs=0.04), 0.0]
    assert found["cost_gpu"].details["utilization"] == pytest.approx(0.5)
    reported = [
        replace(p, baseline=replace(p.baseline, passes=5), candidate=replace(p.candidate, passes=5))
        for p in pairs(60, 0.7)
    ]
    found = {f.check: f for f in decide(reported, Policy(), windows=windows).findings}
    assert found["cost_passes"].pairs == 60


def test_windows_never_prove_harm_but_may_miss_a_floor_of_acceptance() -> None:
    """Upstreams under different loads spend different time on a token."""
    windows = [window(i, 0.6, load=3.0) for i in range(200)]
    verdict = decide(pairs(300, 0.7), Policy(), windows=windows)
    assert verdict.decision == "promote"
    cost = next(f for f in verdict.findings if f.check == "cost_gpu")
    assert cost.status == "undecided"
    assert cost.estimate == pytest.approx(3.0)
    low = decide(pairs(300, 0.7), Policy(min_acceptance_rate=0.8), windows=windows)
    assert (low.decision, low.reasons[0].split(":")[0]) == ("roll back", "acceptance")


def test_windows_of_several_gates_are_counted_once_and_old_ones_go(tmp_path: Path) -> None:
    store = GateStore.open(str(tmp_path / "gate.db"))
    made = [window(i, 0.6) for i in range(4)]
    for one in (*made, *(replace(one, created=one.created + 7) for one in made)):
        store.save_window("x", one)
    store.save_window("y", made[0])
    assert store.windows("x") == made
    assert [one.created for one in store.windows("x", since=40)] == [60.0, 90.0]
    assert store.prune() == 9
    assert store.windows("x") == []
    store.close()
