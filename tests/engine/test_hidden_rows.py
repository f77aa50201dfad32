"""Drafters with taps see every row that stays in the target's cache, once, in order, and no other row."""

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.config import EngineConfig, SamplingParams, SpecConfig
from paceline.drafters.heads.head_cache import HeadCache
from paceline.drafters.none import NoDrafter
from paceline.engine.control import Fixed
from paceline.engine.engine import Engine
from paceline.errors import CacheFull
from paceline.testing import ToyCursor, ToyTarget
from paceline.types import ROOT, Ask, Bits, Draft, Drafter, Feed, HiddenRows, Scores, Seq
from support import examples

VOCAB = 5  # so that random guesses are often right
TAPS = (0, 3)


@pytest.fixture(autouse=True)
def nothing_fails(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """The engine goes on without a drafter that fails, so what a reader asserts would be lost."""
    yield
    assert not [r.message for r in caplog.records if r.levelname == "ERROR"]


class Reader(Drafter):
    """Guesses random trees, and checks all that it reads against the text that was committed."""

    name = "reader"
    taps = TAPS

    def __init__(self, seed: int = 0) -> None:
        self.read_to: dict[str, int] = {}
        self.rows = self.from_guesses = 0
        self._rng = np.random.default_rng(seed)
        self._kept = HeadCache((VOCAB,))
        self._pure = ToyTarget(VOCAB)

    def begin(self, seq: Seq) -> None:
        self.read_to[seq.id] = seq.computed
        self._kept.begin(seq)

    def draft(self, asks: Sequence[Ask]) -> list[Draft]:
        return [self._tree(ask) for ask in asks]

    def _tree(self, ask: Ask) -> Draft:
        n = int(self._rng.integers(0, ask.budget + 1))
        tokens = tuple(int(t) for t in self._rng.integers(0, VOCAB, n))
        if ask.seq.spec.tree_width == 1:
            return Draft(tokens)
        return Draft(tokens, tuple(int(self._rng.integers(ROOT, i)) if i else ROOT for i in range(n)))

    def on_hidden(self, hidden_rows: Sequence[HiddenRows]) -> None:
        for part in hidden_rows:
            seq = part.seq
            assert set(part.hidden) == set(self.taps)
            assert part.start == self.read_to[seq.id]
            stop = part.start + len(part.hidden[0])
            self.read_to[seq.id] = stop
            assert stop == seq.computed
            assert stop < len(seq.tokens)  # a token follows every row: EAGLE needs it
            self.from_guesses += sum(1 for p in range(part.start, stop) if p >= seq.prompt_len)
            self.rows += stop - part.start
            for i, position in enumerate(range(part.start, stop)):
                logits = self._pure.logits(seq.tokens[: position + 1]).astype(np.float32)
                for tap in TAPS:
                    assert part.hidden[tap][i].tolist() == pytest.approx(list((tap + 1) * logits), rel=1e-6)
            self._kept.append(seq.id, part.start, part.hidden[0])

    def end(self, seq: Seq) -> None:
        self._kept.end(seq)
        self.read_to.pop(seq.id)


class Tapped(ToyTarget):
    """Notes which layers were asked for, and may be full."""

    def __init__(self, most: int = 10**6) -> None:
        super().__init__(VOCAB)
        self.asked: list[tuple[int, ...]] = []
        self._most = most

    def forward(self, feeds: Sequence[Feed], taps: Sequence[int] = ()) -> Scores:
        held = sum(map(len, self._rows.values())) + sum(len(f.tokens) + len(f.draft) for f in feeds)
        if held > self._most:
            raise CacheFull("full")
        self.asked.append(tuple(taps))
        return super().forward(feeds, taps)


def a_seq(name: str, length: int, spec: SpecConfig, seed: int, temperature: float = 0.8) -> Seq:
    params = SamplingParams(temperature=temperature, seed=seed, max_tokens=12)
    return Seq(name, [(3 * i + seed) % VOCAB for i in range(length)], length, params, spec)


def run(engine: Engine, seqs: Sequence[Seq]) -> None:
    for seq in seqs:
        engine.submit(seq)
    while engine.busy:
        engine.step()


@settings(max_examples=examples(40))
@given(
    seed=st.integers(0, 999),
    width=st.integers(1, 3),
    batch=st.integers(1, 4),
    chunk=st.integers(1, 9),
    most=st.sampled_from([30, 10**6]),
)
def test_every_row_that_stays_is_seen_once(seed: int, width: int, batch: int, chunk: int, most: int) -> None:
    """Any chunking, batch and tree, and a cache so small that sequences must go back to waiting."""
    reader, target = Reader(seed), Tapped(most)
    config = EngineConfig(prefill_chunk=chunk, max_batch=3)
    engine = Engine(target, {"reader": reader}, Fixed(), config=config)
    spec = SpecConfig(("reader",), tree_width=width, adaptive=False)
    seqs = [a_seq(f"s{i}", 2 + 5 * i, spec, seed + i) for i in range(batch)]
    run(engine, seqs)
    computed = sum(len(seq.tokens) - 1 for seq in seqs)  # the last token of each is never fed
    assert reader.rows == computed if most > 30 else reader.rows >= computed
    assert not reader.read_to


def test_accepted_tokens_are_among_them() -> None:
    reader = Reader()
    engine = Engine(Tapped(), {"reader": reader}, Fixed())
    seqs = [a_seq(f"s{i}", 3, SpecConfig(("reader",), adaptive=False), i) for i in range(8)]
    run(engine, seqs)
    assert reader.from_guesses == 8 * 11


class LateEnd(ToyCursor):
    """Knows that the output has ended only once it has computed the mask after it."""

    known = False

    @property
    def finished(self) -> bool:
        return self.known

    def fill(self, row: Bits) -> bool:
        if ToyCursor.finished.fget(self):  # type: ignore[attr-defined]
            self.known = True
            return False
        return super().fill(row)


def test_an_end_that_only_the_next_mask_tells_shows_no_row_without_a_token_after_it() -> None:
    reader = Reader()
    engine = Engine(Tapped(), {"reader": reader}, Fixed())
    spec = SpecConfig(("reader",), max_draft=0)
    seqs = [a_seq(f"s{i}", 3, spec, i) for i in range(2)]
    seqs[0].cursor = LateEnd(lambda tokens: None if len(tokens) < 4 else set())
    run(engine, seqs)
    assert [len(seq.output) for seq in seqs] == [4, 12]
    assert reader.rows == (3 + 4 - 1) + (3 + 12 - 1)


def test_only_the_sequences_of_those_who_want_to_read_cost_anything() -> None:
    reader, target = Reader(), Tapped()
    engine = Engine(target, {"reader": reader, "none": NoDrafter()}, Fixed())
    plain = SpecConfig(("none",))
    run(engine, [a_seq("plain", 4, plain, 1)])
    assert set(target.asked) == {()}
    run(engine, [a_seq("plain", 4, plain, 1), a_seq("read", 4, SpecConfig(("none", "reader")), 1)])
    assert TAPS in target.asked
    assert reader.rows == 15


def test_a_row_too_early_is_caught(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The check above can fail: a target that gives each row the state of the row before."""

    def late(self: ToyTarget, feeds: Sequence[Feed], taps: Sequence[int] = ()) -> Scores:
        scores = right(self, feeds, taps)
        moved = {tap: torch.roll(rows, 1, 0) for tap, rows in scores.hidden.items()}
        return Scores(scores.logits, scores.starts, scores.rows, moved)

    right = ToyTarget.forward
    monkeypatch.setattr(ToyTarget, "forward", late)
    run(
        Engine(ToyTarget(VOCAB), {"reader": Reader()}, Fixed()),
        [a_seq("s", 5, SpecConfig(("reader",)), 1)],
    )
    assert "AssertionError in on_hidden" in caplog.text
    caplog.clear()


@pytest.mark.parametrize("what", ["begin", "draft", "on_hidden", "observe", "end"])
def test_a_drafter_that_fails_fails_no_request(
    what: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("broken")

    said = []
    for name in ("none", "reader"):
        reader = Reader()
        if name == "reader":
            monkeypatch.setattr(reader, what, broken)
        seq = a_seq("s", 5, SpecConfig((name,)), 12)
        run(Engine(ToyTarget(VOCAB), {"reader": reader, "none": NoDrafter()}, Fixed()), [seq])
        said.append(seq.tokens)
    assert said[0] == said[1]
    assert f"RuntimeError in {broken.__name__}" in caplog.text
    caplog.clear()
