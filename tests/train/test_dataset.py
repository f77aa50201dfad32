"""Answers are stored whole, batched the same way every time, and held-out ones are left alone."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import DataError, UsageError
from paceline.train.data.dataset import MIN_ANSWER_TOKENS, Answers, Batch
from support import examples

VOCAB = 200


def some_answers(count: int = 60, seed: int = 0, **other: str) -> Answers:
    """Answer i of prompts that begin with i; held-out ones say tokens from 100 on."""
    rng = np.random.default_rng(seed)
    out = rng.random(count) < 0.3
    lengths = rng.integers(1, 40, (count, 2))
    return Answers.of(
        [[i, *rng.integers(0, 100, n - 1)] for i, (n, _) in enumerate(lengths)],
        [rng.zipf(1.5, n) % 90 + 100 * o for (_, n), o in zip(lengths, out, strict=True)],
        sampled=(rng.random(count) < 0.5).tolist(),
        held_out=out.tolist(),
        constrained=(rng.random(count) < 0.5).tolist(),
        always=[7, 150, 199],
        vocab_size=VOCAB,
        **{"target": "t", "tokenizer": "k", **other},
    )


def same(a: Answers, b: Answers) -> bool:
    names = ("tokens", "offsets", "prompt_lens", "sampled", "held_out", "constrained", "always")
    equal = all(np.array_equal(getattr(a, n), getattr(b, n)) for n in names)
    return equal and (a.vocab_size, a.target, a.tokenizer) == (b.vocab_size, b.target, b.tokenizer)


def rows(batch: Batch) -> list[tuple[list[int], list[int]]]:
    """Prompt and answer of each row."""
    found = []
    for tokens, length, own in zip(batch.tokens, batch.lengths.tolist(), batch.loss_mask, strict=True):
        assert not own[length:].any()
        assert not tokens[length:].any()
        said = int(own.sum())
        assert own[length - said : length].all()
        found.append((tokens[: length - said].tolist(), tokens[length - said : length].tolist()))
    return found


def test_saved_answers_come_back(tmp_path: Path) -> None:
    made = some_answers()
    (tmp_path / "answers.npz.0123.new").touch()  # of a writer that was killed
    made.save(tmp_path / "answers.npz")
    assert same(Answers.load(tmp_path / "answers.npz"), made)
    assert [path.name for path in tmp_path.iterdir()] == ["answers.npz"]


def test_a_file_that_holds_no_answers_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "answers.npz"
    for content in (b"", b"PK\x03\x04 and no more", b"text"):
        path.write_bytes(content)
        with pytest.raises(DataError, match="holds no answers"):
            Answers.load(path)
    np.savez(path, version=np.array([object()], dtype=object))
    with pytest.raises(DataError, match="holds no answers"):  # nothing is unpickled
        Answers.load(path)


@settings(max_examples=examples(30))
@given(st.integers(0, 9), st.integers(40, 400), st.integers(10, 90))
def test_an_epoch_has_every_usable_training_answer_once(seed: int, budget: int, max_len: int) -> None:
    made = some_answers()
    seen: list[int] = []
    for batch in made.batches(seed, budget, max_len):
        assert batch.tokens.shape[1] <= max_len
        assert batch.tokens.numel() <= budget or len(batch.tokens) == 1
        for prompt, answer in rows(batch):
            i = prompt[0]
            seen.append(i)
            assert prompt == made.prompt(i).tolist()
            assert answer == made.answer(i).tolist()[: max_len - len(prompt)]
            assert len(answer) >= min(MIN_ANSWER_TOKENS, len(made.answer(i)))
    assert sorted(seen) == made.usable("training", max_len).tolist()
    assert not made.held_out[seen].any()


def test_batches_follow_the_seed() -> None:
    def epoch(seed: int) -> list[list[list[int]]]:
        return [batch.tokens.tolist() for batch in some_answers().batches(seed, 300, 64)]

    assert epoch(1) == epoch(1)
    assert epoch(1) != epoch(2)


def test_answers_of_one_batch_are_of_about_one_length() -> None:
    made = some_answers(2000)
    batches = list(made.batches(0, 2000, 100))
    padded = sum(batch.tokens.numel() for batch in batches)
    assert padded < 1.6 * sum(int(batch.lengths.sum()) for batch in batches)


def test_held_out_answers_are_had_by_asking_for_them() -> None:
    made = some_answers()
    seen = [prompt[0] for batch in made.batches(0, 200, 100, "held out") for prompt, _ in rows(batch)]
    assert sorted(seen) == made.which("held out").tolist()
    with pytest.raises(UsageError, match="allow longer prompts"):
        list(made.batches(0, 100, 1))


def test_what_either_part_holds_out_stays_held_out() -> None:
    one, two = some_answers(), some_answers(seed=0)
    two.held_out[:] = False
    both = one + two
    assert len(both) == 120
    assert np.array_equal(both.held_out[60:], one.held_out)
    assert both.answer(61).tolist() == two.answer(1).tolist()
    assert torch.equal(*(next(a.batches(3, 500, 64)).tokens for a in (one + two, both)))
    with pytest.raises(UsageError, match="different models"):
        one + some_answers(target="other")


def test_the_draft_vocabulary_is_what_training_answers_say_most() -> None:
    made = some_answers(400)
    said = made.answer_tokens("training")
    counts = np.bincount(said, minlength=VOCAB)
    found = made.draft_ids(20)
    assert len(found.ids) == 20
    assert set(made.always) <= set(found.ids)
    assert np.all(np.diff(found.ids) > 0)
    rest = [i for i in found.ids if i not in made.always]
    left_out = [i for i in range(VOCAB) if i not in found.ids]
    assert min(counts[rest]) >= max(counts[left_out])
    out = made.answer_tokens("held out")
    assert found.coverage == pytest.approx(np.isin(out, found.ids).mean())
    assert found.coverage < 0.1  # held-out answers say other words, and were not looked at
    assert made.draft_ids(VOCAB).coverage == 1.0
    never = np.flatnonzero(counts == 0)[-4:]
    many = made.draft_ids(int((counts > 0).sum()) + len(made.always) + 4, preferred=never).ids
    assert set(never) <= set(many)
    assert set(np.flatnonzero(counts)) <= set(many)
    for size in (2, VOCAB + 1):
        with pytest.raises(UsageError, match="3 to 200"):
            made.draft_ids(size)
