"""The KV cache: by example, and against one that is recomputed from scratch."""

from random import Random

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from paceline.errors import CacheFull
from paceline.target.kv.cache import SLACK, FreeRuns, TorchKVMemory
from support import examples
from support.references import Model, check_books, feed, holds, picture, rows_in, run, small_cache

POOLS = (1, 3, 6, 12, 200)  # blocks; the last one never evicts


class CacheMachine(RuleBasedStateMachine):
    """Any sequence of calls, with two different tokens so that prefixes meet all the time."""

    tokens = st.lists(st.integers(0, 1), min_size=1, max_size=6)
    choice = st.integers(0, 30)

    @initialize(block=st.integers(1, 4), blocks=st.sampled_from(POOLS))
    def start(self, block: int, blocks: int) -> None:
        self.model = Model(block, blocks)

    @precondition(lambda self: len(self.model.live) < 5)
    @rule(tenant=st.sampled_from("abs"), past=choice, cut=choice, more=tokens, at_once=st.booleans())
    def open(self, tenant: str, past: int, cut: int, more: list[int], at_once: bool) -> None:
        self.model.open(tenant, past, cut, more)
        if at_once:
            self.model.compute(self.model.newest, more, 0)

    @precondition(lambda self: self.model.live)
    @rule(which=choice, new=tokens, lost=st.integers(0, 6))
    def compute(self, which: int, new: list[int], lost: int) -> None:
        self.model.compute(which, new, lost)

    @precondition(lambda self: self.model.live)
    @rule(which=choice, drop=choice)
    def truncate(self, which: int, drop: int) -> None:
        self.model.truncate(which, drop)

    @precondition(lambda self: self.model.live)
    @rule(which=choice)
    def close(self, which: int) -> None:
        self.model.close(which)

    @precondition(lambda self: self.model.cache.stats.cached > 3)
    @rule(tenant=st.sampled_from(["a", "b", "s", None]))
    def clear(self, tenant: str | None) -> None:
        self.model.clear(tenant)

    @invariant()
    def holds_what_it_must(self) -> None:
        self.model.check()


CacheMachine.TestCase.settings = settings(
    max_examples=examples(80),
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
TestCacheMachine = CacheMachine.TestCase


def step(model: Model, rng: Random) -> None:
    new = [rng.randrange(2) for _ in range(rng.randint(1, 6))]
    action = rng.choices(["open", "compute", "truncate", "close"], [3, 5, 1, 2])[0]
    if not model.live or (action == "open" and len(model.live) < 4):
        cut = rng.choice([0, 0, rng.randrange(8)])  # mostly a conversation that goes on
        model.open(rng.choice("aabs"), int(rng.expovariate(0.3)), cut, new)
    elif action == "truncate":
        model.truncate(rng.randrange(4), rng.randrange(8))
    elif action == "close":
        model.close(rng.randrange(4))
    else:
        model.compute(rng.randrange(4), new, rng.randrange(4))
    model.check()


@pytest.mark.slow
@pytest.mark.parametrize("blocks", [4, 10, 20, 400])
@pytest.mark.parametrize("block", [2, 3, 7])
def test_a_long_life_goes_by_the_book(block: int, blocks: int) -> None:
    """Machines found by search are short; these runs are long enough for everything to have happened."""
    model, rng = Model(block, blocks), Random(1000 * block + blocks)
    for _ in range(200):
        step(model, rng)


def test_a_conversation_shares_all_but_the_last_token_and_stays_in_one_piece() -> None:
    cache = small_cache(blocks=40)
    tokens = [1, 2, 3]
    for turn in range(12):
        shared = cache.open("turn", "", tokens)
        assert shared == (0 if turn == 0 else len(tokens) - 3)
        feed(cache, "turn", tokens)
        for reply in range(5):
            tokens.append(reply + turn)
            feed(cache, "turn", tokens)
        assert cache.first_slot("turn", len(tokens)) == 0
        assert holds(cache, cache.slots("turn", 0, len(tokens)), tokens)
        cache.close("turn")
        tokens = [*tokens, 7, 8, 9]
    assert cache.stats.live == 0
    assert cache.stats.cached == -(-(len(tokens) - 3) // cache.block)


def test_the_same_prompt_again_leaves_one_token_to_compute() -> None:
    for length in (1, 2, 4, 5, 8, 9):
        cache = small_cache(blocks=9)
        assert run(cache, range(length)) == 0
        assert run(cache, range(length)) == length - 1


def test_an_empty_prompt_shares_nothing() -> None:
    cache = small_cache(blocks=2)
    assert cache.open("a", "", []) == 0
    assert cache.first_slot("a", 0) == 0
    assert cache.slots("a", 0, 0) == []


def test_full_blocks_are_shared_by_reference_and_the_rest_is_copied_before_it_is_written() -> None:
    cache = small_cache(blocks=8)
    run(cache, [1, 2, 3, 4, 5, 6, 7, 8])
    assert cache.open("a", "", [1, 2, 3, 4, 5, 6, 9, 9]) == 6
    assert cache.open("b", "", [1, 2, 3, 4, 5, 6, 7, 7]) == 7
    feed(cache, "a", [1, 2, 3, 4, 5, 6, 9, 9])
    feed(cache, "b", [1, 2, 3, 4, 5, 6, 7, 7])
    assert cache.table("a")[0] == cache.table("b")[0]
    assert cache.table("a")[1] != cache.table("b")[1]
    assert holds(cache, cache.slots("a", 0, 8), [1, 2, 3, 4, 5, 6, 9, 9])
    assert holds(cache, cache.slots("b", 0, 8), [1, 2, 3, 4, 5, 6, 7, 7])
    check_books(cache)


@pytest.mark.parametrize("rows", [1, 2])  # the second one makes the shared block full
def test_branches_of_one_conversation_all_find_its_last_rows(rows: int) -> None:
    cache = small_cache(blocks=8)
    past = [1, 2, 3, 4, 5, 6]
    run(cache, past)
    for branch in range(3):
        assert cache.open(f"b{branch}", "", [*past, branch]) == 6
    assert cache.table("b0") == cache.table("b1") == cache.table("b2")
    place = cache.table("b0")
    for branch in (0, 2, 1):
        feed(cache, f"b{branch}", past + [branch] * rows)
    assert cache.table("b0") == place, "the first one writes on in place"
    for branch in range(3):
        assert holds(cache, cache.slots(f"b{branch}", 0, 6 + rows), past + [branch] * rows)
    check_books(cache)


def test_branches_that_write_the_same_meet_again() -> None:
    cache = small_cache(blocks=8)
    run(cache, [1, 2, 3, 4, 5, 6])
    for branch in "abc":
        assert cache.open(branch, "", [1, 2, 3, 4, 5, 6, 7]) == 6
    for branch in "bac":  # a, which writes in place, finds b's copy registered already
        feed(cache, branch, [1, 2, 3, 4, 5, 6, 7, 8, 9])
        check_books(cache)
    assert cache.table("a")[:2] == cache.table("b")[:2] == cache.table("c")[:2]
    assert holds(cache, cache.slots("a", 0, 9), [1, 2, 3, 4, 5, 6, 7, 8, 9])


def test_equal_sequences_side_by_side_end_up_with_the_same_blocks() -> None:
    cache = small_cache(blocks=8)
    tokens = list(range(9))
    for seq_id in "ab":
        assert cache.open(seq_id, "", tokens) == 0
    for seq_id in "ab":
        feed(cache, seq_id, tokens)
    assert cache.table("a")[:2] == cache.table("b")[:2]
    assert cache.table("a")[2] != cache.table("b")[2]
    cache.close("a")
    cache.close("b")
    assert cache.stats.cached == 3


def test_tenants_are_apart() -> None:
    cache = small_cache(blocks=9)
    tokens = list(range(10))
    assert run(cache, tokens, "a") == 0
    assert run(cache, tokens, "b") == 0
    assert run(cache, tokens, "a") == 9
    cache.clear("a")
    assert cache.stats.cached == 3
    assert run(cache, tokens, "a") == 0
    assert run(cache, tokens, "b") == 9
    cache.clear()
    assert cache.stats.free == 9
    assert not cache._tree._roots


@pytest.mark.parametrize("again", [False, True])
def test_strangers_do_not_learn_a_part_of_a_block(again: bool) -> None:
    """Neither by what is found, nor, when the same is sent again, by what was not kept of it."""

    def found(guess: list[int]) -> int:
        cache = small_cache(blocks=40, block=4)
        run(cache, [1, 2, 3, 4, 5, 6, 7], partial=False)
        if again:
            run(cache, [*guess, 0], partial=False)
        return cache.open("probe", "", [*guess, 0, 0], partial=False)

    right, wrong = [1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 9]
    assert found(right) == found(wrong) == (7 if again else 4)
    assert found([1, 2, 9]) == (4 if again else 0)


def test_a_stranger_who_continues_a_whole_text_finds_it() -> None:
    cache = small_cache(blocks=40, block=4)
    run(cache, [1, 2, 3, 4, 5, 6, 7], partial=False)
    assert cache.open("next", "", [1, 2, 3, 4, 5, 6, 7, 8, 9], partial=False) == 7
    assert cache.open("other", "", [1, 2, 3, 4, 5, 6, 8], partial=False) == 4
    check_books(cache)


def test_clear_spares_live_sequences() -> None:
    cache = small_cache(blocks=9)
    run(cache, range(12))
    cache.open("a", "", range(9))
    cache.clear()
    assert cache.stats.cached == 0
    assert holds(cache, cache.slots("a", 0, 8), range(8))
    cache.close("a")
    assert run(cache, range(12)) == 8


def test_the_least_recently_used_goes_first_and_its_end_before_its_beginning() -> None:
    cache = small_cache(blocks=6)
    old, new, third = [1] * 8, [2] * 8, [3] * 8
    run(cache, old)
    run(cache, new)
    run(cache, third)
    assert cache.stats.free == 0
    assert cache.open("again", "", [1] * 9) == 8  # now `new` is the oldest
    cache.close("again")
    run(cache, [4] * 4)
    assert cache.stats.evicted == 1
    assert cache.open("probe-new", "", [2] * 9) == 4
    assert cache.open("probe-old", "", [1] * 9) == 8
    assert cache.open("probe-third", "", [3] * 9) == 8


def test_a_copied_block_counts_as_used() -> None:
    cache = small_cache(blocks=3)
    run(cache, [1, 1, 1, 1])
    run(cache, [2, 2, 2, 2])
    run(cache, [1, 1, 5])
    run(cache, [3, 3, 3, 3])
    assert cache.open("a", "", [1, 1, 1, 1, 1]) == 4
    assert cache.open("b", "", [2, 2, 2, 2, 2]) == 0


def test_a_block_that_holds_what_a_closing_sequence_held_counts_as_used() -> None:
    cache = small_cache(blocks=3)
    cache.open("a", "", [1, 1, 1])
    feed(cache, "a", [1, 1])
    run(cache, [1, 1, 1, 1])
    run(cache, [2, 2, 2, 2])
    cache.close("a")
    assert cache.stats.free == 1
    run(cache, [3] * 8)
    assert cache.open("b", "", [1] * 5) == 4
    assert cache.open("c", "", [2] * 5) == 0


def test_of_two_blocks_that_agree_as_long_the_one_that_ends_there_is_taken_over() -> None:
    cache = small_cache(blocks=4)
    cache.open("a", "", [1, 2, 0, 0])
    run(cache, [1, 2])
    place = cache.open("b", "", [1, 2, 9]) and cache.table("b")
    cache.close("b")
    feed(cache, "a", [1, 2, 0, 0])
    cache.open("c", "", [1, 2, 5, 5])
    feed(cache, "c", [1, 2, 5, 5])
    assert cache.table("c") == place
    check_books(cache)


def test_a_full_cache_says_so_and_changes_nothing() -> None:
    cache = small_cache(blocks=4)
    cache.open("a", "", range(20))
    feed(cache, "a", range(10))
    cache.open("b", "", [7] * 9)
    before, rows = picture(cache), rows_in(cache).k.clone()
    with pytest.raises(CacheFull, match=r"5 more rows needed, 4 are free.*raise cache_mb"):
        cache.extend("b", 5)
    with pytest.raises(CacheFull, match=r"7 more rows needed, 6 are free"):
        cache.extend("a", 7)
    assert picture(cache) == before
    assert torch.equal(rows_in(cache).k, rows)
    cache.extend("b", 4)
    cache.close("a")
    cache.extend("b", 16)
    check_books(cache)


def test_a_partly_shared_prefix_never_ends_a_sequence() -> None:
    cache = small_cache(blocks=3)
    run(cache, range(12))
    tokens = [0, 1, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9]
    assert cache.open("a", "", tokens) == 2
    feed(cache, "a", tokens)  # needs all three blocks, the one it shares two rows of included
    assert holds(cache, cache.slots("a", 0, 12), tokens)
    check_books(cache)


def test_cutting_into_a_shared_block_copies_it_before_the_next_write() -> None:
    cache = small_cache(blocks=8)
    shared = list(range(8))
    run(cache, shared)
    for seq_id in "ab":
        cache.open(seq_id, "", [*shared, 99])
    cache.truncate("a", 6)
    with pytest.raises(ValueError, match="extend first"):
        cache.append("a", [50])
    with pytest.raises(ValueError, match="extend first"):
        cache.slots("a", 6, 7)
    feed(cache, "a", [*shared[:6], 50, 51, 52])
    assert holds(cache, cache.slots("b", 0, 8), shared)
    assert holds(cache, cache.slots("a", 0, 9), [*shared[:6], 50, 51, 52])
    check_books(cache)


def test_cutting_into_rows_taken_over_keeps_them_cached() -> None:
    cache = small_cache(blocks=8)
    run(cache, [1, 2, 3])
    assert cache.open("a", "", [1, 2, 3, 4]) == 3
    cache.truncate("a", 1)
    feed(cache, "a", [1, 7, 7])
    cache.close("a")
    assert cache.open("b", "", [1, 2, 3, 4]) == 3
    assert cache.open("c", "", [1, 7, 7, 4]) == 3
    check_books(cache)


@pytest.mark.parametrize("past", [[1, 2, 3], [1, 2, 3, 4, 5]])
def test_giving_up_rows_taken_over_starts_a_block_of_its_own(past: list[int]) -> None:
    cache = small_cache(blocks=8)
    run(cache, past)
    assert cache.open("a", "", [*past, 9]) == len(past)
    cache.truncate("a", len(past) // 4 * 4)
    feed(cache, "a", past[: len(past) // 4 * 4] + [7] * 5)
    check_books(cache)
    assert cache.open("b", "", [*past, 9]) == len(past)


def test_room_is_given_back_when_rows_are_dropped() -> None:
    cache = small_cache(blocks=8)
    cache.open("a", "", range(30))
    feed(cache, "a", range(5))
    cache.extend("a", 20)
    assert cache.stats.live == 7
    cache.truncate("a", 5)
    assert cache.stats.live == 2
    assert cache.slots("a", 5, 8) == [5, 6, 7]
    cache.truncate("a", 4)  # a whole block, and nothing after it
    assert cache.stats.live == 1


def test_rows_apart_have_no_first_slot() -> None:
    cache = small_cache(blocks=3)
    for seq_id in "ab":
        cache.open(seq_id, seq_id, range(9))
    feed(cache, "a", range(4))
    feed(cache, "b", range(4))
    feed(cache, "b", range(8))
    assert cache.table("a") == [0]
    assert cache.table("b") == [2, 1]
    assert cache.first_slot("b", 4) == 8
    assert cache.first_slot("b", 5) is None
    assert cache.slots("b", 3, 6) == [11, 4, 5]
    assert cache.first_slot("a", 4) == 0


def test_two_that_grow_in_turns_both_stay_in_one_piece() -> None:
    cache = small_cache(blocks=16)
    for seq_id in "ab":
        cache.open(seq_id, seq_id, range(99))
    for rows in (4, 8, 12, 16):
        for seq_id in "ab":
            feed(cache, seq_id, range(rows))
    assert all(cache.first_slot(seq_id, 16) is not None for seq_id in "ab")


def test_misuse_is_refused_and_changes_nothing() -> None:
    cache = small_cache(blocks=4)
    cache.open("a", "", range(9))
    feed(cache, "a", range(5))
    before = picture(cache)
    with pytest.raises(ValueError, match="open already"):
        cache.open("a", "", [1])
    for call in (cache.close, cache.length, cache.table):
        with pytest.raises(KeyError, match="not open"):
            call("b")
    for length in (-1, 6):
        with pytest.raises(ValueError, match="5 rows"):
            cache.truncate("a", length)
    with pytest.raises(ValueError, match="room for 3"):
        cache.append("a", [1, 2, 3, 4])
    for start, stop in ((-1, 2), (3, 2), (0, 9)):
        with pytest.raises(ValueError, match="out of range"):
            cache.slots("a", start, stop)
    assert picture(cache) == before


def test_buffers_have_the_promised_shape() -> None:
    rows = TorchKVMemory(3, 2, 8, 5 * 16, dtype=torch.bfloat16)
    for buffer in (rows.k, rows.v):
        assert buffer.shape == (3, 2, 5 * 16 + SLACK, 8)
        assert buffer.dtype == torch.bfloat16
        assert buffer.is_contiguous()
        assert not buffer.any()


def test_stats_tell_the_share_found() -> None:
    cache = small_cache(blocks=8)
    assert cache.stats.queried_tokens == cache.stats.hit_tokens == 0
    run(cache, range(10))
    run(cache, range(10))
    stats = cache.stats
    assert (stats.queried_tokens, stats.hit_tokens) == (20, 9)


def test_free_blocks_are_taken_next_to_the_last_or_amid_the_longest_run() -> None:
    free = FreeRuns(10)
    assert [free.take(None), free.take(0), free.take(1), free.take(2)] == [0, 1, 2, 3]
    free.give(1)
    free.give(2)
    assert free.take(0) == 1
    assert free.take(3) == 4
    assert free.take(None) == 7  # the middle of 5 to 9
    free.give(4)
    assert free.count == 6
    assert free.take(1) == 2
    assert free.take(None) == 5  # the middle of 4 to 6
    assert {free.take(None) for _ in range(4)} == {4, 6, 8, 9}
    assert free.count == 0


def test_sequences_are_no_further_apart_than_they_need_room() -> None:
    free = FreeRuns(100, room=3)
    assert [free.take(None), free.take(None), free.take(None)] == [0, 4, 8]
    assert free.take(0) == 1
    assert [free.take(None) for _ in range(2)] == [12, 16]
    nearly_full = FreeRuns(4, room=3)
    assert [nearly_full.take(None) for _ in range(4)] == [0, 2, 1, 3]
