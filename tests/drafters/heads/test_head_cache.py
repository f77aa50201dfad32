"""The cache of positions, against a plain table of every row that was ever appended."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from paceline.drafters.heads import head_cache
from paceline.drafters.heads.head_cache import HeadCache
from paceline.types import Seq

AHEAD = 1


def made_of(seq: Seq, position: int) -> list[float]:
    """A row that tells the text it was made of, up to one token ahead."""
    text = tuple(seq.tokens[: position + 1 + AHEAD])
    return [float(hash((seq.tenant, text)) % 9973), float(position)]


def rows_from(seq: Seq, start: int, stop: int) -> Tensor:
    return torch.tensor([made_of(seq, p) for p in range(start, stop)]).reshape(-1, 2)


def check(cache: HeadCache, seq: Seq) -> list[int]:
    """Every row that is held is the one that this very text and tenant would make."""
    positions, rows = cache.rows(seq.id)
    found: list[int] = positions.tolist()
    assert found == sorted(set(found))
    assert rows.tolist() == [made_of(seq, p) for p in found]
    return found


@st.composite
def turns(draw: st.DrawFn) -> list[Seq]:
    """Sequences of two tenants over few tokens, so that many begin alike; some of them in the cache."""
    made: list[Seq] = []
    for i in range(draw(st.integers(1, 12))):
        tokens = draw(st.lists(st.integers(0, 1), min_size=2, max_size=14))
        if len(made) and draw(st.booleans()):
            tokens = [*draw(st.sampled_from(made)).tokens, *tokens]
        seq = Seq(f"s{i}", tokens, len(tokens), tenant=draw(st.sampled_from("ab")))
        seq.computed, seq.remember = draw(st.integers(0, len(tokens) - 1)), draw(st.booleans())
        made.append(seq)
    return made


@given(turns(), st.integers(1, 30), st.data())
def test_only_rows_of_the_same_text_and_tenant_are_found(
    seqs: list[Seq], most: int, data: st.DataObject
) -> None:
    cache = HeadCache((2,), most, ahead=AHEAD)
    running: list[Seq] = []
    for seq in seqs:
        cache.begin(seq)
        assert all(position < seq.computed for position in check(cache, seq))
        at = seq.computed
        while at < len(seq.tokens) - AHEAD:
            to = data.draw(st.integers(at + 1, len(seq.tokens) - AHEAD))
            cache.append(seq.id, at, rows_from(seq, at, to))
            at = to
        assert [p for p in check(cache, seq) if p >= seq.computed] == list(range(seq.computed, at))
        running.append(seq)
        while len(running) and data.draw(st.booleans()):
            cache.end(running.pop(data.draw(st.integers(0, len(running) - 1))))
        assert sum(map(cache.cached, "ab")) <= most


@pytest.mark.parametrize("ended", [True, False])
def test_the_next_turn_finds_the_last_one(ended: bool) -> None:
    cache = HeadCache((2,), ahead=AHEAD)
    first = Seq("first", list(range(20)), 15)
    cache.begin(first)
    cache.append("first", 0, rows_from(first, 0, 19))
    if ended:
        cache.end(first)
    second = Seq("second", [*range(18), 70, 71], 20, computed=18)
    cache.begin(second)
    assert check(cache, second) == list(range(17))  # the 18th was made of a token that came otherwise
    third = Seq("third", list(range(30)), 30, computed=12)
    cache.begin(third)
    assert check(cache, third) == list(range(12))


def test_nothing_crosses_tenants_or_is_left_by_those_who_may_not_be_learnt_from() -> None:
    cache = HeadCache((2,))
    tokens = list(range(20))
    for learn, tenant in ((True, "other"), (False, "")):
        seq = Seq(f"by {tenant}", tokens, 20, tenant=tenant, remember=learn)
        cache.begin(seq)
        cache.append(seq.id, 0, torch.ones(20, 2))
        again = Seq("again", tokens, 20, computed=19)
        for _ in "running", "ended":
            cache.begin(again)
            assert len(cache.rows("again")[0]) == 0
            cache.end(again)
            cache.end(seq)
    assert cache.cached("") == 0


def test_a_gap_stays_a_gap() -> None:
    cache = HeadCache((2,))
    tokens = list(range(20))
    first = Seq("first", tokens, 20, computed=8)  # in the target's cache from before our time
    cache.begin(first)
    cache.append("first", 8, torch.ones(12, 2))
    cache.end(first)
    second = Seq("second", tokens, 20, computed=15)
    cache.begin(second)
    assert cache.rows("second")[0].tolist() == list(range(8, 15))
    cache.append("second", 15, torch.ones(5, 2))
    with pytest.raises(ValueError, match="position 19"):
        cache.append("second", 19, torch.ones(1, 2))


def test_those_used_last_stay_and_a_longer_text_replaces_its_beginning() -> None:
    cache = HeadCache((2,), max_positions=20)

    def run(name: str, tokens: list[int], shared: int = 0) -> int:
        seq = Seq(name, tokens, len(tokens), computed=shared)
        cache.begin(seq)
        found = len(cache.rows(name)[0])
        cache.append(name, shared, torch.ones(len(tokens) - shared, 2))
        cache.end(seq)
        return found

    one, two = list(range(8)), list(range(100, 108))
    run("one", one)
    run("one, longer", [*one, 8, 9], 8)
    assert cache.cached("") == 10
    run("two", two)
    assert run("one again", [*one, 50], 8) == 8
    assert run("two again", two, 5) == 0  # it was used longest ago
    run("long", list(range(200, 240)))
    assert cache.cached("") == 20
    cache.forget("")
    assert cache.cached("") == 0


def test_what_is_kept_is_not_the_callers_memory() -> None:
    cache, rows = HeadCache((2,)), torch.ones(4, 2)
    seq = Seq("s", [1, 2, 3, 4], 4)
    cache.begin(seq)
    cache.append("s", 0, rows)
    rows.zero_()
    assert torch.equal(cache.rows("s")[1], torch.ones(4, 2))


def test_a_sequence_that_nobody_reads_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its text is not looked up, no row is copied, and what ended sequences left stays as it is."""
    cache, tokens = HeadCache((2,)), list(range(20))
    first = Seq("first", tokens, 20)
    cache.begin(first)
    cache.append("first", 0, torch.ones(19, 2))
    cache.end(first)
    with monkeypatch.context() as patched:
        patched.setattr(head_cache, "_copy", None)
        patched.setattr(head_cache, "common_prefix", None)
        for number in range(3):
            unread = Seq(f"unread {number}", [*tokens, number], 21, computed=19)
            cache.begin(unread)
            assert cache.last_used(unread.id) == -1
            cache.end(unread)
    assert cache.cached("") == 19
    third = Seq("third", [*tokens, 30], 21, computed=10)
    cache.begin(third)
    third.computed = 21  # the target goes on before the rows are looked up
    assert cache.last("third") == cache.last_used("third") == 9


def test_rows_on_a_cpu_are_never_copied_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its threads would spin for milliseconds on the cores that the target computes on."""
    monkeypatch.setattr(Tensor, "copy_", None)
    monkeypatch.setattr(Tensor, "clone", None)
    monkeypatch.setattr(torch, "cat", None)
    cache, tokens = HeadCache((2, 64), like=torch.empty(0, dtype=torch.bfloat16)), list(range(1000))
    rows = torch.ones(999, 2, 64, dtype=torch.bfloat16)
    for number, computed in enumerate((0, 900)):
        seq = Seq(f"{number}", tokens, 1000, computed=computed)
        cache.begin(seq)
        cache.append(seq.id, computed, rows[computed:])
        assert len(cache.rows(seq.id)[0]) == 999
        assert bool((cache.rows(seq.id)[1] == 1).all())
        cache.end(seq)


def test_tenants_heard_of_longest_ago_make_room_text_by_text() -> None:
    cache = HeadCache((2,), max_positions=20)

    def run(tenant: str, first: int) -> None:
        seq = Seq(f"{tenant} {first}", list(range(first, first + 6)), 6, tenant=tenant)
        cache.begin(seq)
        cache.append(seq.id, 0, rows_from(seq, 0, 6))
        cache.end(seq)

    for first in (0, 10):
        run("a", first)
    run("b", 0)
    assert [cache.cached(tenant) for tenant in "abc"] == [12, 6, 0]
    run("c", 0)
    assert [cache.cached(tenant) for tenant in "abc"] == [6, 6, 6]  # of "a" the older text is gone
    for first in (10, 20, 30):
        run("c", first)
    assert [cache.cached(tenant) for tenant in "abc"] == [0, 0, 18]
