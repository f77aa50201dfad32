"""The queueing simulation."""

import pytest

from bench.pages import scale as scale_page
from bench.scale import Engine, Traffic, Work, draft_length, expected_tokens, limit, request_rate, simulate

ENGINE, TRAFFIC, LONGEST = Engine(), Traffic(), 8


def test_the_same_seed_gives_the_same_outcome() -> None:
    runs = [simulate(ENGINE, TRAFFIC, "by batch", 5.0, 5.0, LONGEST, seed) for seed in (0, 0, 1)]
    assert runs[0] == runs[1] != runs[2]


def test_an_idle_engine_takes_a_pass_for_each_token() -> None:
    outcome = simulate(ENGINE, TRAFFIC, "plain", 0.1, 200.0, LONGEST, 0)
    alone = ENGINE.pass_s(Work(1, TRAFFIC.prompt + 90), None)
    assert outcome.tpot_ms == pytest.approx(1000 * alone, rel=0.03)
    assert outcome.batch < 1.2


def test_an_idle_engine_gains_what_the_formula_says() -> None:
    plain, fixed = (simulate(ENGINE, TRAFFIC, arm, 0.1, 200.0, LONGEST, 0) for arm in ("plain", "fixed"))
    work = Work(1, TRAFFIC.prompt)
    slower = ENGINE.pass_s(work, LONGEST) / ENGINE.pass_s(work, None)
    gain = expected_tokens(TRAFFIC.acceptance, LONGEST) / slower
    assert plain.tpot_ms / fixed.tpot_ms == pytest.approx(gain, rel=0.1)


def test_a_fixed_length_gains_at_low_load_and_loses_at_high_load() -> None:
    rates = [share * limit(ENGINE, TRAFFIC, "plain", LONGEST) for share in (0.1, 1.0)]
    gains = []
    for rate in rates:
        plain, fixed = (simulate(ENGINE, TRAFFIC, arm, rate, 15.0, LONGEST, 0) for arm in ("plain", "fixed"))
        gains.append(plain.answer_s / fixed.answer_s)
    assert gains[0] > 2 > 1 > gains[1]


def test_the_planned_length_falls_as_the_batch_grows() -> None:
    lengths = [draft_length(ENGINE, TRAFFIC, "by batch", n, LONGEST) for n in (1, 16, 64, 256)]
    assert lengths[0] == LONGEST
    assert lengths[-1] == 0
    assert lengths == sorted(lengths, key=lambda n: -(n or 0))


def test_a_planned_length_bears_no_less_than_a_fixed_one() -> None:
    arms = ("fixed", "by batch", "plain")
    fixed, planned, plain = (limit(ENGINE, TRAFFIC, arm, LONGEST) for arm in arms)
    assert fixed < planned <= plain


def test_drafts_that_are_never_accepted_are_never_planned() -> None:
    never = Traffic(acceptance=0.0)
    assert draft_length(ENGINE, never, "by batch", 4, LONGEST) == 0
    assert request_rate(ENGINE, never, 4, LONGEST) < request_rate(ENGINE, never, 4, 0)


def test_the_page_has_the_stored_tables() -> None:
    assert scale_page.section() in scale_page.PATH.read_text()
