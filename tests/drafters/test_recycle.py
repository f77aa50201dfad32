from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.config import SamplingParams, SpecConfig
from paceline.drafters.recycle import Recycle, RecycleSettings
from paceline.drafters.recycle import drafter as recycle
from paceline.drafters.recycle.table import Floats, Ids, Table, largest
from paceline.engine.control import Fixed, Rate
from paceline.engine.engine import Engine
from paceline.errors import UsageError
from paceline.testing import ToyTarget
from paceline.types import ROOT, Ask, Cursor, Draft, Drafter, Round, Scores, Seq, Verdict
from support.grammars import sentence

VOCAB = 24
BOLD = RecycleSettings(min_chance=0.0)


class Constant(Drafter):
    """Always guesses the same tree."""

    name = "constant"

    def __init__(self, tokens: tuple[int, ...], parents: tuple[int, ...]) -> None:
        self._draft = Draft(tokens, parents, (self.name,) * len(tokens))

    def draft(self, asks: Sequence[Ask]) -> list[Draft]:
        return [self._draft for _ in asks]


def a_seq(
    name: str = "s", tenant: str = "", width: int = 1, prompt: Sequence[int] = (1, 2), **kw: Any
) -> Seq:
    params = SamplingParams(kw.pop("temperature", 0.0), seed=3, max_tokens=kw.pop("max_tokens", 40))
    spec = SpecConfig(kw.pop("drafters", ("recycle",)), kw.pop("budget", 8), width, adaptive=False)
    return Seq(name, list(prompt), len(prompt), params, spec, tenant, **kw)


def decode(drafter: Drafter, *seqs: Seq, extra: Sequence[Drafter] = ()) -> list[Round]:
    """The target's law follows from the last token alone, which is all the drafter looks at."""
    drafters = {d.name: d for d in (drafter, *extra)}
    engine = Engine(ToyTarget(VOCAB, memory=1), drafters, Fixed())
    for seq in seqs:
        engine.submit(seq)
    rounds = []
    while engine.busy:
        rounds += engine.step()
    return rounds


def guesses(drafter: Drafter, tenant: str = "", remember: bool = True) -> dict[int, Draft]:
    """Its drafts after each token, at the start of an output that is never written."""
    found = {}
    for token in range(VOCAB):
        seq = a_seq("probe", tenant, width=4, prompt=[token], remember=remember)
        drafter.begin(seq)
        (found[token],) = drafter.draft([Ask(seq, 40)])
        drafter.end(seq)
    return found


def first_guesses(draft: Draft) -> set[int]:
    return {draft.tokens[node] for node in draft.children(ROOT)}


@given(st.integers(1, 5), st.integers(1, 3000), st.integers(1, 9), st.integers(0, 9))
def test_the_largest_are_found(rows: int, size: int, k: int, seed: int) -> None:
    values = torch.from_numpy(np.random.default_rng(seed).integers(0, 500, (rows, size)).astype(np.float32))
    found, places = largest(values, k)
    assert np.array_equal(found, values.sort(1, descending=True).values[:, :k].numpy())
    assert np.array_equal(found, np.take_along_axis(values.numpy(), places, 1))
    assert all(len(set(row)) == len(row) for row in places.tolist())


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The names of all that torch computes meanwhile."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_torch_computes_nothing_on_a_cpu() -> None:
    """Its threads would fight those of a native target."""
    drafter, seq = Recycle(BOLD), a_seq(prompt=[1, 2])
    drafter.begin(seq)
    logits = torch.randn(3, 4096, generator=torch.Generator().manual_seed(1))
    seq.tokens += [3, 4]
    verdict = Verdict((0,), 4, Draft((3, 5)))
    with Operations() as seen:
        drafter.observe([seq], [verdict], Scores(logits, (0,)))
        (draft,) = drafter.draft([Ask(seq, 4, after=(3,))])
    assert draft.tokens[0] in logits[1].topk(8).indices
    assert seen.names <= {"slice", "detach", "alias"}


def test_prompts_seed_it() -> None:
    seq = a_seq(prompt=[5, 6, 7, 5, 6, 8, 5, 9, 5])
    drafter = Recycle()
    drafter.begin(seq)
    (draft,) = drafter.draft([Ask(seq, 3)])
    assert draft.tokens == (6, 8, 5)
    assert draft.parents is None


def test_the_targets_candidates_replace_what_was_read() -> None:
    drafter, target = Recycle(BOLD), ToyTarget(VOCAB, memory=1)
    seq = a_seq(prompt=[5, 6, 5], width=4, max_tokens=1)
    decode(drafter, seq)
    likeliest = np.argsort(-target.logits([5]))[:4]
    assert first_guesses(guesses(drafter)[5]) == set(likeliest.tolist())


def test_rows_of_rejected_drafts_are_learned_from_too() -> None:
    target = ToyTarget(VOCAB, memory=1)
    said = int(np.argmax(target.logits([2])))
    wrong = [t for t in range(3, VOCAB) if t != said][:3]
    constant = Constant(tuple(wrong), (ROOT, ROOT, 0))
    drafter = Recycle()
    rounds = decode(drafter, a_seq(max_tokens=4, drafters=("constant", "recycle"), width=2), extra=[constant])
    assert rounds[0].path == ()
    for token in wrong:
        assert first_guesses(guesses(drafter)[token]) <= set(np.argsort(-target.logits([token]))[:8].tolist())
        assert int(np.argmax(target.logits([token]))) in first_guesses(guesses(drafter)[token])


def test_a_kept_row_counts_before_a_refused_one_of_the_same_token() -> None:
    """The tree guesses token 7 twice: the first is kept, and its row has a favourite of 9."""
    rows = torch.zeros(4, VOCAB)
    rows[1, 9], rows[3, 11] = 20.0, 20.0
    draft = Draft((7, 4, 7), (ROOT, ROOT, 1))
    drafter, seq = Recycle(BOLD), a_seq(prompt=[1, 2])
    drafter.begin(seq)
    seq.tokens += [7, 3]
    drafter.observe([seq], [Verdict((0,), 3, draft)], Scores(rows, (0,)))
    seq.tokens.append(7)
    assert drafter.draft([Ask(seq, 1)])[0].tokens == (9,)


def per_pass(width: int, temperature: float) -> float:
    drafter = Recycle()
    decode(drafter, a_seq("before", temperature=temperature, max_tokens=200))
    seq = a_seq("s", width=width, temperature=temperature, max_tokens=200, budget=12)
    return 200 / len(decode(drafter, seq))


@pytest.mark.slow
def test_floor_on_home_ground(monkeypatch: pytest.MonkeyPatch) -> None:
    chain, tree = per_pass(1, 0.8), per_pass(4, 0.8)
    assert per_pass(1, 0.0) > 8
    assert chain > 1.7
    assert tree > 2.4

    def shuffled(rows: torch.Tensor, k: int) -> tuple[Floats, Ids]:
        values, tokens = largest(rows, k)
        return values, (7 * tokens + 5) % VOCAB

    monkeypatch.setattr(recycle, "largest", shuffled)
    assert per_pass(1, 0.0) < 1.5
    assert per_pass(1, 0.8) < 1.5
    assert per_pass(4, 0.8) < 0.8 * tree


def test_stated_chances_come_true() -> None:
    drafter = Recycle()
    seqs = [a_seq(f"s{i}", temperature=0.8, max_tokens=300, prompt=[i, 1]) for i in range(4)]
    expected, right, judged = 0.0, 0, 0
    for r in decode(drafter, *seqs)[200:]:
        kept = {ROOT, *r.path}
        for node, score in enumerate(r.draft.scores):
            if r.draft.parent(node) in kept:
                expected, right, judged = expected + score, right + (node in kept), judged + 1
    assert judged > 300
    assert abs(expected - right) < 0.1 * judged


def test_tenants_learn_nothing_from_one_another() -> None:
    drafter, fresh = Recycle(), guesses(Recycle())
    decode(drafter, a_seq("a", "anna", width=3, temperature=0.9))
    assert guesses(drafter, "bert") == fresh
    assert guesses(drafter, "anna") != fresh


def test_tenants_in_one_pass_learn_what_they_would_alone() -> None:
    together, alone = Recycle(), {"anna": Recycle(), "bert": Recycle()}
    prompts = {"anna": [1, 2], "bert": [9, 14, 3]}

    def seqs(tenant: str) -> Seq:
        return a_seq(tenant, tenant, width=3, prompt=prompts[tenant], max_tokens=12)

    decode(together, *(seqs(tenant) for tenant in alone))
    for tenant, drafter in alone.items():
        decode(drafter, seqs(tenant))
        assert guesses(together, tenant, remember=False) == guesses(drafter, tenant, remember=False)
    assert guesses(together, "anna", remember=False) != guesses(together, "bert", remember=False)


def test_who_must_not_be_remembered_leaves_nothing_but_may_look() -> None:
    drafter = Recycle()
    decode(drafter, a_seq("a", "anna", max_tokens=5))
    before = guesses(drafter, "anna", remember=False)
    rounds = decode(drafter, a_seq("b", "anna", prompt=[7, 8, 9, 7], temperature=0.9, remember=False))
    assert guesses(drafter, "anna", remember=False) == before
    assert any(r.path for r in rounds), "it learns within its own output"
    decode(drafter, a_seq("c", "carl", prompt=[7, 8, 9, 7], remember=False))
    assert guesses(drafter, "carl") == guesses(Recycle())
    assert before != guesses(Recycle())


def test_strangers_leave_nothing_to_one_another() -> None:
    drafter, stranger = Recycle(), a_seq("a", prompt=[7, 8, 9, 7])
    stranger.anonymous = True
    decode(drafter, stranger)
    assert guesses(drafter, remember=False) == guesses(Recycle())


def test_nothing_is_remembered_where_the_settings_say_so() -> None:
    drafter = Recycle(RecycleSettings(remember=False))
    decode(drafter, a_seq(temperature=0.9))
    assert guesses(drafter) == guesses(Recycle())


def test_the_tenants_not_heard_of_longest_are_forgotten() -> None:
    drafter, room = Recycle(RecycleSettings(max_lists=130)), Table(8).room
    assert 2 * room <= 130 < 3 * room
    for tenant in ("anna", "bert", "anna", "carl"):
        decode(drafter, a_seq(tenant, tenant))
    known = {t: guesses(drafter, t, remember=False) != guesses(Recycle()) for t in ("anna", "bert", "carl")}
    assert known == {"anna": True, "bert": False, "carl": True}


def test_a_table_grows() -> None:
    table = Table(2)
    tokens = list(range(1000))
    table.write(tokens, np.array([[t + 1, t + 2] for t in tokens]), np.full((1000, 2), 0.5, np.float32))
    assert [token for token, _ in table.successors(700)] == [701, 702]
    assert len(table) == 1000 <= table.room


def in_grammar(cursor: Cursor, width: int) -> Draft:
    drafter = Recycle(BOLD)
    decode(drafter, a_seq("before", temperature=1.5, max_tokens=300))
    seq = a_seq("s", width=width, prompt=[1])
    drafter.begin(seq)
    return drafter.draft([Ask(seq, 8, cursor=cursor)])[0]


@pytest.mark.parametrize("width", [1, 3])
def test_only_grammar_valid_tokens_are_drafted(width: int) -> None:
    ranked = np.argsort(-ToyTarget(VOCAB, memory=1).logits([1])).tolist()
    cursor = sentence(set(ranked[1:4:2]), set(range(0, VOCAB, 2)), set(range(1, VOCAB, 2)))
    draft = in_grammar(cursor, width)
    assert first_guesses(draft) == set(ranked[1:4:2][:width])
    for path in draft.paths():
        at = cursor.fork()
        assert all(at.advance(draft.tokens[node]) for node in path)
    assert max(draft.depth(node) for node in range(len(draft))) == 3
    assert all(0 < score < 1 for score in draft.scores)


def test_what_the_grammar_rules_out_leaves_its_chance_to_the_rest() -> None:
    ranked = np.argsort(-ToyTarget(VOCAB, memory=1).logits([1])).tolist()
    free, bound = in_grammar(sentence(set(range(VOCAB))), 4), in_grammar(sentence({ranked[1]}), 4)
    assert bound.scores[0] > 1.2 * free.scores[free.tokens.index(ranked[1])]


def test_trees_are_cut_by_what_rows_cost() -> None:
    """Whatever is kept is whole: a first part of the draft, with the parents of all its nodes."""
    drafter = Recycle(BOLD)
    decode(drafter, a_seq("before", temperature=0.8, max_tokens=300))
    seq = a_seq("s", width=4, prompt=[1], budget=32)
    seq.spec, seq.prompt_len = SpecConfig(("recycle",), 32, 4), 0  # its first token waits for no draft
    drafter.begin(seq)
    (draft,) = drafter.draft([Ask(seq, 32)])
    kept = []
    for slope in (0.0, 0.01, 0.05, 0.2, 2.0):
        rate = Rate(lambda rows, context, slope=slope: 1 + slope * (rows - 1))  # type: ignore[misc]
        rate.plan([seq], 1)
        kept += rate.trim([seq], [draft], 1)
    assert len(draft) > 16
    assert kept[0] == len(draft) > kept[1] > kept[2] > kept[3] >= kept[4] == 0
    reach = [np.prod([draft.scores[i] for i in draft.path(node)]) for node in range(len(draft))]
    assert reach == sorted(reach, reverse=True)


@pytest.mark.parametrize("wrong", [{"successors": 0}, {"max_lists": 0}, {"min_chance": -1}])
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(UsageError, match=next(iter(wrong))):
        RecycleSettings(**wrong)  # type: ignore[arg-type]


def test_learn_is_the_old_name_of_remember() -> None:
    with pytest.warns(DeprecationWarning, match="learn is now called remember"):
        assert RecycleSettings(learn=False) == RecycleSettings(remember=False)
