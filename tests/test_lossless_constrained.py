"""Under a grammar too, speculative text is plain text, token for token, whatever was drafted.

Grammars are random: most places allow a few tokens, some only one, some any, and some end the output. Ways in
which masks and drafts can fall out of step are shown to be caught.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.config import Accept, EngineConfig, SamplingParams, SpecConfig
from paceline.constraints.draft_masks import Masks, masks
from paceline.drafters import model_free
from paceline.drafters.draft_model import ModelDrafter
from paceline.drafters.grammar import Grammar
from paceline.engine import engine as engine_module
from paceline.engine.control import Fixed, Rate
from paceline.engine.engine import Engine
from paceline.errors import CacheFull, ConstraintError
from paceline.testing import ToyCursor, ToyTarget
from paceline.types import (
    ROOT,
    Ask,
    Bits,
    Controller,
    Cursor,
    Draft,
    Drafter,
    Feed,
    Finish,
    Round,
    Scores,
    Seq,
)
from support import examples

VOCAB = 24
END = 23
LENGTH = 30
PLAIN = SpecConfig(("none",), max_draft=0)
LISTS = [
    ("grammar",),
    ("suffix",),
    ("model",),
    ("wild",),
    ("grammar", "suffix"),
    ("grammar", "model"),
    ("grammar", "recycle"),
    ("grammar", "wild"),
    ("grammar", "suffix", "ngram"),
    ("wild", "grammar"),
]
Rules = Callable[[tuple[int, ...]], set[int] | None]


def rules(seed: int, forced: float = 0.5, ends: float = 0.03, free: float = 0.1) -> Rules:
    """The allowed tokens depend on the last two tokens and on how many there are."""

    def allowed(tokens: tuple[int, ...]) -> set[int] | None:
        rng = random.Random(f"{seed} {tokens[-2:]} {len(tokens) % 7}")
        if tokens and rng.random() < ends:
            return set()
        if rng.random() < free:
            return None
        n = 1 if rng.random() < forced else rng.choice([2, 2, 3, 6, 12])
        return set(rng.sample(range(VOCAB), n))

    return allowed


def spelling(of: Rules, seed: int) -> Callable[[tuple[int, ...]], list[int]]:
    """Guesses at what may come, some of which may not."""

    def spelled(tokens: tuple[int, ...]) -> list[int]:
        rng = random.Random(f"spelled {seed} {tokens}")
        return [rng.choice(sorted(of(tokens) or {0, 1})), rng.randrange(VOCAB)] if rng.random() < 0.4 else []

    return spelled


class Wild(Drafter):
    """Random trees, legal or not."""

    name = "wild"

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)

    def draft(self, asks: Sequence[Ask]) -> list[Draft]:
        return [self._one(int(self._rng.integers(0, a.budget + 1)), a.seq.spec.tree_width) for a in asks]

    def _one(self, n: int, width: int) -> Draft:
        tokens = tuple(int(t) for t in self._rng.integers(0, VOCAB, n))
        parents = tuple(int(self._rng.integers(ROOT, i)) if i else ROOT for i in range(n))
        return Draft(tokens, parents if width > 1 else None, (self.name,) * n)


class Oracle(Drafter):
    """Knows the answer but for every fifth token."""

    name = "oracle"

    def __init__(self, answers: dict[str, list[int]], wrong_every: int = 5) -> None:
        self._answers = answers
        self._wrong = wrong_every

    def draft(self, asks: Sequence[Ask]) -> list[Draft]:
        return [self._one(ask, len(ask.seq.output) + len(ask.after)) for ask in asks]

    def _one(self, ask: Ask, at: int) -> Draft:
        truth = self._answers[ask.seq.id][at : at + ask.budget]
        tokens = [t if (at + i + 1) % self._wrong else (t + 1) % VOCAB for i, t in enumerate(truth)]
        return Draft(tuple(tokens), None, (self.name,) * len(tokens))


@dataclass
class Run:
    """The results of some sequences."""

    outputs: dict[str, list[int]]
    rounds: list[Round]

    @property
    def ends(self) -> dict[str, Finish]:
        return {r.request: r.finish for r in self.rounds if r.finish}

    @property
    def per_pass(self) -> float:
        return sum(len(r.tokens) for r in self.rounds) / sum(1 for r in self.rounds if r.tokens)


def run(
    spec: SpecConfig,
    params: SamplingParams,
    batch: int = 1,
    *,
    make: Callable[[int], Cursor | None] | None = None,
    extra: Sequence[Drafter] = (),
    controller: Controller | None = None,
    target: ToyTarget | None = None,
) -> Run:
    """Sequences with different prompts and grammars; make: the cursor of the i-th."""
    drafters: dict[str, Drafter] = {**model_free(), "model": ModelDrafter(ToyTarget(VOCAB, blur=0.3), VOCAB)}
    drafters |= {d.name: d for d in extra}
    engine = Engine(
        target or ToyTarget(VOCAB),
        drafters,
        controller or Fixed(),
        config=EngineConfig(prefill_chunk=4, max_batch=3),
        eos=frozenset({END}),
    )
    seqs = []
    for i in range(batch):
        prompt = [(7 * i + 3 * j) % VOCAB for j in range(3 + 4 * i)]
        seqs.append(Seq(f"s{i}", prompt, len(prompt), replace(params, choice=i), spec))
        seqs[-1].cursor = (make or grammar)(i)
        engine.submit(seqs[-1])
    rounds = []
    while engine.busy:
        rounds += engine.step()
    return Run({s.id: s.output for s in seqs}, rounds)


def grammar(i: int) -> Cursor:
    return ToyCursor(rules(i), END, spelling(rules(i), i))


def mixed(i: int) -> Cursor | None:
    """Every other sequence is free."""
    return grammar(i) if i % 2 else None


def legal(output: Sequence[int], of: Rules) -> bool:
    for i, token in enumerate(output):
        may = of(tuple(output[:i]))
        if may is not None and token not in may:
            return False
    return True


@pytest.mark.sampled(5)
@pytest.mark.parametrize("drafters", LISTS, ids="+".join)
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.3])
@pytest.mark.parametrize("batch", [1, 5])
@pytest.mark.parametrize("width", [1, 3])
def test_text_equals_plain_decoding(
    drafters: tuple[str, ...], temperature: float, batch: int, width: int
) -> None:
    params = SamplingParams(temperature=temperature, seed=11, max_tokens=LENGTH)
    plain = run(PLAIN, params, batch)
    for k, controller in ((1, Fixed()), (8, Fixed()), (8, Rate())):
        spec = SpecConfig(drafters, max_draft=k, tree_width=width, adaptive=isinstance(controller, Rate))
        fast = run(spec, params, batch, extra=[Wild(k)], controller=controller)
        assert fast.outputs == plain.outputs
        assert fast.ends == plain.ends
    assert all(legal(output, rules(i)) for i, output in enumerate(plain.outputs.values()))


@pytest.mark.parametrize("drafters", LISTS, ids="+".join)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_free_and_constrained_outputs_share_passes(drafters: tuple[str, ...], temperature: float) -> None:
    params = SamplingParams(temperature=temperature, seed=5, max_tokens=LENGTH)
    plain = run(PLAIN, params, 5, make=mixed)
    fast = run(SpecConfig(drafters, adaptive=False, tree_width=2), params, 5, make=mixed, extra=[Wild(3)])
    assert fast.outputs == plain.outputs


OPTIONS = {
    "top_k": SamplingParams(temperature=0.9, top_k=5),
    "top_p": SamplingParams(temperature=0.9, top_p=0.7),
    "min_p": SamplingParams(temperature=1.2, min_p=0.2),
    "penalties": SamplingParams(temperature=0.8, repetition_penalty=1.4, presence_penalty=1.5),
    "frequency": SamplingParams(frequency_penalty=0.9),
    "bias": SamplingParams(temperature=0.8, logit_bias=((3, 2.0), (5, -4.0))),
    "stop token": SamplingParams(temperature=0.8, stop_tokens=(6, 11)),
    "short": SamplingParams(temperature=0.8, max_tokens=7),
    "ignore_eos": SamplingParams(temperature=0.8, ignore_eos=True),
    "min_tokens": SamplingParams(temperature=0.8, stop_tokens=(6, 11), min_tokens=9),
    "all": SamplingParams(
        temperature=0.8, top_k=9, top_p=0.9, min_p=0.01, repetition_penalty=1.1, logprobs=2, stop_tokens=(2,)
    ),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_every_option_is_honoured_under_a_grammar(option: str, seed: int) -> None:
    params = replace(OPTIONS[option], seed=seed, max_tokens=min(OPTIONS[option].max_tokens, LENGTH))
    plain = run(PLAIN, params, 4)
    for drafters in (("oracle",), ("grammar", "oracle"), ("grammar", "wild")):
        spec = SpecConfig(drafters, adaptive=False)
        fast = run(spec, params, 4, extra=[Oracle(plain.outputs), Wild(seed)])
        assert fast.outputs == plain.outputs
        assert fast.ends == plain.ends
        for name in plain.outputs:
            said = [[p for r in of.rounds if r.request == name for p in r.logprobs] for of in (plain, fast)]
            assert said[0] == said[1]


def test_a_grammar_that_is_complete_ends_an_output_before_its_shortest_length() -> None:
    params = SamplingParams(seed=1, max_tokens=LENGTH, min_tokens=9)
    for make, output in ((sentence({1}, {2}, {END}), [1, 2, END]), (sentence({1}, {2}, {3, END}), [1, 2, 3])):
        for spec in (PLAIN, SpecConfig(("grammar",), adaptive=False)):
            assert run(spec, params, make=make).outputs == {"s0": output}


@settings(max_examples=examples(60))
@given(
    seed=st.integers(0, 2**32),
    temperature=st.sampled_from([0.0, 0.5, 1.0, 2.0]),
    width=st.integers(1, 4),
    k=st.integers(1, 12),
    forced=st.sampled_from([0.0, 0.3, 0.9]),
    free=st.sampled_from([0.0, 0.3, 0.9]),
    drafters=st.sampled_from(LISTS),
)
def test_any_tree_any_seed_any_grammar(
    seed: int, temperature: float, width: int, k: int, forced: float, free: float, drafters: tuple[str, ...]
) -> None:
    def make(i: int) -> Cursor:
        of = rules(seed + i, forced, 0.05, free)
        return ToyCursor(of, END, spelling(of, seed))

    params = SamplingParams(temperature=temperature, seed=seed, max_tokens=15)
    plain = run(PLAIN, params, 2, make=make)
    spec = SpecConfig(drafters, max_draft=k, tree_width=width, adaptive=False)
    fast = run(spec, params, 2, make=make, extra=[Wild(seed)])
    assert fast.outputs == plain.outputs


@pytest.mark.sampled(3)
@pytest.mark.parametrize("accept", ["residual", "block"])
@pytest.mark.parametrize("drafters", [("model",), ("grammar",), ("grammar", "model"), ("grammar", "suffix")])
def test_residual_rules_under_a_grammar(accept: Accept, drafters: tuple[str, ...]) -> None:
    """Equal to plain decoding at temperature 0, legal above; their law is shown by enumeration elsewhere."""
    params = SamplingParams(seed=3, max_tokens=LENGTH)
    spec = SpecConfig(drafters, adaptive=False, accept=accept)
    assert run(spec, params, 4).outputs == run(PLAIN, params, 4).outputs
    for seed in range(4):
        warm = run(spec, replace(params, temperature=1.0, seed=seed), 4)
        assert "error" not in warm.ends.values()
        assert all(legal(output, rules(i)) for i, output in enumerate(warm.outputs.values()))


def sentence(*places: set[int] | None, more: set[int] | None = None) -> Callable[[int], Cursor]:
    """One set of tokens for each place, then `more` for ever, or the end."""
    after = set[int]() if more is None else more
    return lambda _: ToyCursor(lambda t: places[len(t)] if len(t) < len(places) else after, END)


def test_a_legal_end_inside_a_draft_ends_the_output_there() -> None:
    """Nothing after it is committed, and nobody asks what may follow it: the toy cursor would tell."""
    params = SamplingParams(seed=1, max_tokens=LENGTH)
    make = sentence({1}, {2}, {END}, more={3, 4})
    guess = {"s0": [1, 2, END, 3, 3, 3]}
    for drafters in (("oracle",), ("grammar",), ("grammar", "oracle")):
        fast = run(SpecConfig(drafters, adaptive=False), params, make=make, extra=[Oracle(guess, 99)])
        assert fast.outputs == {"s0": [1, 2, END]}
        assert fast.ends == {"s0": "stop"}
        assert len(fast.rounds) == 1


def test_the_end_of_the_grammar_inside_a_draft_ends_the_output_there() -> None:
    params = SamplingParams(seed=1, max_tokens=LENGTH)
    guess = {"s0": [1, 2, 5, 5, 5]}
    fast = run(SpecConfig(("oracle",)), params, make=sentence({1}, {2}), extra=[Oracle(guess, 99)])
    assert fast.outputs == {"s0": [1, 2]}
    assert fast.ends == {"s0": "stop"}


def test_a_grammar_that_allows_nothing_is_refused_at_once() -> None:
    with pytest.raises(ConstraintError, match="nothing but an empty answer"):
        run(PLAIN, SamplingParams(), make=sentence())


class Broken(ToyCursor):
    """Goes wrong where `fails` says so."""

    fails: Callable[[tuple[int, ...]], bool] = staticmethod(lambda _: False)
    refuses: Callable[[tuple[int, ...]], bool] = staticmethod(lambda _: False)

    def fill(self, row: Bits) -> bool:
        if self.fails(self.tokens):
            raise ConstraintError("too much work")
        return super().fill(row)

    def advance(self, token: int) -> bool:
        return not self.refuses((*self.tokens, token)) and super().advance(token)


def broken(
    i: int,
    fails: Callable[[tuple[int, ...]], bool] = lambda _: False,
    refuses: Callable[[tuple[int, ...]], bool] = lambda _: False,
) -> Cursor:
    cursor = Broken(rules(i, ends=0.0), END, spelling(rules(i), i))
    cursor.fails, cursor.refuses = fails, refuses
    return cursor


@pytest.mark.parametrize("drafters", LISTS, ids="+".join)
@pytest.mark.parametrize("kind", ["fails", "refuses"])
def test_an_error_ends_the_output_that_comes_by_and_no_other(drafters: tuple[str, ...], kind: str) -> None:
    params = SamplingParams(temperature=0.9, seed=2, max_tokens=LENGTH)
    long = run(PLAIN, params, 4, make=broken)
    name = max(long.outputs, key=lambda n: len(long.outputs[n]))
    there = tuple(long.outputs.pop(name)[:9])
    assert len(there) == 9

    def make(i: int) -> Cursor:
        return broken(i, **{kind: lambda t: t == there} if f"s{i}" == name else {})

    plain = run(PLAIN, params, 4, make=make)
    fast = run(SpecConfig(drafters, adaptive=False), params, 4, make=make, extra=[Wild(1)])
    assert fast.ends == plain.ends
    assert fast.ends[name] == "error"
    assert fast.outputs == plain.outputs
    assert len(fast.outputs.pop(name)) == 9
    assert fast.outputs == long.outputs
    (error,) = [r.error for r in fast.rounds if r.error]
    assert isinstance(error, ConstraintError)
    assert ("too much work" if kind == "fails" else "then could not take it") in str(error)


@pytest.mark.parametrize("kind", ["fails", "refuses"])
@pytest.mark.parametrize("width", [1, 3])
def test_an_error_that_the_output_never_reaches_ends_nothing(kind: str, width: int) -> None:
    params = SamplingParams(temperature=0.9, seed=2, max_tokens=LENGTH)
    long = run(PLAIN, params, 4, make=broken)
    reached = {tuple(output[:n]) for output in long.outputs.values() for n in range(LENGTH + 1)}

    def make(i: int) -> Cursor:
        return broken(i, **{kind: lambda t: t not in reached})

    for drafters in (("wild",), ("grammar", "wild"), ("model",)):
        spec = SpecConfig(drafters, tree_width=width, adaptive=False)
        fast = run(spec, params, 4, make=make, extra=[Wild(4)])
        assert fast.outputs == long.outputs
        assert fast.ends == long.ends


class Narrow(ToyTarget):
    """A cache with room for so many rows."""

    def __init__(self, room: int) -> None:
        super().__init__(VOCAB)
        self._room = room

    def forward(self, feeds: Sequence[Feed], taps: Sequence[int] = ()) -> Scores:
        held = sum(len(rows) for rows in self._rows.values())
        if held + sum(len(f.tokens) + len(f.draft) for f in feeds) > self._room:
            raise CacheFull("no room")
        return super().forward(feeds, taps)


@pytest.mark.parametrize("drafters", [("grammar",), ("grammar", "wild"), ("wild",)], ids="+".join)
def test_a_full_cache_changes_no_text(drafters: tuple[str, ...]) -> None:
    """Guesses are dropped, then sequences put back to waiting; their grammars stay where they were."""
    params = SamplingParams(temperature=0.8, seed=6, max_tokens=LENGTH)
    plain = run(PLAIN, params, 3)
    for room in (48, 60, 80):
        spec = SpecConfig(drafters, adaptive=False)
        fast = run(spec, params, 3, extra=[Wild(room)], target=Narrow(room))
        assert fast.outputs == plain.outputs


def one_row_late(of: Masks) -> Masks:
    return Masks([of.rows[max(0, i - 1)] for i in range(len(of.rows))])


def only_the_first(of: Masks) -> Masks:
    return Masks([of.rows[0]] * len(of.rows))


def no_last(of: Masks) -> Masks:
    return Masks([*of.rows[:-1], None])


def none_but_the_first(of: Masks) -> Masks:
    return Masks([row if i == 0 else None for i, row in enumerate(of.rows)])


PARAMS = SamplingParams(temperature=0.8, seed=11, max_tokens=LENGTH)


def goes_wrong() -> bool:
    """True if any drafter shows it: by another text, by an error, or by an assertion of the doubles."""
    for drafters in LISTS:
        try:
            plain = run(PLAIN, PARAMS, 4)
            fast = run(SpecConfig(drafters, adaptive=False), PARAMS, 4, extra=[Wild(1)])
        except AssertionError:
            return True
        if fast.outputs != plain.outputs or fast.ends != plain.ends or "error" in plain.ends.values():
            return True
    return False


def test_nothing_goes_wrong_by_itself() -> None:
    assert not goes_wrong()


@pytest.mark.parametrize("spoil", [one_row_late, only_the_first, no_last, none_but_the_first])
def test_masks_out_of_step_are_caught(
    monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Masks], Masks]
) -> None:
    def spoiled(cursor: Cursor, draft: Draft, width: int) -> Masks:
        made = masks(cursor, draft, width)
        return spoil(made) if len(draft) else made

    monkeypatch.setattr(engine_module, "masks", spoiled)
    assert goes_wrong()


def test_a_cursor_that_stays_behind_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Engine._append

    def lazy(self: Engine, seq: Seq, new: Sequence[int]) -> Finish | None:
        """Wrong: reads the last token only."""
        whole = seq.cursor
        for token in new[:-1]:
            seq.cursor = None
            if (end := real(self, seq, [token])) is not None:
                return end
            seq.cursor = whole
        return real(self, seq, new[-1:])

    monkeypatch.setattr(Engine, "_append", lazy)
    assert goes_wrong()


@contextmanager
def unending(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def ends(self: Engine, seq: Seq, token: int) -> Finish | None:
        """Wrong: does not ask whether the grammar is at its end."""
        return "length" if len(seq.output) >= seq.params.max_tokens else None

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "_ends", ends)
        yield


def test_an_end_that_is_ignored_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    with unending(monkeypatch):
        assert goes_wrong()


def fixed_text(_: int) -> Cursor:
    """Seven tokens that must come, then one of three."""
    return ToyCursor(lambda t: {(5 * len(t)) % VOCAB} if len(t) % 8 else {1, 2, 3}, END)


class Speechless(Grammar):
    name = "speechless"

    def draft(self, asks: Sequence[Ask]) -> list[Draft]:
        return [Draft() for _ in asks]


def test_the_floor_of_the_grammar_drafter() -> None:
    """Where the grammar says most, most is guessed; a drafter that is not told gains nothing."""
    params = SamplingParams(temperature=1.0, seed=8, max_tokens=80)
    for controller in (Fixed(), Rate()):
        fast = run(SpecConfig(("grammar",)), params, make=fixed_text, controller=controller)
        assert fast.per_pass > 3
    slow = run(SpecConfig(("speechless",)), params, make=fixed_text, extra=[Speechless()])
    assert slow.per_pass == 1
    assert slow.outputs == fast.outputs


def test_the_floor_falls_when_nothing_is_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ToyCursor, "forced", lambda self: [])
    params = SamplingParams(temperature=1.0, seed=8, max_tokens=80)
    assert run(SpecConfig(("grammar",), adaptive=False), params, make=fixed_text).per_pass == 1
