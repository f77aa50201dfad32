"""Under `match`, speculative text is plain text, token for token, whatever was drafted.

A drafter that guesses nothing would pass all of that, so each has an acceptance floor too, here or in its own
tests. And a test that cannot fail proves nothing, so wrong rules, rows and positions are shown to be caught.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.config import Accept, EngineConfig, SamplingParams, SpecConfig
from paceline.constraints.draft_masks import Masks, without_ends
from paceline.drafters import model_free
from paceline.drafters.draft_model import ModelDrafter, SelfDrafter
from paceline.engine import accept, verify
from paceline.engine import engine as engine_module
from paceline.engine.control import Fixed, Rate
from paceline.engine.engine import Engine
from paceline.sampling import Doubles, Floats
from paceline.testing import ToyTarget
from paceline.types import ROOT, Ask, Controller, Draft, Drafter, Feed, Round, Scores, Seq, Verdict
from support import examples

VOCAB = 24
LENGTH = 40
Judge = Callable[[Seq, Draft, Floats, Masks], Verdict]
PLAIN = SpecConfig(drafters=("none",), max_draft=0)


class Wild(Drafter):
    """Random trees: mostly wrong, sometimes right, every shape."""

    name = "wild"

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)

    def draft(self, asks: Sequence[Ask]) -> list[Draft]:
        return [
            self._one(int(self._rng.integers(0, ask.budget + 1)), ask.seq.spec.tree_width) for ask in asks
        ]

    def _one(self, n: int, width: int) -> Draft:
        tokens = tuple(int(t) for t in self._rng.integers(0, VOCAB, n))
        if width == 1:
            return Draft(tokens, None, (self.name,) * n)
        parents = tuple(int(self._rng.integers(ROOT, i)) if i else ROOT for i in range(n))
        return Draft(tokens, parents, (self.name,) * n)


class Oracle(Drafter):
    """Knows the answer but for every fifth token, so that drafts are cut at every place."""

    name = "oracle"

    def __init__(self, answers: dict[str, list[int]], wrong_every: int = 5) -> None:
        self._answers = answers
        self._wrong = wrong_every

    def draft(self, asks: Sequence[Ask]) -> list[Draft]:
        return [self._one(ask) for ask in asks]

    def _one(self, ask: Ask) -> Draft:
        at = len(ask.seq.output)
        truth = self._answers[ask.seq.id][at : at + ask.budget]
        tokens = [t if (at + i + 1) % self._wrong else (t + 1) % VOCAB for i, t in enumerate(truth)]
        return Draft(tuple(tokens), None, (self.name,) * len(tokens))


def run(
    spec: SpecConfig,
    params: SamplingParams,
    batch: int = 1,
    extra: Sequence[Drafter] = (),
    controller: Controller | None = None,
    target: ToyTarget | None = None,
    eos: frozenset[int] = frozenset(),
    chunk: int = 4,
) -> tuple[dict[str, list[int]], list[Round]]:
    """Answers and rounds of `batch` sequences with prompts of different lengths."""
    target = target or ToyTarget(VOCAB)
    drafters: dict[str, Drafter] = {**model_free(), "model": ModelDrafter(ToyTarget(VOCAB, blur=0.3), VOCAB)}
    drafters |= {"self": SelfDrafter(target, (0, 1, 3)), **{d.name: d for d in extra}}
    engine = Engine(
        target,
        drafters,
        controller or Fixed(),
        config=EngineConfig(prefill_chunk=chunk, max_batch=3),
        eos=eos,
    )
    seqs = []
    for i in range(batch):
        prompt = [(7 * i + 3 * j) % VOCAB for j in range(3 + 4 * i)]
        guess = tuple((5 * j) % VOCAB for j in range(LENGTH))
        seqs.append(Seq(f"s{i}", prompt, len(prompt), replace(params, choice=i), spec, prediction=guess))
        engine.submit(seqs[-1])
    rounds = []
    while engine.busy:
        rounds += engine.step()
    return {s.id: s.output for s in seqs}, rounds


def passes(rounds: Sequence[Round]) -> int:
    return len(rounds)


LISTS = [
    ("ngram",),
    ("suffix",),
    ("prediction",),
    ("recycle",),
    ("model",),
    ("self",),
    ("wild",),
    ("suffix", "ngram"),
    ("suffix", "recycle"),
    ("prediction", "suffix", "model"),
    ("suffix", "self"),
]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("drafters", LISTS, ids="+".join)
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.3])
@pytest.mark.parametrize("batch", [1, 5])
@pytest.mark.parametrize("width", [1, 3])
def test_text_equals_plain_decoding(
    drafters: tuple[str, ...], temperature: float, batch: int, width: int
) -> None:
    params = SamplingParams(temperature=temperature, seed=11, max_tokens=LENGTH)
    plain, _ = run(PLAIN, params, batch)
    for k in (1, 3, 8):
        spec = SpecConfig(drafters, max_draft=k, tree_width=width, adaptive=False)
        fast, _ = run(spec, params, batch, [Wild(k)])
        assert fast == plain


OPTIONS = {
    "top_k": SamplingParams(temperature=0.9, top_k=5),
    "top_p": SamplingParams(temperature=0.9, top_p=0.7),
    "min_p": SamplingParams(temperature=1.2, min_p=0.2),
    "repetition": SamplingParams(temperature=0.8, repetition_penalty=1.4),
    "presence": SamplingParams(temperature=0.8, presence_penalty=1.5),
    "frequency": SamplingParams(frequency_penalty=0.9),
    "bias": SamplingParams(temperature=0.8, logit_bias=((3, 2.0), (5, -4.0))),
    "stop token": SamplingParams(temperature=0.8, stop_tokens=(6,)),
    "short": SamplingParams(temperature=0.8, max_tokens=7),
    "min_tokens": SamplingParams(temperature=0.8, stop_tokens=(6, 1, 19), min_tokens=13),
    "all": SamplingParams(
        temperature=0.8,
        top_k=9,
        top_p=0.9,
        min_p=0.01,
        repetition_penalty=1.1,
        presence_penalty=0.3,
        logprobs=2,
    ),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_every_option_is_honoured_under_speculation(option: str, seed: int) -> None:
    params = replace(OPTIONS[option], seed=seed)
    plain, plain_rounds = run(PLAIN, params, 2)
    spec = SpecConfig(("oracle",), max_draft=8, adaptive=False)
    fast, rounds = run(spec, params, 2, [Oracle(plain)])
    assert fast == plain
    assert passes(rounds) < passes(plain_rounds)
    said = {i: [p for r in plain_rounds if r.request == i for p in r.logprobs] for i in plain}
    also = {i: [p for r in rounds if r.request == i for p in r.logprobs] for i in plain}
    assert said == also
    ends = [sorted((r.request, r.finish) for r in rs if r.finish) for rs in (plain_rounds, rounds)]
    assert ends[0] == ends[1]


def test_end_of_text_inside_a_draft_ends_the_output_there() -> None:
    params = SamplingParams(temperature=0.9, seed=4, max_tokens=LENGTH)
    long, _ = run(PLAIN, params)
    eos = frozenset({long["s0"][9]})
    plain, _ = run(PLAIN, params, eos=eos)
    fast, rounds = run(SpecConfig(("oracle",), adaptive=False), params, extra=[Oracle(long, 99)], eos=eos)
    assert fast == plain
    assert rounds[-1].finish == "stop"
    assert len(fast["s0"]) <= 10


ENDS = frozenset({2, 9, 17})


@pytest.mark.sampled(5)
@pytest.mark.parametrize("drafters", LISTS, ids="+".join)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("width", [1, 3])
def test_a_shortest_length_is_kept_with_any_drafter(
    drafters: tuple[str, ...], temperature: float, width: int
) -> None:
    params = SamplingParams(temperature=temperature, seed=11, max_tokens=LENGTH, stop_tokens=(5,))
    longer = replace(params, min_tokens=13)
    plain, _ = run(PLAIN, longer, 4, eos=ENDS)
    assert min(map(len, run(PLAIN, params, 4, eos=ENDS)[0].values())) < 13  # it makes a difference
    assert all(len(output) > 13 and not {5, *ENDS} & {*output[:13]} for output in plain.values())
    for k in (1, 3, 8):
        spec = SpecConfig(drafters, max_draft=k, tree_width=width, adaptive=False)
        assert run(spec, longer, 4, [Wild(k)], eos=ENDS)[0] == plain


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_up_to_a_shortest_length_ends_are_impossible_and_nothing_else_changes(temperature: float) -> None:
    params = SamplingParams(temperature=temperature, seed=11, max_tokens=LENGTH)
    never = replace(params, logit_bias=tuple((token, -1e4) for token in ENDS))
    without, _ = run(PLAIN, never, 4)
    for n in (1, 7, LENGTH):
        output, _ = run(PLAIN, replace(params, min_tokens=n), 4, eos=ENDS)
        assert {name: tokens[:n] for name, tokens in output.items()} == {
            name: tokens[:n] for name, tokens in without.items()
        }
    ignored, _ = run(PLAIN, replace(params, min_tokens=9, ignore_eos=True), 4, eos=ENDS)
    assert ignored == run(PLAIN, params, 4)[0]  # where nothing ends an output, nothing is impossible


@pytest.mark.sampled(3)
@pytest.mark.parametrize("accept", ["residual", "block", "typical"])
def test_a_shortest_length_is_kept_by_the_other_rules(accept: Accept) -> None:
    for seed in range(8):
        params = SamplingParams(temperature=1.0, seed=seed, max_tokens=LENGTH, min_tokens=13)
        for drafters in (("model",), ("ngram",)):
            output, _ = run(SpecConfig(drafters, adaptive=False, accept=accept), params, 2, eos=ENDS)
            assert all(len(tokens) > 13 and not ENDS & {*tokens[:13]} for tokens in output.values())


def test_the_first_token_after_the_shortest_length_may_be_an_end() -> None:
    params = SamplingParams(temperature=0.9, seed=11, max_tokens=LENGTH)
    at_once = 0
    for n in range(1, 24):
        longer = replace(params, min_tokens=n)
        plain, _ = run(PLAIN, longer, 4, eos=ENDS)
        at_once += sum(len(output) == n + 1 for output in plain.values())
        spec = SpecConfig(("oracle",), adaptive=False)
        assert run(spec, longer, 4, [Oracle(plain, 99)], eos=ENDS)[0] == plain
    assert at_once > 5


class ChoosingTarget(ToyTarget):
    """Chooses greedily wherever it is told how, and no mask is said to matter."""

    def forward(self, feeds: Sequence[Feed], taps: Sequence[int] = ()) -> Scores:
        scores = super().forward(feeds, taps)
        best = scores.logits.argmax(-1).tolist()
        tokens = [-1] * len(best)
        for feed, start in zip(feeds, scores.starts, strict=True):
            if feed.scored and feed.sampler is not None and feed.sampler.masks is None:
                rows = slice(start, start + 1 + len(feed.draft))
                tokens[rows] = best[rows]
        return replace(scores, tokens=tuple(tokens))


def test_a_target_that_chooses_itself_does_not_before_the_shortest_length() -> None:
    params = SamplingParams(seed=11, max_tokens=LENGTH, min_tokens=13)
    plain, _ = run(PLAIN, params, 4, eos=ENDS)
    for spec in (PLAIN, SpecConfig(("suffix", "model"), adaptive=False)):
        assert run(spec, params, 4, eos=ENDS, target=ChoosingTarget(VOCAB))[0] == plain


def masked_at_the_root(found: Masks, draft: Draft, ends: frozenset[int], missing: int, vocab: int) -> Masks:
    """Wrong: a draft may hold an end."""
    return without_ends(found, draft, ends, min(1, missing), vocab)


def masked_too_far(found: Masks, draft: Draft, ends: frozenset[int], missing: int, vocab: int) -> Masks:
    """Wrong: counts from the beginning of the draft."""
    return without_ends(found, draft, ends, missing + len(draft), vocab)


@pytest.mark.parametrize("mutant", [masked_at_the_root, masked_too_far])
def test_a_wrong_mask_before_the_shortest_length_is_caught(
    monkeypatch: pytest.MonkeyPatch, mutant: Callable[..., Masks]
) -> None:
    params = SamplingParams(temperature=0.9, seed=11, max_tokens=LENGTH, min_tokens=13)
    early = replace(params, min_tokens=0)
    plain, _ = run(PLAIN, params, 4, eos=ENDS)
    monkeypatch.setattr(engine_module, "without_ends", mutant)
    spec = SpecConfig(("oracle",), adaptive=False)
    answers = [plain, run(PLAIN, early, 4, eos=frozenset())[0]]
    assert any(run(spec, params, 4, [Oracle(known, 99)], eos=ENDS)[0] != plain for known in answers)


def test_adaptive_length_changes_speed_not_text() -> None:
    params = SamplingParams(temperature=0.7, seed=5, max_tokens=LENGTH)
    plain, _ = run(PLAIN, params, 3)
    fast, rounds = run(SpecConfig(("model",)), params, 3, controller=Rate())
    assert fast == plain
    assert any(len(r.draft) for r in rounds)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_recycled_trees_change_speed_not_text(width: int, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, seed=6, max_tokens=LENGTH)
    plain, plain_rounds = run(PLAIN, params, 4)
    spec = SpecConfig(("recycle",), 12, width)
    fast, rounds = run(spec, params, 4)
    assert fast == plain
    assert passes(rounds) < passes(plain_rounds)
    assert run(spec, params, 4, controller=Rate())[0] == plain


@settings(max_examples=examples(60))
@given(
    seed=st.integers(0, 2**32),
    temperature=st.sampled_from([0.0, 0.5, 1.0, 2.0]),
    width=st.integers(1, 4),
    k=st.integers(1, 12),
    batch=st.integers(1, 4),
    chunk=st.integers(1, 9),
)
def test_any_tree_any_seed(seed: int, temperature: float, width: int, k: int, batch: int, chunk: int) -> None:
    params = SamplingParams(temperature=temperature, seed=seed, max_tokens=15)
    plain, _ = run(PLAIN, params, batch)
    spec = SpecConfig(("wild",), max_draft=k, tree_width=width, adaptive=False)
    assert run(spec, params, batch, [Wild(seed)], chunk=chunk)[0] == plain


@pytest.mark.parametrize("accept", ["residual", "block"])
def test_residual_rules_equal_plain_decoding_at_temperature_zero(accept: Accept) -> None:
    params = SamplingParams(seed=3, max_tokens=LENGTH)
    plain, _ = run(PLAIN, params, 2)
    for drafters in (("model",), ("self",), ("ngram",)):
        spec = SpecConfig(drafters, adaptive=False, accept=accept)
        assert run(spec, params, 2)[0] == plain


def another_model(_: ToyTarget) -> Drafter:
    return ModelDrafter(ToyTarget(4, memory=1, blur=0.8), 4)


def its_own_layers(target: ToyTarget) -> Drafter:
    drafter = SelfDrafter(target, (0, 2))  # as far from the target's law as that; stops when it gets unsure
    drafter.name = "model"
    return drafter


@pytest.mark.slow
@pytest.mark.parametrize("make", [another_model, its_own_layers])
@pytest.mark.parametrize(("accept", "width"), [("residual", 1), ("residual", 2), ("block", 1)])
def test_residual_rules_keep_the_distribution_through_the_engine(
    accept: Accept, width: int, make: Callable[[ToyTarget], Drafter]
) -> None:
    """First three tokens of many seeds against the target's law, drafted by a real draft model."""
    target, n, vocab = ToyTarget(4, memory=1), examples(2000 * width), 4
    counts = np.zeros((vocab,) * 3)
    nodes = 0
    spec = SpecConfig(("model",), 4, width, adaptive=False, accept=accept)
    engine = Engine(target, {"model": make(target)}, Fixed())
    for first in range(0, n, 16):
        seqs = [
            Seq(f"s{seed}", [1], 1, SamplingParams(temperature=1.0, seed=seed, max_tokens=6), spec)
            for seed in range(first, min(first + 16, n))
        ]
        for seq in seqs:
            engine.submit(seq)
        while engine.busy:
            nodes = max(nodes, *(len(r.draft) for r in engine.step()))
        for seq in seqs:
            counts[tuple(seq.output[:3])] += 1
    assert nodes == 4 if make is another_model else nodes >= 2  # which is not stopped by its doubts
    after = [_softmax(target.logits([a])) for a in range(vocab)]
    want = n * np.einsum("a,ab,bc->abc", after[1], np.array(after), np.array(after))
    big = want > 5
    chi2 = float(((counts - want)[big] ** 2 / want[big]).sum())
    assert chi2 < big.sum() + 4.5 * np.sqrt(2 * big.sum())


def test_residual_trees_where_only_one_token_is_possible() -> None:
    """A law so sharp that all other probabilities are 0: there is no second sibling to draw."""
    params = SamplingParams(temperature=0.003, seed=3, max_tokens=LENGTH)
    spec = SpecConfig(("model",), tree_width=3, adaptive=False, accept="residual")
    out, _ = run(spec, params)
    assert out == run(PLAIN, replace(params, temperature=0.0))[0]


@pytest.mark.parametrize("ends_after", [1, 7, 12])
def test_a_stop_inside_a_draft_ends_the_output_there(ends_after: int) -> None:
    params = SamplingParams(temperature=0.8, seed=9, max_tokens=LENGTH)
    answers, _ = run(PLAIN, params)

    def output(spec: SpecConfig) -> list[int]:
        engine = Engine(ToyTarget(VOCAB), {"oracle": Oracle(answers, 99)}, Fixed())
        told = count(1)
        seq = Seq("s0", [0, 3, 6], 3, params, spec, stopped_by=lambda _: next(told) == ends_after)
        engine.submit(seq)
        while engine.busy:
            last = engine.step()
        assert last[0].finish == "stop"
        return seq.output

    fast = output(SpecConfig(("oracle",), adaptive=False))
    assert fast == output(SpecConfig(())) == answers["s0"][:ends_after]


def _softmax(x: Doubles) -> Doubles:
    e = np.exp(x - x.max())
    return np.asarray(e / e.sum())


def test_shared_noise_makes_a_draft_model_agree() -> None:
    """The floor of the model drafter: its knowledge counts, and so does the noise it shares."""
    params = SamplingParams(temperature=1.0, seed=8, max_tokens=200)

    def per_pass(drafter: Drafter) -> float:
        out, rounds = run(SpecConfig(("m",), max_draft=4, adaptive=False), params, extra=[drafter])
        return len(out["s0"]) / passes(rounds)

    def named(blur: float, seed: int = 0) -> Drafter:
        drafter = ModelDrafter(ToyTarget(VOCAB, seed=seed, blur=blur), VOCAB)
        drafter.name = "m"
        return drafter

    assert per_pass(named(0.0)) > 4.5
    assert per_pass(named(0.3)) > 2.5
    assert per_pass(named(0.3, seed=1)) < 1.6  # another model: its knowledge is shuffled


def test_more_layers_agree_more() -> None:
    """The floor of the drafter `self`."""
    params = SamplingParams(temperature=1.0, seed=8, max_tokens=200)

    def per_pass(*layers: int) -> float:
        target = ToyTarget(VOCAB)
        drafter = SelfDrafter(target, layers)
        spec = SpecConfig(("self",), max_draft=4, adaptive=False)
        out, rounds = run(spec, params, extra=[drafter], target=target)
        return len(out["s0"]) / passes(rounds)

    assert per_pass(0, 1, 2) > 1.4
    assert per_pass(0, 1, 2) > per_pass(1) > 1


def accept_one_more(draft: Draft, choice: Callable[[int], int]) -> Verdict:
    """Wrong: keeps the first guess that was refused too."""
    verdict = accept.match(draft, choice)
    last = verdict.path[-1] if verdict.path else ROOT
    nxt = draft.children(last)
    return Verdict((*verdict.path, nxt[0]), verdict.token) if nxt else verdict


def test_a_wrong_accept_rule_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(temperature=0.7, seed=11, max_tokens=LENGTH)
    plain, _ = run(PLAIN, params)
    monkeypatch.setattr(verify, "match", accept_one_more)
    assert run(SpecConfig(("model",), adaptive=False), params)[0] != plain


def counting_rounds() -> Judge:
    """Wrong: keys the noise by how many rounds there were, not by the place in the output."""
    rounds = count()

    def mutant(seq: Seq, draft: Draft, rows: Floats, masks: Masks) -> Verdict:
        return verify.verify(replace(seq, prompt_len=len(seq.tokens) - next(rounds)), draft, rows, masks)

    return mutant


def one_row_late() -> Judge:
    """Wrong: takes each node's logits from the row before."""

    def mutant(seq: Seq, draft: Draft, rows: Floats, masks: Masks) -> Verdict:
        late = np.concatenate([rows[:1], rows[: len(draft)]])
        return verify.verify(seq, draft, late, masks)

    return mutant


@pytest.mark.parametrize("make", [counting_rounds, one_row_late])
def test_a_wrong_position_is_caught(monkeypatch: pytest.MonkeyPatch, make: Callable[[], Judge]) -> None:
    params = SamplingParams(temperature=0.7, seed=11, max_tokens=LENGTH)

    def output(spec: SpecConfig) -> dict[str, list[int]]:
        monkeypatch.setattr(engine_module, "verify", make())
        return run(spec, params)[0]

    assert output(SpecConfig(("model",), adaptive=False)) != output(PLAIN)


class ForgetfulTarget(ToyTarget):
    """Keeps rows of refused guesses."""

    def keep(self, seq_id: str, length: int, path: Sequence[int] = ()) -> None:
        _, draft = self._loose.get(seq_id, ([], Draft()))
        super().keep(seq_id, length, tuple(range(len(draft))) if draft.parents is None else path)


class ShiftedTarget(ToyTarget):
    """Drops the last row it should keep."""

    def keep(self, seq_id: str, length: int, path: Sequence[int] = ()) -> None:
        super().keep(seq_id, length, path[:-1])


@pytest.mark.parametrize("broken", [ForgetfulTarget, ShiftedTarget])
def test_a_stale_or_missing_cache_row_is_caught(broken: type[ToyTarget]) -> None:
    params = SamplingParams(temperature=0.7, seed=11, max_tokens=LENGTH)
    with pytest.raises(AssertionError, match=r"cache holds rows of another text|fed at a wrong position"):
        run(SpecConfig(("model",), adaptive=False), params, target=broken(VOCAB))


class TellingTarget(ToyTarget):
    """Takes rows that were sketched for its own."""

    def skip_forward(self, feeds: Sequence[Feed], starts: Sequence[int], layers: Sequence[int]) -> Scores:
        scores = super().skip_forward(feeds, starts, layers)
        for feed in feeds:
            self._rows[feed.seq_id] += feed.tokens
        return scores


def test_a_sketched_row_that_stays_is_caught() -> None:
    params = SamplingParams(temperature=0.7, seed=11, max_tokens=LENGTH)
    with pytest.raises(
        AssertionError, match=r"cache holds rows of another text|fed at a wrong position|rows to keep"
    ):
        run(SpecConfig(("self",), adaptive=False), params, target=TellingTarget(VOCAB))
