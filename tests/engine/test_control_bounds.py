"""The controller on simulated machines: never slower than plain decoding, near the best with hindsight.

All times are simulated, so the bounds hold for every run.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import fmean, median

import pytest

from paceline.config import SpecConfig
from paceline.engine.control import EXPLORED, TRIAL_PASSES, TRIAL_SHARE, Rate
from paceline.target.cost import CostTable
from paceline.types import Seq
from support.simulation import (
    BATCH_CPU,
    LARGE_CPU,
    PLAIN,
    SMALL_CPU,
    SMALL_GPU,
    Chance,
    Outcome,
    SimulatedDrafter,
    Timer,
    burst,
    bursts,
    constant,
    flipping,
    random_scenario,
    simulate,
    uniform,
)

MACHINES = {"small cpu": SMALL_CPU, "large cpu": LARGE_CPU, "gpu": SMALL_GPU}
ON_MACHINES = ["small cpu", *(pytest.param(name, marks=pytest.mark.slow) for name in ("large cpu", "gpu"))]
LIST = ("suffix", "ngram")


class Doubted(Rate):
    """Asks for budgets all the same where nobody is to be asked; counts sequences by where they stand."""

    at_first = later = 0

    def worth_asking(self, drafters: Sequence[str], seq: Seq) -> bool:
        worth = super().worth_asking(drafters, seq)
        if not worth:
            assert not any(self.budget(name, seq, 8) for name in drafters)
            first = len(seq.tokens) == seq.prompt_len
            self.at_first, self.later = self.at_first + first, self.later + (not first)
        return worth


Make = Callable[[Timer], Sequence[SimulatedDrafter]]


def boasting(chance: Chance, claim: float | None, us: float = 60) -> Make:
    """A drafter that claims the same, whatever its chance."""
    claims = None if claim is None else (lambda _, claim=claim: claim)
    return lambda timer: [SimulatedDrafter("suffix", chance, timer, us=us, claims=claims)]


ADVERSARIES = {
    "always wrong": boasting(constant(0.0), 0.9),
    "wrong and dear": boasting(constant(0.0), 0.9, us=2000),
    "flips every 40 tokens": boasting(flipping(0.9, 0.05), 0.7),
    "flips, without scores": boasting(flipping(0.9, 0.05), None),
    "random text": boasting(bursts(0.3, 0.08, 8), 0.4),
    "good, then dead": boasting(lambda seq, at: 0.9 if at < 100 else 0.0, 0.9),
}


QUICK = ("wrong and dear", "flips every 40 tokens")
ONE_BY_ONE = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in ADVERSARIES]


def agents(timer: Timer) -> list[SimulatedDrafter]:
    """Much of the text is known; the rest is not."""
    known, guessed = bursts(0.6, 0.95), bursts(0.3, 0.5, 6)
    return [
        SimulatedDrafter("suffix", known, timer, us=60),
        SimulatedDrafter("ngram", guessed, timer, us=10),
    ]


def chat(timer: Timer) -> list[SimulatedDrafter]:
    return [
        SimulatedDrafter("suffix", bursts(0.25, 0.7, 8), timer, us=60),
        SimulatedDrafter("ngram", bursts(0.3, 0.5, 6), timer, us=10),
    ]


def head(timer: Timer) -> SimulatedDrafter:
    """A trained head: unsure of each token by its own measure, dear, and it reads hidden states."""

    def chance(seq: str, position: int) -> float:
        return min(0.97, 0.4 + 0.5 * uniform("head", seq, position))

    return SimulatedDrafter("block", chance, timer, us=400, read_us=100, taps=(1,))


def plain(cost: CostTable, agents: int, tokens: int) -> Outcome:
    return simulate(cost, lambda timer: [], PLAIN, agents, tokens)


@pytest.mark.parametrize("machine", ON_MACHINES)
@pytest.mark.parametrize("adversary", ONE_BY_ONE)
def test_one_stream_is_never_much_slower_than_plain_decoding(adversary: str, machine: str) -> None:
    """At every token: at most 1.02 times plain decoding and 15 token-times, from a cold start."""
    cost, tokens = MACHINES[machine], 400
    fast = simulate(cost, ADVERSARIES[adversary], SpecConfig(("suffix",)), 1, tokens)
    token_us = plain(cost, 1, tokens).us / tokens
    done, us = 0, 0.0
    for r in fast.rounds:
        done, us = done + len(r.tokens), us + r.draft_us + r.target_us
        assert us <= 1.02 * done * token_us + 15 * token_us


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("prompt", [8, 120, 1500])
def test_a_first_token_comes_as_early_as_without_drafts(prompt: int, machine: str) -> None:
    """Within 2 % of the pass that gives it, the time of drafting included; the next pass has a draft."""

    def known(timer: Timer) -> list[SimulatedDrafter]:
        sure = SimulatedDrafter("suffix", constant(0.97), timer, us=60)
        return [replace(sure, begin_us=300)]

    cost = MACHINES[machine]
    done = simulate(cost, known, SpecConfig(("suffix",)), 1, 600, prompt=prompt, answer=40)
    firsts = [i for i, r in enumerate(done.rounds) if r.start == prompt]
    assert len(firsts) > 10
    for i in firsts[3:-1]:  # by then the time of indexing a prompt is known
        first, second = done.rounds[i : i + 2]
        plain_us = 1000 * cost(prompt, prompt)
        assert first.draft_us + first.target_us <= 1.02 * plain_us
        assert len(second.draft) >= 2


@pytest.mark.parametrize("prompt", [53, 512])
@pytest.mark.parametrize("chance", [constant(0.8), constant(0.5), bursts(0.4, 0.9)])
def test_drafts_hardly_delay_the_prompts_that_are_read_beside_them(chance: Chance, prompt: int) -> None:
    """Passes with drafts take longer, and read as much of the prompts."""

    def known(timer: Timer) -> list[SimulatedDrafter]:
        return [SimulatedDrafter("suffix", chance, timer, us=30)]

    fast = burst(BATCH_CPU, known, SpecConfig(("suffix",)), prompt=prompt)
    slow = burst(BATCH_CPU, known, PLAIN, prompt=prompt)
    assert fast.tokens_per_s >= 0.99 * slow.tokens_per_s
    assert median(fast.first_ms) <= 1.1 * median(slow.first_ms)
    assert max(fast.first_ms) <= 1.17 * max(slow.first_ms)


@pytest.mark.slow
@pytest.mark.parametrize("agents", [4, 16])
@pytest.mark.parametrize("adversary", ADVERSARIES)
def test_many_streams_keep_the_throughput_of_plain_decoding(adversary: str, agents: int) -> None:
    """Once the controller knows the drafters: estimates outlive requests."""
    tokens = 1200 // agents
    for cost in (SMALL_CPU, SMALL_GPU):
        rate = Rate(cost)
        simulate(cost, ADVERSARIES[adversary], SpecConfig(("suffix",)), agents, 30, controller=rate)
        fast = simulate(
            cost, ADVERSARIES[adversary], SpecConfig(("suffix",)), agents, tokens, controller=rate
        )
        assert fast.tokens_per_s >= 0.985 * plain(cost, agents, tokens).tokens_per_s


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(108, 116))
def test_many_streams_lose_nothing_in_scenarios_drawn_at_random(seed: int) -> None:
    drawn = random_scenario(seed, loads=(4, 8, 16, 32))
    spec, tokens = SpecConfig(drawn.names), max(50, 1000 // drawn.agents)
    rate = Rate(drawn.cost)
    simulate(drawn.cost, drawn.drafters, spec, drawn.agents, 25, answer=drawn.answer, controller=rate)
    rate._texts.clear()
    fast = simulate(
        drawn.cost, drawn.drafters, spec, drawn.agents, tokens, answer=drawn.answer, controller=rate
    )
    slow = simulate(drawn.cost, lambda timer: [], PLAIN, drawn.agents, tokens, answer=drawn.answer)
    assert fast.tokens_per_s >= 0.98 * slow.tokens_per_s


@pytest.mark.slow
@pytest.mark.parametrize("load", [16, 32])
@pytest.mark.parametrize("make", [agents, chat])
def test_speculation_fades_out_as_load_rises(make: Make, load: int) -> None:
    rate = Rate(SMALL_CPU)
    simulate(SMALL_CPU, make, SpecConfig(LIST), load, 20, controller=rate)
    fast = simulate(SMALL_CPU, make, SpecConfig(LIST), load, 80, controller=rate)
    assert fast.tokens_per_s >= 0.98 * plain(SMALL_CPU, load, 80).tokens_per_s


@pytest.mark.slow
@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("make", [agents, chat])
def test_one_stream_is_near_the_best_fixed_length(make: Make, machine: str) -> None:
    cost, tokens = MACHINES[machine], 500
    fixed = [simulate(cost, make, SpecConfig(LIST, k, adaptive=False), 1, tokens) for k in (3, 5, 8)]
    best = max(outcome.tokens_per_s for outcome in (*fixed, plain(cost, 1, tokens)))
    assert simulate(cost, make, SpecConfig(LIST), 1, tokens).tokens_per_s >= 0.95 * best


def test_mixed_traffic_is_faster_than_with_any_fixed_length() -> None:
    """Every other agent writes text that nobody can guess."""
    known = bursts(0.8, 0.95)

    def chance(seq: str, position: int) -> float | None:
        return known(seq, position) if int(seq.split("/")[0]) % 2 else 0.02

    make, cost = boasting(chance, 0.8), SMALL_CPU
    fixed = [simulate(cost, make, SpecConfig(("suffix",), k, adaptive=False), 4, 200) for k in (3, 5, 8)]
    best = max(outcome.tokens_per_s for outcome in (*fixed, plain(cost, 4, 200)))
    assert simulate(cost, make, SpecConfig(("suffix",)), 4, 200).tokens_per_s > best


@pytest.mark.slow
@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("make", [agents, chat])
def test_a_head_in_the_list_never_costs_what_it_does_not_bring(make: Make, machine: str) -> None:
    cost, tokens = MACHINES[machine], 400

    def with_head(timer: Timer) -> list[SimulatedDrafter]:
        return [*make(timer), head(timer)]

    without = simulate(cost, make, SpecConfig(LIST), 1, tokens)
    rate = Rate(cost)
    simulate(cost, with_head, SpecConfig((*LIST, "block")), 1, 100, controller=rate)  # learns its price
    joined = simulate(cost, with_head, SpecConfig((*LIST, "block")), 1, tokens, controller=rate)
    assert joined.tokens_per_s >= 0.98 * without.tokens_per_s


@pytest.mark.parametrize("make", [pytest.param(agents, marks=pytest.mark.slow), chat])
def test_a_head_that_reads_many_hidden_states_at_once_pays_for_all_of_them(make: Make) -> None:
    """Of 17 passes it reads, 16 seem to cost nothing; short answers begin anew with it again and again."""

    def with_head(timer: Timer) -> list[SimulatedDrafter]:
        return [*make(timer), replace(head(timer), us=800, read_us=60, read_every=17)]

    def rate_of(members: Make, drafters: tuple[str, ...], answer: int) -> float:
        rate = Rate(SMALL_CPU)
        simulate(SMALL_CPU, members, SpecConfig(drafters), 4, 50, answer=answer, controller=rate)
        rate._texts.clear()
        done = simulate(SMALL_CPU, members, SpecConfig(drafters), 4, 200, answer=answer, controller=rate)
        return done.tokens_per_s

    lengths = range(52, 70, 4)
    without = [rate_of(make, LIST, answer) for answer in lengths]
    found = [rate_of(with_head, (*LIST, "block"), answer) for answer in lengths]
    assert fmean(found) >= 0.985 * fmean(without)


def slowing(timer: Timer, chance: float | None = None) -> SimulatedDrafter:
    """A head whose ask makes the next pass an eighth longer, and whose reading each pass."""
    timer.tap_us, slow = 200, replace(head(timer), read_us=5, late_us=500)
    return slow if chance is None else replace(slow, chance=constant(chance))


def joined_by(make: Make, slow: Callable[[Timer], SimulatedDrafter]) -> tuple[float, Rate]:
    """Tokens per second with that head over those without, and the controller."""
    rate, spec = Rate(SMALL_CPU), SpecConfig((*LIST, "block"))

    def with_head(timer: Timer) -> list[SimulatedDrafter]:
        return [*make(timer), slow(timer)]

    simulate(SMALL_CPU, with_head, spec, 1, 400, answer=64, controller=rate, noise=0.15)
    done = simulate(SMALL_CPU, with_head, spec, 1, 3000, answer=64, controller=rate, noise=0.15)
    without = simulate(SMALL_CPU, make, SpecConfig(LIST), 1, 3000, answer=64, noise=0.15)
    return done.tokens_per_s / without.tokens_per_s, rate


def test_what_a_head_adds_to_passes_of_the_target_is_in_its_price() -> None:
    """Its draft alone would pay with 0.3 of its nodes right; it is asked next to never."""
    speedup, rate = joined_by(chat, lambda timer: slowing(timer, 0.3))
    slowdown = rate.estimates.slowdown["block"]
    assert slowdown(1, 1) > 250
    assert speedup >= 0.985


@pytest.mark.parametrize("make", [agents, chat])
def test_a_head_that_pays_is_asked_though_it_slows_passes_down(make: Make) -> None:
    """Whether it reads a prompt is decided by the price of rows in the passes after it."""
    speedup, _ = joined_by(make, slowing)
    assert speedup > 1.15


def test_the_cost_curve_is_that_of_passes_without_what_a_head_adds() -> None:
    _, rate = joined_by(chat, slowing)
    for rows in range(1, 6):  # a pass takes 7.5 % longer by chance
        assert rate.cost(rows, 40) == pytest.approx(1075 * SMALL_CPU(rows, 40), rel=0.08)


def test_a_head_whose_nodes_cost_time_is_asked_for_few_of_them() -> None:
    """Of eight nodes two are right; the other six would take a tenth of a pass in every draft."""

    def with_head(timer: Timer) -> list[SimulatedDrafter]:
        return [*chat(timer), replace(head(timer), chance=constant(0.6), node_us=70, read_us=5)]

    done = simulate(SMALL_CPU, with_head, SpecConfig((*LIST, "block")), 1, 1500, answer=64)
    asked = [r for r in done.rounds if "block" in r.uncut.sources]
    assert len(asked) > 100
    assert sum(r.uncut.sources.count("block") for r in asked) < 4.5 * len(asked)
    without = simulate(SMALL_CPU, chat, SpecConfig(LIST), 1, 1500, answer=64)
    assert done.tokens_per_s > 1.1 * without.tokens_per_s


def test_a_head_that_does_not_pay_stops_reading_hidden_states() -> None:
    """At this load a row costs what it brings; reading alone would cost an eighth of the time."""
    made: list[SimulatedDrafter] = []

    def with_head(timer: Timer) -> list[SimulatedDrafter]:
        made[:] = [*chat(timer), head(timer)]
        return made

    fast = simulate(SMALL_CPU, with_head, SpecConfig((*LIST, "block")), 16, 60)
    assert fast.tokens_per_s >= 0.97 * plain(SMALL_CPU, 16, 60).tokens_per_s
    assert made[-1].asks < 16


@pytest.mark.parametrize("agents_at_once", [1, 16])
def test_a_head_that_does_not_pay_is_tried_on_few_texts_and_reads_no_other(agents_at_once: int) -> None:
    """Each pass that a head reads is one of a trial, whose price is bounded."""
    made: list[SimulatedDrafter] = []

    def with_head(timer: Timer) -> list[SimulatedDrafter]:
        made[:] = [*chat(timer), replace(head(timer), chance=constant(0.1))]
        return made

    tokens, rate = 4000 // agents_at_once, Rate(SMALL_CPU)
    done = simulate(
        SMALL_CPU, with_head, SpecConfig((*LIST, "block")), agents_at_once, tokens, answer=64, controller=rate
    )
    without = simulate(SMALL_CPU, chat, SpecConfig(LIST), agents_at_once, tokens, answer=64)
    trials = 2 + EXPLORED * done.tokens / (TRIAL_PASSES * TRIAL_SHARE * 400 / 4300)
    assert 0 < made[-1].asks <= made[-1].read <= trials * (TRIAL_PASSES + 1)
    assert made[-1].read < 0.05 * len(done.rounds)
    assert done.tokens_per_s >= 0.985 * without.tokens_per_s


def test_a_head_that_begins_to_pay_is_found() -> None:
    """After many texts on which it is of no use."""

    def chance(seq: str, position: int) -> float:
        return 0.1 if int(seq.partition("/")[2]) < 20 else 0.9

    def with_head(timer: Timer) -> list[SimulatedDrafter]:
        return [*chat(timer), replace(head(timer), chance=chance)]

    done = simulate(SMALL_CPU, with_head, SpecConfig((*LIST, "block")), 1, 8000, answer=64)
    asked = [int(r.request.partition("/")[2]) for r in done.rounds if "block" in r.asked]
    assert len([text for text in asked if text < 20]) < 64
    assert len([text for text in asked if text > 100]) > 200


def test_a_head_that_reads_a_text_from_its_middle_on_is_not_asked_before() -> None:
    """It has no draft before it has read a pass, which says nothing of the drafts that it would make."""
    made: list[SimulatedDrafter] = []

    def with_head(timer: Timer) -> list[SimulatedDrafter]:
        made[:] = [replace(head(timer), us=50, read_us=5)]
        return made

    done = simulate(SMALL_CPU, with_head, SpecConfig(("block",)), 4, 400, answer=64)
    asked = [r for r in done.rounds if "block" in r.asked]
    assert asked
    assert all(r.uncut for r in asked)


def seconds_at_first(timer: Timer) -> list[SimulatedDrafter]:
    return [replace(one, first_us=3e6) for one in agents(timer)]


def prompts_indexed(timer: Timer) -> list[SimulatedDrafter]:
    return [replace(one, begin_us=300) for one in agents(timer)]


def head_at_first(timer: Timer) -> list[SimulatedDrafter]:
    quick = replace(head(timer), us=100, read_us=3, read_every=17)
    return [replace(quick, first_us=3e4, begin_us=300, prompt_us=4000)]


@pytest.mark.parametrize(
    ("make", "names"),
    [(seconds_at_first, LIST), (prompts_indexed, LIST), (head_at_first, ("block",))],
)
def test_what_happens_once_is_no_price_of_later_drafts(make: Make, names: tuple[str, ...]) -> None:
    """A compiler that runs in the first draft of all, a prompt that is indexed in the first of a text, or a
    prompt whose hidden states are read.

    A pass of this machine is shorter than each of them.
    """
    adaptive, fixed = (
        simulate(SMALL_GPU, make, spec, 1, 1000, prompt=9000, answer=64)  # in three pieces
        for spec in (SpecConfig(names), SpecConfig(names, 5, adaptive=False))
    )
    decoding = [
        sum(r.target_us + r.draft_us for r in outcome.rounds if r.rows < 64 and r.draft_us < 3000)
        / outcome.tokens
        for outcome in (adaptive, fixed)
    ]
    assert decoding[0] <= 1.07 * decoding[1]


# Of a mixture of 128 experts, 8 used, by `bench experts`: rows choose experts of their own, or the same.
OWN_EXPERTS = CostTable({256: {1: 1.61, 2: 2.41, 4: 3.94, 8: 6.30, 16: 9.83}})
SAME_EXPERTS = CostTable({256: {1: 1.53, 2: 1.75, 4: 2.03, 8: 2.72, 16: 4.43}})


def drafted(outcome: Outcome) -> float:
    """Tokens a round."""
    return sum(len(r.draft.tokens) for r in outcome.rounds) / len(outcome.rounds)


def test_drafts_of_a_mixture_are_as_long_as_its_passes_allow() -> None:
    """The curve is measured with rows that share no experts. Text may share them: passes show it."""
    spec, tokens = SpecConfig(LIST), 1500
    apart = simulate(OWN_EXPERTS, agents, spec, 1, tokens, controller=Rate(OWN_EXPERTS))
    shared = simulate(SAME_EXPERTS, agents, spec, 1, tokens, controller=Rate(OWN_EXPERTS))
    assert drafted(shared) > 1.2 * drafted(apart)
    best = simulate(SAME_EXPERTS, agents, spec, 1, tokens, controller=Rate(SAME_EXPERTS))
    assert shared.tokens_per_s >= 0.97 * best.tokens_per_s
    misled = simulate(OWN_EXPERTS, agents, spec, 1, tokens, controller=Rate(SAME_EXPERTS))
    assert misled.tokens_per_s >= 0.97 * apart.tokens_per_s


def test_a_mixture_is_never_much_slower_than_plain_decoding() -> None:
    fast = simulate(OWN_EXPERTS, chat, SpecConfig(LIST), 1, 1500)
    assert fast.tokens_per_s >= 0.98 * plain(OWN_EXPERTS, 1, 1500).tokens_per_s
    fixed = simulate(OWN_EXPERTS, chat, SpecConfig(LIST, 8, adaptive=False), 1, 1500)
    assert fixed.tokens_per_s < 0.85 * plain(OWN_EXPERTS, 1, 1500).tokens_per_s  # what the curve saves


def test_drafters_that_seemed_dear_are_tried_again_though_no_answer_is_long_enough_to_pay_for_it() -> None:
    """With many at once an ask took far longer. Passes are so short that one answer could not try one."""

    def speed(own_us: float) -> float:
        rate = Rate(SMALL_GPU)
        simulate(SMALL_GPU, chat, SpecConfig(LIST), 1, 1000, answer=48, controller=rate)
        rate._texts.clear()
        rate.estimates.own_us = own_us
        return simulate(SMALL_GPU, chat, SpecConfig(LIST), 1, 3000, answer=48, controller=rate).tokens_per_s

    assert speed(300) > 0.95 * speed(0)


def test_nobody_would_be_asked_where_the_controller_says_so_beforehand() -> None:
    at_first = later = 0
    for seed in range(8):
        drawn, rate = random_scenario(seed, loads=(2, 4, 8)), Doubted()
        spec = SpecConfig(drawn.names)
        simulate(drawn.cost, drawn.drafters, spec, drawn.agents, 60, answer=20, controller=rate)
        at_first, later = at_first + rate.at_first, later + rate.later
    assert at_first > 40 < later
