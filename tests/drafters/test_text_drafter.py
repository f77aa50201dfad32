"""A draft model with another tokenizer: the text stays the target's, and the guesses are worth something."""

import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.config import Accept, EngineConfig, SamplingParams, SpecConfig
from paceline.drafters.draft_model import ModelDrafter, TextDrafter, drafter_for
from paceline.drafters.draft_model.retokenizer import IncrementalRetokenizer
from paceline.drafters.draft_model.select import TextOrTokenDrafter, overlap
from paceline.drafters.draft_model.vocab_mapping import SharedVocab, TokenizerPair
from paceline.drafters.drafter_list import DrafterList
from paceline.drafters.grammar import Grammar
from paceline.engine.control import Fixed
from paceline.engine.engine import Engine
from paceline.errors import DrafterMismatch
from paceline.sampling import Doubles, History, distribution
from paceline.testing import ToyCursor
from paceline.types import Ask, Draft, Drafter, Feed, Scores, Seq
from support import examples
from support.tokenizers import PASSAGE, Reader, pair, tokenizer

TWO = pair()
VOCAB = TWO.target.vocab_size
LENGTH = 40
EOS = next(iter(TWO.target.eos_ids))
Made = Callable[[Reader], Drafter]
spell = TWO.target_encoder.encode


CHUNK = 1024  # longer than any text here: every one is read before its first draft


def by_tokens(model: Reader) -> Drafter:
    return ModelDrafter(model, VOCAB, CHUNK, SharedVocab(TWO, VOCAB))


def by_text(model: Reader) -> Drafter:
    return TextDrafter(model, TWO, CHUNK)


def either(model: Reader) -> Drafter:
    return TextOrTokenDrafter(by_text(model), by_tokens(model))


WAYS: dict[str, Made] = {"tokens": by_tokens, "text": by_text}


def spec(accept: Accept = "match", width: int = 1) -> SpecConfig:
    return SpecConfig(("model",), max_draft=6, tree_width=width, adaptive=False, accept=accept)


def a_seq(text: bytes = PASSAGE[:20], temperature: float = 0.0, **options: object) -> Seq:
    tokens = spell(text)
    params = SamplingParams(temperature=temperature, seed=5, max_tokens=LENGTH)
    return Seq(**{"id": "a", "spec": spec(), **options}, tokens=tokens, prompt_len=len(tokens), params=params)  # type: ignore[arg-type]


def run(
    drafter: Drafter | None, temperature: float, batch: int = 1, width: int = 1
) -> tuple[list[list[int]], float]:
    """The text, and the tokens per pass."""
    drafters = {} if drafter is None else {"model": drafter}
    engine = Engine(
        Reader(TWO.target), drafters, Fixed(), config=EngineConfig(max_batch=3), eos=TWO.target.eos_ids
    )
    seqs = []
    for i in range(batch):
        prompt = [
            *spell(PASSAGE[: 9 + 4 * i]),
            *([EOS + 1] if i % 2 else []),
            *spell("caf\u00e9 漢"[:i].encode()),
        ]
        params = SamplingParams(
            temperature=temperature, seed=11, choice=i, max_tokens=LENGTH, ignore_eos=True
        )
        using = spec(width=width) if drafter else SpecConfig((), 0)
        seqs.append(Seq(f"s{i}", prompt, len(prompt), params, using))
        engine.submit(seqs[-1])
    rounds = 0
    while engine.busy:
        rounds += len(engine.step())
    return [seq.output for seq in seqs], batch * LENGTH / rounds


@pytest.mark.sampled(5)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("temperature", [0.0, 0.8, 1.2])
@pytest.mark.parametrize("width", [1, 3])
def test_text_is_plain_text(way: str, temperature: float, width: int) -> None:
    plain, _ = run(None, temperature, batch=4)
    for passage in (PASSAGE, PASSAGE[::-1]):
        model = Reader(TWO.draft, passage)
        assert run(WAYS[way](model), temperature, 4, width)[0] == plain
        assert not model._rows


@pytest.mark.parametrize(
    ("way", "temperature", "floor"), [("tokens", 0.0, 2.0), ("tokens", 1.2, 1.6), ("text", 0.0, 3.0)]
)
def test_floor_on_home_ground(way: str, temperature: float, floor: float) -> None:
    assert run(WAYS[way](Reader(TWO.draft)), temperature)[1] >= floor
    assert run(WAYS[way](Reader(TWO.draft, PASSAGE[::-1])), temperature)[1] < 1.3


def test_noise_is_shared_by_the_targets_ids() -> None:
    """Two models that agree on what both have draw the same: a token both have is guessed right."""
    params = SamplingParams(temperature=1.2, seed=3, max_tokens=LENGTH)
    target = Reader(TWO.target)
    target.logits = lambda text: np.array([2.0 if t in TWO.shared else -9.0 for t in range(VOCAB)])  # type: ignore[method-assign]
    model = Reader(TWO.draft)
    model.logits = lambda text: np.full(model.vocab_size, 2.0)  # type: ignore[method-assign]
    engine = Engine(target, {"model": by_tokens(model)}, Fixed())
    engine.submit(seq := Seq("a", spell(b"the"), len(spell(b"the")), params, spec()))
    rounds = 0
    while engine.busy:
        engine.step()
        rounds += 1
    assert len(seq.output) / rounds > 5


class Noting(Reader):
    """Notes how many tokens it was fed."""

    fed = 0

    def forward(self, feeds: Sequence[Feed], taps: Sequence[int] = ()) -> Scores:
        self.fed += sum(len(feed.tokens) for feed in feeds)
        return super().forward(feeds, taps)


@settings(max_examples=examples(30))
@given(st.integers(0, 9999), st.sampled_from([*WAYS]), st.sampled_from(["match", "residual"]))
def test_rows_that_are_kept_are_rows_computed_anew(seed: int, way: str, accept: Accept) -> None:
    """A drafter that has followed the text guesses as one that reads it for the first time."""
    rng = random.Random(seed)
    model = Noting(TWO.draft, seed=seed)
    seq = a_seq(temperature=0.8, spec=spec(accept))
    kept = WAYS[way](model)
    kept.begin(seq)
    for _ in range(6):
        after = tuple(rng.choices(range(VOCAB), k=rng.choice([0, 0, 2])))
        ask, fresh = Ask(seq, 4, after), WAYS[way](Reader(TWO.draft, seed=seed))
        fresh.begin(seq)
        same(kept.draft([ask])[0], fresh.draft([ask])[0])
        seq.tokens += rng.choice([spell(b" the cat"), spell("é漢".encode())[:2], [EOS], spell(b"x" * 90)])
    assert model.fed < 6 * len(seq.tokens)


def same(one: Draft, other: Draft) -> None:
    assert (one.tokens, one.scores) == (other.tokens, other.scores)
    assert (one.q is None) == (other.q is None)
    assert one.q is None or (other.q is not None and bool((one.q == other.q).all()))


def test_a_growing_text_is_read_once() -> None:
    for way in WAYS.values():
        model, seq = Noting(TWO.draft), a_seq(PASSAGE * 6)
        drafter = way(model)
        drafter.begin(seq)
        drafter.draft([Ask(seq, 1)])
        read = model.fed
        for _ in range(8):
            seq.tokens += spell(b" the")
            drafter.draft([Ask(seq, 1)])
        assert read > 100
        assert model.fed - read < 8 * 8


def test_q_is_the_restricted_distribution() -> None:
    seq = a_seq(temperature=0.9, spec=spec("residual"))
    model = Reader(TWO.draft)
    drafter = by_tokens(model)
    drafter.begin(seq)
    (draft,) = drafter.draft([Ask(seq, 3)])
    assert draft.q is not None
    own = IncrementalRetokenizer(TWO).update(seq.tokens)
    for node, token in enumerate(draft.tokens):
        row = np.full(VOCAB, -np.inf, np.float32)
        for theirs, ours in TWO.shared.items():
            row[theirs] = model.logits(own)[ours]
        want = distribution(
            row, seq.params, History(seq.tokens, seq.prompt_len, draft.tokens[:node])
        ).probabilities()
        assert draft.q[node].numpy() == pytest.approx(want)
        assert {*draft.q[node].nonzero().flatten().tolist()} == TWO.shared.keys()
        own.append(TWO.shared[token])


def test_shared_tokens_say_the_same() -> None:
    marks = {*TWO.target_special.values()}
    assert len(TWO.shared) > 256
    for token, own in TWO.shared.items():
        assert token in marks or TWO.target.piece(token) == TWO.draft.piece(own)
    both = {TWO.target.piece(t) for t in range(VOCAB)} & {
        TWO.draft.piece(t) for t in range(TWO.draft.vocab_size)
    }
    assert {TWO.target.piece(t) for t in TWO.shared if t not in marks} == both


def only(allowed: Callable[[bytes], bool]) -> ToyCursor:
    """Outputs whose text so far is allowed."""

    def rules(tokens: tuple[int, ...]) -> set[int]:
        text = b"".join(map(TWO.target.piece, tokens))
        return {t for t in range(VOCAB) if allowed(text + TWO.target.piece(t)) and TWO.target.piece(t)}

    return ToyCursor(rules)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("accept", ["match", "residual"])
def test_only_valid_tokens_are_drafted(way: str, accept: Accept) -> None:
    ahead = PASSAGE[20:44]
    for wanted in (ahead, b" the hens", "é漢".encode(), ahead[:9] + b"!" + ahead):
        seq = a_seq(temperature=0.8, spec=spec(accept))
        cursor = only(wanted.startswith)
        relay = DrafterList([WAYS[way](Reader(TWO.draft))])
        relay.begin(seq)
        (draft,) = relay.draft([Ask(seq, 6, (), cursor)])
        assert wanted.startswith(b"".join(map(TWO.target.piece, draft.tokens)))
        assert len(draft) > 0 or way == "text"
        if wanted == ahead:
            assert len(draft) >= 4


def test_forced_tokens_are_left_to_the_grammar() -> None:
    for way in WAYS.values():
        relay, seq = DrafterList([Grammar(), way(Reader(TWO.draft))]), a_seq(temperature=0.0)
        relay.begin(seq)
        forced = ToyCursor(lambda tokens: {spell(b"x")[0]} if len(tokens) in (2, 3) else None)
        (draft,) = relay.draft([Ask(seq, 4, (), forced, 8)])
        assert draft.sources[:4] == ("model", "model", "grammar", "grammar")


@given(
    st.lists(
        st.sampled_from([b"the", b" cat", b" s", b"he", b",", "é".encode(), "漢".encode()[:2]]), max_size=6
    ),
    st.lists(
        st.sampled_from([b" the", b"at", b"n", b" hen", "漢".encode(), "漢".encode()[2:], b"\xff"]),
        max_size=6,
    ),
)
def test_text_is_cut_at_the_committed_end(before: list[bytes], after: list[bytes]) -> None:
    drafter = TextDrafter(Reader(TWO.draft), TWO)
    committed, text = [t for piece in before for t in spell(piece)], b"".join(after)
    cut = drafter.encode_after(committed, text)
    assert b"".join(map(TWO.target.piece, cut)) == text
    whole = spell(b"".join(before) + text)
    if whole[: len(committed)] == committed:
        assert cut == whole[len(committed) :]


def test_the_last_token_may_be_unfinished_and_the_end_is_a_mark() -> None:
    for written, wanted in ((b" the", b""), (b" the cat", b" the "), (b" the<eos>", b" the<|endoftext|>")):
        model, seq = Reader(TWO.draft), a_seq(b"on")
        plan = TWO.draft.encode(written.decode(), bos=False)
        start = len(IncrementalRetokenizer(TWO).update(seq.tokens))
        drafter = by_text(model)

        def logits(text: Sequence[int], plan: list[int] = plan, start: int = start) -> Doubles:
            said = plan[min(len(text) - start, len(plan) - 1)]
            return np.asarray(np.arange(TWO.draft.vocab_size) == said, float)

        model.logits = logits  # type: ignore[method-assign]
        drafter.begin(seq)
        (draft,) = drafter.draft([Ask(seq, len(plan) - 1)])
        assert b"".join(map(TWO.target.piece, draft.tokens)) == wanted
        assert draft.q is None


def test_the_way_is_chosen_by_what_is_shared() -> None:
    little = TokenizerPair(tokenizer((), ("<eos>",)), tokenizer(("th", "the", " t", " the"), ("<eos>",)))
    assert 0 < overlap(little) < 1
    assert overlap(TokenizerPair(TWO.draft, TWO.draft)) == 1
    model = Reader(TWO.draft)
    strange = tokenizer((), ("<a>",), b"abcde"), tokenizer((), ("<b>",), b"fghij")
    assert isinstance(drafter_for(model, *strange, 6), TextDrafter)
    assert 0.95 < overlap(TWO) < 1
    assert isinstance(drafter_for(model, TWO.draft, TWO.target, VOCAB), TextOrTokenDrafter)
    assert isinstance(drafter_for(model, TWO.draft, TWO.target, VOCAB, "intersection"), ModelDrafter)
    assert isinstance(drafter_for(model, TWO.draft, TWO.target, VOCAB, "text"), TextDrafter)
    assert isinstance(drafter_for(model, TWO.target, TWO.target, VOCAB, "text"), ModelDrafter)
    with pytest.raises(DrafterMismatch, match="share no token"):
        drafter_for(model, *strange, 6, "intersection")


def test_greedy_and_sampled_requests_share_a_model() -> None:
    model = Reader(TWO.draft)
    drafter, seqs = either(model), [a_seq(temperature=t, id=f"s{t}") for t in (0.0, 0.8, 0.0)]
    seqs[2].id = "third"
    for seq in seqs:
        drafter.begin(seq)
    alone = [either(Reader(TWO.draft)) for _ in seqs]
    for one, seq in zip(alone, seqs, strict=True):
        one.begin(seq)
    together = drafter.draft([Ask(seq, 4) for seq in seqs])
    assert together == [one.draft([Ask(seq, 4)])[0] for one, seq in zip(alone, seqs, strict=True)]
    assert together[0] == together[2] != together[1]
    for seq in seqs:
        drafter.end(seq)
    assert not model._rows


def test_what_does_not_fit_the_draft_model_is_not_drafted() -> None:
    for way in WAYS.values():
        model, seq = Reader(TWO.draft), a_seq(PASSAGE)
        model.max_context = 20
        drafter = way(model)
        drafter.begin(seq)
        assert drafter.draft([Ask(seq, 4)]) == [Draft()]
        drafter.end(seq)
