"""Drafts from outside are used from where the text is, and never where the text contradicts them."""

import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.config import SamplingParams, SpecConfig
from paceline.drafters import model_free
from paceline.drafters.mailbox import MAX_MISSES, PROBE, PROBE_EVERY, Mailbox, Patience
from paceline.engine.control import Fixed
from paceline.engine.engine import Engine
from paceline.engine.engine_thread import EngineThread
from paceline.testing import ToyTarget
from paceline.types import Ask, Draft, Round, Scores, Seq, Verdict

NO_SCORES = Scores(torch.empty(0, 0), ())
SPEC = SpecConfig(("mailbox",), max_draft=8)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def drafted(mailbox: Mailbox, seq: Seq, budget: int = 8, after: tuple[int, ...] = ()) -> tuple[int, ...]:
    return mailbox.draft([Ask(seq, budget, after)])[0].tokens


@pytest.fixture
def mailbox() -> Mailbox:
    made = Mailbox()
    made.open("a", vocab_size=100)
    return made


@pytest.fixture
def seq() -> Seq:
    return Seq("a", [1, 2, 3], 2, spec=SPEC)  # one token of output


def test_a_post_at_the_end_of_the_text_is_the_draft(mailbox: Mailbox, seq: Seq) -> None:
    mailbox.post("a", 1, (10, 11, 12))
    draft = mailbox.draft([Ask(seq, 2)])[0]
    assert draft.tokens == (10, 11)
    assert draft.sources == ("mailbox", "mailbox")
    assert all(0 < score < 1 for score in draft.scores)


def test_a_late_post_is_used_from_where_the_text_is(mailbox: Mailbox, seq: Seq) -> None:
    mailbox.post("a", 0, (3, 10, 11))
    assert drafted(mailbox, seq) == (10, 11)
    seq.tokens += [10]
    assert drafted(mailbox, seq) == (11,)
    seq.tokens += [11]
    assert drafted(mailbox, seq) == ()


def test_a_post_that_the_text_contradicts_is_dropped_for_good(mailbox: Mailbox, seq: Seq) -> None:
    mailbox.post("a", 0, (4, 10, 11))
    assert drafted(mailbox, seq) == ()
    mailbox.post("a", 1, (10, 11))
    seq.tokens += [12]
    assert drafted(mailbox, seq) == ()
    seq.tokens[-1] = 10  # no later text brings it back
    assert drafted(mailbox, seq) == ()


def test_a_post_beyond_the_text_is_dropped(mailbox: Mailbox, seq: Seq) -> None:
    mailbox.post("a", 2, (10, 11))
    assert drafted(mailbox, seq) == ()


def test_the_newest_post_counts(mailbox: Mailbox, seq: Seq) -> None:
    mailbox.post("a", 1, (10, 11))
    mailbox.post("a", 1, (20,))
    assert drafted(mailbox, seq) == (20,)


def test_tokens_beyond_the_vocabulary_are_never_drafted(mailbox: Mailbox, seq: Seq) -> None:
    for strange in (100, 1 << 24, -1):
        mailbox.post("a", 1, (10, strange, 11))
        assert drafted(mailbox, seq) == (10,)


def test_drafts_of_others_are_continued(mailbox: Mailbox, seq: Seq) -> None:
    mailbox.post("a", 1, (10, 11, 12))
    assert drafted(mailbox, seq, after=(10, 11)) == (12,)
    assert drafted(mailbox, seq, after=(20,)) == ()
    assert drafted(mailbox, seq) == (10, 11, 12)


def test_nothing_is_kept_for_sequences_that_nobody_has_opened(mailbox: Mailbox) -> None:
    assert not mailbox.post("b", 0, (1, 2))
    mailbox.close("a")
    assert not mailbox.post("a", 0, (1, 2))
    assert len(mailbox) == 0


def rejected(mailbox: Mailbox, seq: Seq, times: int = 1) -> None:
    for _ in range(times):
        seq.tokens.append(11)
        mailbox.observe([seq], [Verdict((), 11, Draft((10,), None, ("mailbox",)))], NO_SCORES)


def test_drafts_that_are_rejected_lose_their_credit(mailbox: Mailbox, seq: Seq) -> None:
    scores = list[float]()
    while mailbox.useful("a"):
        mailbox.post("a", len(seq.output), (10, 12, 13))
        scores.append(mailbox.draft([Ask(seq, 8)])[0].scores[0])
        rejected(mailbox, seq)
    assert scores == sorted(scores, reverse=True)
    assert scores[-1] < 0.3 < 0.6 < scores[0]
    assert len(scores) < 16


def test_of_drafts_without_credit_a_small_one_is_verified_now_and_then(mailbox: Mailbox, seq: Seq) -> None:
    rejected(mailbox, seq, 40)
    verified = []
    for _ in range(3 * PROBE_EVERY):
        mailbox.post("a", len(seq.output), (10,) * 8)
        verified.append(len(drafted(mailbox, seq)))
        rejected(mailbox, seq)
    assert verified == 3 * [PROBE, *[0] * (PROBE_EVERY - 1)]


@given(
    st.lists(st.integers(0, 5), max_size=12),
    st.lists(st.tuples(st.integers(0, 14), st.lists(st.integers(0, 8), max_size=6)), max_size=8),
)
def test_a_draft_always_continues_a_post_that_agrees(
    text: list[int], posts: list[tuple[int, list[int]]]
) -> None:
    mailbox, seq = Mailbox(), Seq("a", [9], 1)
    mailbox.open("a", vocab_size=6)
    for token, (base, tokens) in zip(text, posts, strict=False):
        mailbox.post("a", base, tokens)
        got = drafted(mailbox, seq)
        output = seq.output
        whole = output[base:] + list(got)
        assert not got or (base <= len(output) and tokens[: len(whole)] == whole and max(got) < 6)
        seq.tokens.append(token)


# Waiting


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def patient(clock: Clock) -> Mailbox:
    made = Mailbox(clock)
    made.open("a", vocab_size=100, patience=Patience(2.0, reading_s=30.0, total_s=50.0))
    return made


def test_a_sequence_waits_for_a_draft_up_to_its_deadline(patient: Mailbox, seq: Seq) -> None:
    assert patient.held_until(seq) == 2.0
    patient.post("a", 0, (4,))  # contradicted by the text: another is on its way
    assert patient.held_until(seq) == 2.0
    patient.post("a", 1, (10,))
    assert patient.held_until(seq) == 0.0


def test_an_empty_draft_ends_the_wait(patient: Mailbox, seq: Seq) -> None:
    patient.post("a", 1, ())
    assert patient.held_until(seq) == 0.0
    seq.tokens.append(5)
    assert patient.held_until(seq) > 0


def test_nobody_is_waited_for_who_never_sends(patient: Mailbox, seq: Seq, clock: Clock) -> None:
    for _ in range(MAX_MISSES):
        assert patient.held_until(seq) > clock.now
        clock.now += 3
        assert patient.held_until(seq) <= clock.now
        seq.tokens.append(5)
        patient.observe([seq], [Verdict((), 5)], NO_SCORES)
    assert patient.held_until(seq) == 0.0
    patient.post("a", 0, (8,))
    assert patient.held_until(seq) > clock.now


def test_nobody_is_waited_for_whose_drafts_are_wrong(patient: Mailbox, seq: Seq) -> None:
    rejected(patient, seq, 40)
    assert patient.held_until(seq) == 0.0


def test_the_rest_of_a_draft_ends_the_wait_only_if_it_fills_a_pass(patient: Mailbox, seq: Seq) -> None:
    patient.post("a", 1, (10,) * 12)
    seq.tokens += [10] * 4
    assert patient.held_until(seq) == 0.0  # 8 are left
    seq.tokens.append(10)
    assert patient.held_until(seq) > 0
    assert drafted(patient, seq) == (10,) * 7
    patient.post("a", 6, (10,) * 3)  # an answer, however short
    assert patient.held_until(seq) == 0.0
    seq.tokens += [10] * 3  # nothing is left of it: that is no answer
    assert patient.held_until(seq) > 0


def test_nobody_is_waited_for_where_no_draft_fits(patient: Mailbox, seq: Seq) -> None:
    seq.params = SamplingParams(max_tokens=2)
    assert patient.held_until(seq) == 0.0
    seq.params = SamplingParams(max_tokens=3)
    assert patient.held_until(seq) > 0
    seq.tokens.pop()  # the first token, though its prompt may be in the cache
    assert patient.held_until(seq) == 0.0


def passed(mailbox: Mailbox, seq: Seq) -> None:
    seq.tokens.append(5)
    mailbox.observe([seq], [Verdict((), 5)], NO_SCORES)


def test_a_drafter_that_reads_the_prompt_gets_more_time_until_its_first_draft(
    patient: Mailbox, seq: Seq, clock: Clock
) -> None:
    clock.now = 7.0
    passed(patient, seq)
    assert patient.held_until(seq) == 9.0
    patient.read_on("a")
    clock.now = 9.5
    assert patient.held_until(seq) == 37.0
    clock.now = 11.0
    passed(patient, seq)  # the time counts from the first token on
    assert patient.held_until(seq) == 37.0
    patient.post("a", 2, (8,))
    assert patient.held_until(seq) == 13.0
    clock.now = 36.0
    passed(patient, seq)
    patient.read_on("a")
    assert patient.held_until(seq) == 38.0  # as much as anybody gets


def test_patience_ends_whatever_a_client_does(patient: Mailbox, seq: Seq, clock: Clock) -> None:
    passed(patient, seq)
    for _ in range(100):
        end = patient.held_until(seq)
        if end <= clock.now:
            break
        clock.now = end - 0.01  # just in time, each time, and right
        patient.post("a", len(seq.output), (5,))
        seq.tokens.append(5)
        patient.observe([seq], [Verdict((0,), 5, Draft((5,), None, ("mailbox",)))], NO_SCORES)
    assert 49 < clock.now <= 50


def run_together(patience_s: float) -> dict[str, tuple[list[int], int]]:
    """Text and passes of two sequences in one engine; one waits for drafts, which an oracle posts."""
    drafters = model_free()
    mailbox = drafters["mailbox"]
    assert isinstance(mailbox, Mailbox)
    target = ToyTarget()
    thread = EngineThread(Engine(target, drafters, Fixed()))
    seqs = [Seq(name, [1, 2], 2, SamplingParams(0.8, seed=3, max_tokens=20), SPEC) for name in "ab"]
    seqs[1].params = SamplingParams(0.8, seed=4, max_tokens=20)
    done = {seq.id: threading.Event() for seq in seqs}
    passes = dict.fromkeys("ab", 0)

    def send() -> None:
        base = len(seqs[0].output)
        mailbox.post("a", base, EXPECTED["a"][0][base : base + 4])
        thread.between_passes(lambda: None)

    def deliver(r: Round) -> None:
        passes[r.request] += 1
        if r.request == "a" and patience_s and r.finish is None:
            threading.Timer(0.03, send).start()
        if r.finish is not None:
            done[r.request].set()

    if patience_s:
        mailbox.open("a", target.vocab_size, Patience(patience_s))
        seqs[0].held_until = lambda: mailbox.held_until(seqs[0])
    for seq in seqs:
        thread.submit(seq, deliver, lambda error: None)
    thread.start()
    assert all(event.wait(60) for event in done.values())
    thread.stop(60)
    return {seq.id: (seq.output, passes[seq.id]) for seq in seqs}


EXPECTED: dict[str, tuple[list[int], int]] = {}


def test_a_sequence_that_waits_holds_up_no_other_and_its_text_is_the_same() -> None:
    EXPECTED.update(run_together(0.0))
    assert EXPECTED["a"][1] == EXPECTED["b"][1] == 20
    waiting = run_together(60.0)
    assert {name: output for name, (output, _) in waiting.items()} == {
        name: output for name, (output, _) in EXPECTED.items()
    }
    assert waiting["a"][1] <= 5
    assert waiting["b"][1] == 20
