"""The arithmetic of rows: pooled figures, ratios pair by pair, and who is the best peer."""

import pytest

from bench.compare.rows import AGENT_TURNS, FIELDS, Sample, best_peer, identical, ratio, rows, tpot
from bench.compare.table import table
from bench.peers.systems import Build, Entry

OURS = Build("paceline", "paceline", "", ("plain", "suffix+ngram"))
PEER = Build("peer", "peer", "", ("plain", "lookup"))


def sample(
    entry: Entry, prompt: str, ms: float, tokens: tuple[int, ...] = (1, 2, 3), workload: str = "swe"
) -> Sample:
    decode = ms / 1000 * (len(tokens) - 1)
    return Sample(entry, 0, 0.0, workload, prompt, tokens, 1.0, 1.0 + decode, len(tokens))


def test_tpot_pools_tokens_and_ignores_answers_of_one() -> None:
    e = Entry(OURS, "plain")
    assert tpot([sample(e, "a", 10, (1,) * 11), sample(e, "b", 40, (1, 2))]) == pytest.approx(0.14 / 11)
    assert tpot([sample(e, "a", 10, (1,))]) is None
    assert tpot([]) is None


def test_a_ratio_is_over_common_prompts_only() -> None:
    ours, peer = Entry(OURS, "plain"), Entry(PEER, "plain")
    slow = [sample(peer, "a", 30), sample(peer, "b", 80), sample(peer, "not ours", 1000)]
    fast = [sample(ours, "a", 10), sample(ours, "b", 20), sample(ours, "not theirs", 1)]
    assert ratio(slow, fast, tpot) == {"ratio": round(110 / 30, 3), "low": 3.0, "high": 4.0, "pairs": 2}
    assert ratio(slow, [], tpot) is None


def test_identical_is_a_share_of_prompts() -> None:
    plain, guessing = Entry(OURS, "plain"), Entry(OURS, "suffix+ngram")
    expected = [sample(plain, "a", 1, (1, 2)), sample(plain, "b", 1, (3, 4))]
    found = [sample(guessing, "a", 1, (1, 2)), sample(guessing, "b", 1, (3, 5)), sample(guessing, "c", 1)]
    assert identical(found, expected) == 0.5
    assert identical(found, []) is None


def test_the_best_peer_is_never_paceline() -> None:
    ours, slow, fast = Entry(OURS, "plain"), Entry(PEER, "plain"), Entry(PEER, "lookup")
    by_entry = {e: [sample(e, "a", ms)] for e, ms in ((ours, 1), (slow, 9), (fast, 5))}
    assert best_peer(by_entry, plain=True) == slow
    assert best_peer(by_entry, plain=False) == fast
    assert best_peer({ours: by_entry[ours]}, plain=True) is None


def test_one_row_for_each_system_mode_workload_and_temperature() -> None:
    everyone = [Entry(b, mode) for b in (OURS, PEER) for mode in b.modes]
    samples = [sample(e, p, 10, workload=w) for e in everyone for p in "ab" for w in ("swe", "livemcp")]
    found = rows(samples, everyone, {everyone[0]: 99.0}, {}, [0.0], ["swe", "livemcp", "spec-bench"])
    keys = [(r["system"], r["mode"], r["workload"], r["temperature"]) for r in found]
    assert len(set(keys)) == len(found) == 4 * 4  # three workloads, and all agents' turns together
    assert all(set(FIELDS) <= set(row) for row in found)
    ours = next(r for r in found if r["mode"] == "suffix+ngram" and r["workload"] == AGENT_TURNS)
    assert ours["n"] == 4
    assert ours["tokens_per_pass"] == 1.0
    assert ours["identical_to_plain"] == 1.0
    assert ours["vs_speculative_peer"]["peer"] == "peer lookup"
    assert ours["vs_speculative_peer"]["tpot"]["ratio"] == 1.0
    assert next(r for r in found if r["system"] == "paceline")["peak_mb"] == 99.0
    assert len(table(found).rows) == sum(bool(row["n"]) for row in found)
