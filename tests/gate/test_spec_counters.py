"""vLLM's counters of speculation."""

from paceline.gate.spec_counters import SpecCounters, read_counters

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


def test_engines_are_added_up() -> None:
    counters = read_counters(EXPOSITION)
    assert counters == SpecCounters(40, 160, 80, (45, 0, 15), 120)
    assert (counters.accepted_per_draft, counters.acceptance) == (2.0, 0.5)
    assert (counters.passes, counters.tokens_per_pass) == (40, 3.0)


def test_a_server_without_speculation_has_written_a_token_with_each_pass() -> None:
    plain = read_counters("# TYPE vllm:generation_tokens_total counter\nvllm:generation_tokens_total{} 9.0\n")
    assert plain == SpecCounters(generated_tokens=9)
    assert (plain.tokens_per_pass, plain.acceptance, plain.accepted_per_draft) == (1.0, 0.0, 0.0)


def test_growth_is_counted_from_one_reading_to_the_next() -> None:
    before, after = SpecCounters(1, 4, 2, (1, 1), 10), SpecCounters(3, 12, 7, (3, 2, 2), 30)
    assert after - before == SpecCounters(2, 8, 5, (2, 1, 2), 20)
    assert before + (after - before) == after


def test_a_server_that_was_restarted_counts_from_zero() -> None:
    assert SpecCounters(1, 2, 1, (1,), 5) - SpecCounters(9, 9, 9, (9,), 90) == SpecCounters(1, 2, 1, (1,), 5)


def test_pacelines_own_metrics_are_read_alike() -> None:
    from prometheus_client import CollectorRegistry, generate_latest

    from paceline.server.telemetry.metric_definitions import VllmMetrics

    registry = CollectorRegistry()
    metrics = VllmMetrics(registry, "m")
    metrics.generation_tokens.inc(12)
    metrics.drafts.inc(3)
    metrics.draft_tokens.inc(9)
    metrics.accepted_tokens.inc(6)
    assert read_counters(generate_latest(registry).decode()) == SpecCounters(3, 9, 6, (), 12)
