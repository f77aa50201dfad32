"""Training shows a draft model what serving shows it, and asks it for the answer alone."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.config import SamplingParams, SpecConfig
from paceline.drafters.draft_model import drafter_for
from paceline.drafters.draft_model.vocab_mapping import SameVocab
from paceline.errors import UsageError
from paceline.text import Tokenizer
from paceline.train.data.dataset import Answers
from paceline.train.draft_model.pipeline import retokenize, retokenizer_for, same_tokenizer
from paceline.types import Ask, Feed, Scores, Seq
from support import examples
from support.tokenizers import PASSAGE, Reader, pair

TWO = pair()
DRAFT, TARGET = TWO.draft, TWO.target
START, END = TARGET.encode("<|im_start|>"), TARGET.encode("<|im_end|>")
spell = TWO.target_encoder.encode


def answers_of(*pairs: tuple[Sequence[int], Sequence[int]], tokenizer: Tokenizer = TARGET) -> Answers:
    return Answers.of(
        [prompt for prompt, _ in pairs],
        [said for _, said in pairs],
        sampled=[i % 2 == 1 for i in range(len(pairs))],
        held_out=[i % 3 == 2 for i in range(len(pairs))],
        constrained=[False] * len(pairs),
        always=[],
        vocab_size=tokenizer.vocab_size,
        target="someone",
        tokenizer=tokenizer.fingerprint,
    )


def told_of(answers: Answers, draft: Tokenizer = DRAFT, target: Tokenizer = TARGET) -> Answers:
    retokenizer = retokenizer_for(draft, target, draft.vocab_size, target.vocab_size)
    return retokenize(answers, retokenizer, draft.vocab_size, draft.fingerprint)


def shown(made: Answers, i: int) -> list[int]:
    return [*made.prompt(i).tolist(), *made.answer(i).tolist()]


class Watched(Reader):
    """Notes what it reads in each pass."""

    def __init__(self) -> None:
        super().__init__(DRAFT)
        self.read: list[list[int]] = []

    def forward(self, feeds: Sequence[Feed], taps: Sequence[int] = ()) -> Scores:
        self.read.append(self._rows[feeds[0].seq_id] + list(feeds[0].tokens))
        return super().forward(feeds, taps)


def served(prompt: Sequence[int], said: Sequence[int]) -> list[list[int]]:
    """The input of the drafter `model` to its model: for the prompt, and after every token of the answer."""
    model = Watched()
    drafter = drafter_for(model, DRAFT, TARGET, TARGET.vocab_size)
    seq = Seq("a", list(prompt), len(prompt), SamplingParams(), SpecConfig(("model",), adaptive=False))
    drafter.begin(seq)
    found = []
    for token in (None, *said):
        if token is not None:
            seq.tokens.append(token)
        model.read.clear()
        drafter.draft([Ask(seq, 1)])
        found.append(model.read[0])  # later passes read its own guesses too
    drafter.end(seq)
    return found


@settings(max_examples=examples(40))
@given(st.text("the cat\n,é9", min_size=1, max_size=40), st.integers(0, 12))
def test_training_shows_what_serving_shows(text: str, cut: int) -> None:
    prompt = [*START, *spell(b"user\nthe hat"), *END, *START, *spell(PASSAGE[:cut] + b"\n")]
    said = [*spell(text.encode()), *END]
    steps = served(prompt, said[:-1])
    made = told_of(answers_of((prompt, said)))
    before, whole = made.prompt(0).tolist(), shown(made, 0)
    assert steps[0][: len(before) - 1] == before[:-1]  # the last may span prompt and answer
    assert whole == [*steps[-1], *DRAFT.encode("<end_of_turn>", bos=False)]


def test_only_the_answer_is_trained_on() -> None:
    prompt, said = (
        [*START, *spell(b"the cat"), *END, *START, *spell(b"the\n")],
        [*spell(b"mat, the hat"), *END],
    )
    made = told_of(answers_of((prompt, said)))
    own = b"".join(DRAFT.piece(token) for token in made.answer(0).tolist())
    assert own == b"mat, the hat<end_of_turn>"


def test_a_token_that_spans_prompt_and_answer_is_read_and_not_trained_on() -> None:
    made = told_of(answers_of((spell(b"a c"), spell(b"at sat"))))  # " cat" is one token of the draft model's
    assert DRAFT.piece(int(made.prompt(0)[-1])) == b" cat"
    assert b"".join(DRAFT.piece(t) for t in made.answer(0).tolist()) == b" sat"


def test_the_same_tokenizer_changes_nothing() -> None:
    assert same_tokenizer(TARGET, TARGET)
    assert not same_tokenizer(DRAFT, TARGET)
    pairs = [(spell(b"the cat"), spell(b" sat")), (spell(b"a hat"), spell(b" ran"))]
    made = told_of(answers_of(*pairs), TARGET)
    assert [(p, a) for p, a in pairs] == [(made.prompt(i).tolist(), made.answer(i).tolist()) for i in (0, 1)]


def test_what_is_held_out_stays_held_out() -> None:
    pairs = [(spell(b"the"), spell(b" hat"))] * 7
    made = told_of(answers_of(*pairs))
    assert made.which("held out").tolist() == [2, 5]
    assert made.sampled.tolist() == [i % 2 == 1 for i in range(7)]
    assert made.tokenizer == DRAFT.fingerprint


def test_what_the_draft_model_cannot_read_is_left_out() -> None:
    answers = answers_of(([1, 2], [3, 40]), ([1, 2], [3, 4]), ([50, 2], [3, 4]))
    made = retokenize(answers, SameVocab(32, 64), 32, "draft")
    assert (len(made), made.answer(0).tolist()) == (1, [3, 4])
    with pytest.raises(UsageError, match="can read none"):
        retokenize(answers, SameVocab(2, 64), 2, "draft")


@pytest.mark.large
def test_a_real_pair_reads_a_chat_as_it_is_served(qwen_path: Path, smollm2_path: Path) -> None:
    target, draft = Tokenizer.load(qwen_path), Tokenizer.load(smollm2_path)
    prompt = target.encode_chat([{"role": "user", "content": "What is 12 + 30 in Łódź?"}])
    said = [*target.encode('{"name": "add", "arguments": {"a": 12, "b": 30}}'), *target.encode("<|im_end|>")]
    made = told_of(answers_of((prompt, said), tokenizer=target), draft, target)
    assert draft.decode(made.prompt(0).tolist()) == target.decode(prompt)
    assert draft.decode(made.answer(0).tolist()) == target.decode(said)
    assert made.answer(0)[-1] in draft.eos_ids
