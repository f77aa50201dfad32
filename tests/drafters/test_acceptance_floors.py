"""Each drafter earns its keep on its home ground, and only by what it knows.

A drafter that guessed nothing would pass every other test.
"""

from collections.abc import Callable, Iterator

import pytest

from paceline.advise.replay import ReplayStats, follow, replay
from paceline.drafters.drafter_list import DrafterList
from paceline.drafters.mailbox import Mailbox
from paceline.drafters.ngram import Ngram
from paceline.drafters.none import NoDrafter
from paceline.drafters.prediction import Prediction
from paceline.drafters.suffix import Suffix, SuffixSettings
from paceline.types import Ask, Draft, Drafter, Seq
from support.agent_text import Turn, conversation, edited_code, encode, shuffled

Knowledge = Callable[[list[int]], list[int]]


def from_the_prompt(drafter: Drafter, known: Knowledge) -> float:
    stats = ReplayStats()
    for turn in conversation(seed=1):
        stats += replay(drafter, known(turn.prompt), turn.output)
    return stats.tokens_per_pass


def from_the_past(known: Knowledge) -> float:
    """The prompts say nothing; other conversations were had before."""
    drafter, stats = Suffix(), ReplayStats()
    for seed in range(2, 8):
        for turn in conversation(seed):
            drafter.end(Seq("past", known(turn.prompt + turn.output), len(turn.prompt)))
    drafter.settings = SuffixSettings(remember=False)
    for turn in conversation(seed=1):
        stats += replay(drafter, encode("\n"), turn.output)
    return stats.tokens_per_pass


def from_the_post(known: Knowledge) -> float:
    """A client that knows the text and is one pass late: each draft is based on the text before the last."""
    _, output = edited_code()
    mailbox, guessed = Mailbox(), known(output)
    seq, stats, seen = Seq("a", [0], 1), ReplayStats(), 0
    mailbox.open(seq.id, max(output) + 1)
    while stats.tokens < len(output):
        mailbox.post(seq.id, seen, guessed[seen : seen + 16])
        seen = stats.tokens
        (draft,) = mailbox.draft([Ask(seq, 8)])
        rest = output[stats.tokens :]
        path = follow(draft, rest)[: len(rest) - 1]
        seq.tokens.extend(rest[: len(path) + 1])
        stats += ReplayStats(len(path) + 1, 1, len(draft), len(path))
    return stats.tokens_per_pass


def from_the_prediction(known: Knowledge) -> float:
    before, after = edited_code()
    return replay(Prediction(), [], after, prediction=known(before)).tokens_per_pass


@pytest.mark.parametrize(
    ("name", "floor", "play"),
    [
        ("ngram", 3.5, lambda known: from_the_prompt(Ngram(), known)),
        ("suffix", 3.5, lambda known: from_the_prompt(Suffix(SuffixSettings(remember=False)), known)),
        ("suffix memory", 2.3, from_the_past),
        ("prediction", 3.5, from_the_prediction),
        ("mailbox", 3.5, from_the_post),
        ("relay", 3.5, lambda known: from_the_prompt(DrafterList([NoDrafter(), Ngram()]), known)),
    ],
)
def test_floor_on_home_ground(name: str, floor: float, play: Callable[[Knowledge], float]) -> None:
    assert play(list) >= floor
    assert play(shuffled) < 1.5


def test_memory_adds_to_what_the_prompt_says() -> None:
    alone = from_the_prompt(Suffix(SuffixSettings(remember=False)), list)
    drafter = Suffix()
    for seed in range(2, 8):
        for turn in conversation(seed):
            drafter.end(Seq("past", turn.prompt + turn.output, len(turn.prompt)))
    assert from_the_prompt(drafter, list) > 1.05 * alone


def walk(drafter: Drafter, turn: Turn) -> Iterator[tuple[Draft, list[int]]]:
    """Each draft of a replay, with what was really said."""
    seq = Seq("a", list(turn.prompt), len(turn.prompt))
    while rest := turn.output[len(seq.output) :]:
        (draft,) = drafter.draft([Ask(seq, 8)])
        yield draft, rest
        seq.tokens += rest[: len(follow(draft, rest)) + 1]


def test_stated_chances_come_true() -> None:
    """Over all nodes that were reached, the chances add up to about the tokens that were right."""
    expected, right, reached = 0.0, 0, 0
    for seed in range(1, 5):
        for turn in conversation(seed):
            for draft, rest in walk(Suffix(), turn):
                for chance, guess, token in zip(draft.scores, draft.tokens, rest, strict=False):
                    expected, reached, right = expected + chance, reached + 1, right + (guess == token)
                    if guess != token:
                        break
    assert reached > 500
    assert abs(expected - right) < 0.1 * reached
