"""The model drafter under a grammar."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.config import Accept, SamplingParams, SpecConfig
from paceline.drafters.draft_model import ModelDrafter
from paceline.drafters.drafter_list import DrafterList
from paceline.drafters.grammar import Grammar
from paceline.drafters.support.grammar_filter import FORCED
from paceline.sampling import History, distribution
from paceline.testing import ToyCursor, ToyTarget
from paceline.types import Ask, Cursor, Draft, Feed, Scores, Seq
from support import examples
from support.grammars import VOCAB, permits, random_rules, sentence

ANY = set(range(VOCAB))


class Counting(ToyTarget):
    """Notes how many tokens each pass was fed, and reads only those it has."""

    def __init__(self, vocab: int = VOCAB) -> None:
        super().__init__(vocab)
        self.fed: list[int] = []

    def forward(self, feeds: Sequence[Feed], taps: Sequence[int] = ()) -> Scores:
        assert all(token < self.vocab_size for feed in feeds for token in feed.tokens)
        self.fed += [len(feed.tokens) for feed in feeds]
        return super().forward(feeds, taps)


def a_seq(temperature: float = 0.8, accept: Accept = "match", width: int = 1, seed: int = 1) -> Seq:
    spec = SpecConfig(("model",), tree_width=width, accept=accept)
    return Seq("a", [1, 2, 3], 3, SamplingParams(temperature=temperature, seed=seed), spec)


def draft_of(seq: Seq, cursor: Cursor | None, budget: int = 6, forced_budget: int = 0) -> Draft:
    drafter = ModelDrafter(ToyTarget(VOCAB), VOCAB)
    drafter.begin(seq)
    return drafter.draft([Ask(seq, budget, (), cursor, forced_budget)])[0]


@settings(max_examples=examples(60))
@given(
    st.integers(0, 500),
    st.sampled_from([0.0, 0.8]),
    st.sampled_from(["match", "residual", "block"]),
    st.integers(1, 3),
    st.integers(0, 2),
)
def test_only_valid_tokens_are_drafted_and_sampled(
    seed: int, temperature: float, accept: Accept, width: int, forced_budget: int
) -> None:
    rules, cursor = random_rules(seed), ToyCursor(random_rules(seed))
    seq = a_seq(temperature, accept, 1 if accept == "block" else width, seed)
    draft = draft_of(seq, cursor, forced_budget=forced_budget)
    assert len(draft) > 0
    assert cursor.tokens == ()
    for node, score in enumerate(draft.scores):
        said = tuple(draft.tokens[i] for i in draft.path(node))
        assert permits(rules, said)
        assert score < FORCED
        if draft.q is not None:
            assert draft.q[node].sum() == pytest.approx(1)
            assert set(draft.q[node].nonzero().flatten().tolist()) <= rules(said[:-1])
    assert (draft.q is not None) == (accept != "match")


def test_q_is_the_masked_distribution_itself() -> None:
    seq, cursor = a_seq(accept="residual"), sentence({1, 4}, {0, 2, 5})
    draft = draft_of(seq, cursor)
    assert draft.q is not None
    for node, allowed in enumerate([{1, 4}, {0, 2, 5}]):
        row = ToyTarget(VOCAB).logits([*seq.tokens, *draft.tokens[:node]]).astype(np.float32)
        bits = np.array([sum(1 << token for token in allowed)], np.uint32)
        want = distribution(
            row, seq.params, History(seq.tokens, 3, draft.tokens[:node]), bits
        ).probabilities()
        assert draft.q[node].numpy() == pytest.approx(want)


def test_where_anything_may_come_the_grammar_changes_nothing() -> None:
    for seq in (a_seq(), a_seq(0.0), a_seq(accept="residual"), a_seq(width=3)):
        free, plain = draft_of(seq, ToyCursor(lambda _: None)), draft_of(seq, None)
        assert replace(free, q=None) == replace(plain, q=None)
        assert (free.q is None) == (plain.q is None)


def test_nothing_grows_past_the_end() -> None:
    assert len(draft_of(a_seq(), sentence(ANY, ANY))) == 2
    assert draft_of(a_seq(), sentence(ANY, {5}, ANY, eos=5)).tokens[1:] == (5,)
    assert not draft_of(a_seq(), sentence())


def test_masks_are_made_only_where_a_token_is_drafted() -> None:
    cursor = sentence(ANY, ANY, ANY, ANY)
    draft = draft_of(a_seq(), cursor, budget=3)
    assert cursor.filled == [draft.tokens[:n] for n in range(3)]


def test_a_vocabulary_of_odd_size_and_another_than_the_targets() -> None:
    seq = a_seq()
    for own in (33, 70):
        drafter = ModelDrafter(Counting(own), 65)
        drafter.begin(seq)
        (draft,) = drafter.draft([Ask(seq, 4, (), sentence({2, 31, 32}, {32}, {64, 3}, {5}))])
        assert draft.tokens[1] == 32
        drafter.end(seq)


def test_a_token_the_model_lacks_is_its_last() -> None:
    drafter, seq = ModelDrafter(Counting(33), 65), a_seq()
    drafter.begin(seq)
    (draft,) = drafter.draft([Ask(seq, 4, (), sentence({2}, {64}, {3}))])
    assert draft.tokens == (2, 64)


def test_what_is_forced_is_left_to_the_grammar_and_read_in_one_go() -> None:
    model = Counting()
    drafter, seq = ModelDrafter(model, VOCAB), a_seq()
    relay = DrafterList([Grammar(), drafter])
    relay.begin(seq)
    cursor = sentence({1}, {2}, ANY, ANY, {3}, {4}, {5}, ANY, {0})
    (draft,) = relay.draft([Ask(seq, 3, (), cursor, 9)])
    assert [(source, len(list(run))) for source, run in groupby(draft.sources)] == [
        ("grammar", 2),
        ("model", 2),
        ("grammar", 3),
        ("model", 1),
        ("grammar", 1),
    ]
    assert model.fed == [5, 1, 4]  # prompt and forced run; one guess; the next guess and run


def test_without_the_grammar_among_them_the_model_goes_through() -> None:
    drafter, seq = ModelDrafter(ToyTarget(VOCAB), VOCAB), a_seq()
    relay = DrafterList([drafter])
    relay.begin(seq)
    (draft,) = relay.draft([Ask(seq, 5, (), sentence({1}, {2}, ANY, {3}, ANY, ANY), 9)])
    assert len(draft) == 5
    assert set(draft.sources) == {"model"}


def test_a_long_prompt_is_read_in_pieces_and_holds_up_no_other_sequence() -> None:
    target, chunk = Counting(), 32
    drafter = ModelDrafter(target, VOCAB, prefill_chunk=chunk)
    params = SamplingParams(temperature=0.0)
    long = Seq("long", [token % VOCAB for token in range(120)], 120, params, SpecConfig(("model",)))
    short = replace(a_seq(temperature=0.0), id="short", tokens=[1, 2, 3])
    for seq in (long, short):
        drafter.begin(seq)
    rounds: list[list[Draft]] = []
    while not rounds or not rounds[-1][0]:
        target.fed.clear()
        rounds.append(drafter.draft([Ask(long, 2), Ask(short, 2)]))
        assert sum(target.fed) <= chunk + 6  # with a few pending tokens and those that are drafted
        assert len(rounds[-1][1]) == 2  # whatever the state of the other
    assert len(rounds) == 4
    whole = ModelDrafter(ToyTarget(VOCAB), VOCAB)
    whole.begin(long)
    assert rounds[-1][0].tokens == whole.draft([Ask(long, 2)])[0].tokens


def test_prompts_of_several_sequences_share_the_rows_of_one_draft() -> None:
    target, chunk = Counting(), 48
    drafter = ModelDrafter(target, VOCAB, prefill_chunk=chunk)
    seqs = [
        replace(a_seq(temperature=0.0), id=str(i), tokens=[(i + t) % VOCAB for t in range(60)])
        for i in range(6)
    ]
    for seq in seqs:
        drafter.begin(seq)
    for _ in range(16):
        target.fed.clear()
        drafts = drafter.draft([Ask(seq, 1) for seq in seqs])
        assert sum(target.fed) <= chunk + 16 * len(seqs)
    assert all(drafts)


def test_strangers_are_strangers_to_the_draft_model_too() -> None:
    opened = []

    class Noting(ToyTarget):
        def open(self, seq: Seq) -> int:
            opened.append(seq.anonymous)
            return super().open(seq)

    drafter = ModelDrafter(Noting(VOCAB), VOCAB)
    for anonymous in (True, False):
        drafter.begin(replace(a_seq(), id=str(anonymous), anonymous=anonymous))
    assert opened == [True, False]
