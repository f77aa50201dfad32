"""Who is admitted, who reads, and how long anybody waits."""

from collections.abc import Sequence
from itertools import accumulate, count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.engine.scheduler import MAX_RETRY_S, OLDEST_EVERY, RowCost, Scheduled, Scheduler
from paceline.errors import Busy
from paceline.types import Draft, Seq

CHUNK = 16


def prompt(name: str, tokens: int, cached: int = 0, **fields: object) -> Seq:
    seq = Seq(name, [1] * tokens, tokens, **fields)  # type: ignore[arg-type]
    seq.computed = cached
    return seq


def scheduler(*seqs: Seq, cut_anywhere: bool = True, chunk: int = CHUNK) -> Scheduler:
    made = Scheduler(16, chunk, cut_anywhere=cut_anywhere)
    for seq in seqs:
        made.add(seq)
    made.admit()
    return made


def read(schedule: Scheduler) -> dict[str, int]:
    """One pass: the rows of each sequence."""
    sizes = {seq.id: len(part) for seq, part in schedule.pieces()}
    for seq, part in schedule.pieces():
        seq.computed += len(part)
    return sizes


def finished(seq: Seq) -> bool:
    return seq.computed == len(seq.tokens)


def passes_until_read(schedule: Scheduler, seqs: Sequence[Seq], arrivals: Sequence[Seq] = ()) -> list[int]:
    """The pass in which each prompt was read. Each pass admits one more of `arrivals`."""
    ends: dict[str, int] = {}
    coming = iter(arrivals)
    for number in count(1):
        if (new := next(coming, None)) is not None:
            schedule.add(new)
            schedule.admit()
        read(schedule)
        for seq in schedule.running():
            if finished(seq):
                ends[seq.id] = number
                schedule.remove(seq.id)
        if all(seq.id in ends for seq in seqs):
            return [ends[seq.id] for seq in seqs]
    raise AssertionError


def test_short_remainders_are_read_beside_a_long_prompt() -> None:
    long = prompt("long", 1000)
    schedule = scheduler(long, *(prompt(f"short{i}", 100, cached=98) for i in range(3)))
    assert read(schedule) == {"long": CHUNK - 6, "short0": 2, "short1": 2, "short2": 2}


def test_half_the_rows_are_for_the_prompt_admitted_first() -> None:
    schedule = scheduler(prompt("long", 1000), *(prompt(f"short{i}", 7) for i in range(5)))
    assert read(schedule) == {"long": CHUNK // 2, "short0": 7, "short1": 1}


def test_prompts_of_like_length_are_read_one_after_another() -> None:
    """Sharing would make the first slower and none faster."""
    schedule = scheduler(prompt("a", 40), prompt("b", 39), prompt("c", 21))
    assert [read(schedule) for _ in range(3)] == [{"a": 16}, {"a": 16}, {"a": 8, "b": 8}]


def test_a_higher_priority_is_read_first_and_a_lower_one_does_not_overtake() -> None:
    schedule = scheduler(prompt("long", 100))
    schedule.add(prompt("high", 200, priority=1))
    schedule.add(prompt("low", 2, priority=-1))
    schedule.admit()
    assert read(schedule) == {"long": 8, "high": 8}


def test_chunks_end_at_fixed_positions_where_a_cut_shows_in_the_bits() -> None:
    seqs = [prompt("long", 100, cached=5), prompt("short", 40, cached=30), prompt("other", 90)]
    schedule = scheduler(*seqs, cut_anywhere=False)
    while any(not finished(seq) for seq in seqs):
        for seq, part in schedule.pieces():
            end = seq.computed + len(part)
            assert end % CHUNK == 0 or end == len(seq.tokens)
            assert len(part) == min(CHUNK - seq.computed % CHUNK, len(seq.tokens) - seq.computed)
        assert sum(read(schedule).values()) <= CHUNK + CHUNK // 2


def beside(
    row_ms: float, context_ms: float = 0.0, limit: int = 64, row_cost: RowCost | None = None
) -> list[int]:
    """Rows of a long prompt beside an answer, in passes of 5 ms and so many for each of its rows."""
    long, answer = prompt("long", 4000), prompt("answer", 2, cached=1)
    schedule = Scheduler(16, 256, limit, beside_s=0.04, row_cost=row_cost)
    for seq in (answer, long):
        schedule.add(seq)
    schedule.admit()
    sizes = []
    while not finished(long):
        parts = schedule.pieces()
        rows = sum(len(part) for seq, part in parts if seq is long)
        sizes.append(rows)
        ms = 5 + rows * (row_ms + context_ms * long.computed / 1000)
        schedule.took([Scheduled(seq, part, True) for seq, part in parts], ms / 1000)
        long.computed += rows
    return sizes


def test_prompts_add_no_more_to_a_pass_than_they_may() -> None:
    assert set(beside(0.1)[:-1]) == {64}  # fast rows are not limited
    slow = beside(1.0)
    assert slow[0] == 64  # nothing is known yet
    assert all(35 <= rows <= 40 for rows in slow[1:-1])
    deeper = beside(0.5, context_ms=1.0)
    assert deeper[1] > deeper[-2]
    assert all(8 <= rows <= 64 for rows in deeper[:-1])
    assert set(beside(100.0)[1:-1]) == {8}  # at least so many: the prompt is read in the end


def added_ms(sizes: list[int], row_ms: float, context_ms: float) -> list[float]:
    """By each piece but the last."""
    starts = accumulate([0, *sizes])
    return [
        rows * (row_ms + context_ms * start / 1000) for rows, start in zip(sizes[:-1], starts, strict=False)
    ]


def test_pieces_beside_answers_are_as_large_as_the_cost_curve_allows() -> None:
    """From the first one on, and as the context makes rows dearer."""
    sizes = beside(0.25, context_ms=0.5, limit=256, row_cost=lambda context: 0.25 + 0.5 * context / 1000)
    added = added_ms(sizes, 0.25, 0.5)
    assert max(added) <= 45  # the 5 ms of a pass without prompts are not known here
    assert min(added) > 30
    assert sizes[0] > 3 * sizes[-2]


def test_passes_correct_a_cost_curve() -> None:
    for factor in (0.5, 3.0):
        sizes = beside(factor, limit=256, row_cost=lambda context: 1.0)
        assert sizes[0] == 40
        assert all(30 <= rows * factor <= 42 for rows in sizes[12:-1])
    assert beside(1e-4, limit=256, row_cost=lambda context: 0.0)[-2] == 256  # a curve that is flat


@pytest.mark.parametrize("usual", [1, 16])
def test_drafts_take_no_rows_from_prompts(usual: int) -> None:
    """usual: answers in passes without prompts, which take 3 ms and 0.3 for each row."""
    draft = Draft((7,) * 3)
    sizes = []
    for nodes in (0, 3):
        schedule = Scheduler(16, 256, 256, beside_s=0.04, row_cost=lambda context: 0.25)
        answers = [prompt(str(i), 2, cached=1) for i in range(8)]
        decoding = [Scheduled(seq, [7], True) for seq in answers]
        schedule.took((2 * decoding)[:usual], (3 + 0.3 * usual) / 1000)
        long = prompt("long", 3000)
        for seq in (*answers, long):
            schedule.add(seq)
        schedule.admit()
        for _ in range(12):
            parts = [Scheduled(seq, part, True) for seq, part in schedule.pieces()]
            for part in parts[:8]:
                part.draft = draft.first(nodes)
            rows = len(parts[-1].fed)
            schedule.took(parts, (3 + 0.3 * 8 * (1 + nodes) + 0.25 * rows) / 1000)
            long.computed += rows
        sizes.append(rows)
    assert sizes[1] >= 0.95 * sizes[0]
    assert 130 <= sizes[1] <= 170


remainders = st.lists(st.integers(2, 200), min_size=1, max_size=12)


@given(remainders, st.lists(st.integers(2, 200), max_size=60), st.integers(1, 64), st.booleans())
def test_nobody_reads_later_than_twice_as_late_as_in_order(
    sizes: list[int], later: list[int], chunk: int, cut_anywhere: bool
) -> None:
    seqs = [prompt(f"s{i}", size) for i, size in enumerate(sizes)]
    arrivals = [prompt(f"later{i}", size) for i, size in enumerate(later)]
    schedule = scheduler(*seqs, cut_anywhere=cut_anywhere, chunk=chunk)
    ends = passes_until_read(schedule, seqs, arrivals)
    half = -(-chunk // 2)
    bounds = [sum(-(-size // half) for size in sizes[: i + 1]) for i in range(len(sizes))]
    assert all(end <= bound for end, bound in zip(ends, bounds, strict=True))


@given(remainders, st.lists(st.integers(2, 200), min_size=1, max_size=12), st.integers(2, 64))
def test_no_row_is_left_while_a_prompt_is_not_read(sizes: list[int], cached: list[int], chunk: int) -> None:
    seqs = [prompt(f"s{i}", size) for i, size in enumerate(sizes)]
    schedule = scheduler(*seqs, chunk=chunk)
    while unread := [seq for seq in seqs if len(seq.tokens) - seq.computed > 1]:
        missing = sum(len(seq.tokens) - seq.computed for seq in unread)
        decoding = sum(len(seq.tokens) - seq.computed == 1 for seq in seqs)
        assert sum(read(schedule).values()) == min(chunk, missing) + decoding
        for seq in seqs:
            if finished(seq):
                schedule.remove(seq.id)


def admitted(schedule: Scheduler, turns: int) -> list[str]:
    """One place becomes free again and again."""
    order = []
    for _ in range(turns):
        schedule.remove(schedule.running()[0].id)
        order += [seq.id for seq in schedule.admit()]
    return order


def queue(*seqs: Seq, max_batch: int = 4) -> Scheduler:
    """A full batch of a client, and these waiting."""
    made = Scheduler(max_batch, CHUNK)
    for i in range(max_batch):
        made.add(prompt(f"first{i}", 2, client="flood", tenant="flood"))
    made.admit()
    for seq in seqs:
        made.add(seq)
    return made


def test_many_users_of_a_client_do_not_jump_the_queue_of_another() -> None:
    flood = [prompt(f"flood{i}", 2, client="flood", tenant=f"user{i}") for i in range(40)]
    other = [prompt(f"other{i}", 2, client="other", tenant="one") for i in range(8)]
    order = admitted(queue(*flood, *other), 8)
    assert sum(name.startswith("other") for name in order) >= 4
    assert order[0] == "other0"


def test_within_a_client_its_tenants_take_turns() -> None:
    many = [prompt(f"many{i}", 2, client="c", tenant="many") for i in range(9)]
    few = [prompt("few", 2, client="c", tenant="few")]
    assert admitted(queue(*many, *few, max_batch=8), 2)[1] == "few"


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=30))
def test_nobody_waits_for_more_than_four_times_as_many_admissions_as_in_order(clients: list[str]) -> None:
    """Though each client has a long answer running, and new clients with none come all the time."""
    schedule = Scheduler(4, CHUNK)
    for client in "abc":
        schedule.add(prompt(f"long {client}", 2, client=client, tenant=client))
    schedule.admit()
    seqs = [prompt(f"s{i}", 2, client=client, tenant=client) for i, client in enumerate(clients)]
    for seq in seqs:
        schedule.add(seq)
    order: list[str] = []
    for i in range(OLDEST_EVERY * len(seqs)):
        schedule.add(prompt(f"new{i}", 2, client=f"new{i}", tenant=f"new{i}"))
        (seq,) = schedule.admit()
        order.append(seq.id)
        schedule.remove(seq.id)
    assert all(order.index(seq.id) < OLDEST_EVERY * (i + 1) for i, seq in enumerate(seqs))


def test_who_was_preempted_returns_first_and_in_order() -> None:
    seqs = [prompt(f"s{i}", 2) for i in range(4)]
    schedule = scheduler(*seqs)
    assert [schedule.preempt().id for _ in range(3)] == ["s3", "s2", "s1"]
    schedule.add(prompt("new", 2))
    assert not schedule.admit()  # nothing before another leaves
    schedule.remove("s0")
    assert [[seq.id for seq in schedule.admit()] for _ in range(4)] == [["s1"], ["s2"], ["s3"], ["new"]]
    assert [seq.id for seq in schedule.running()] == ["s1", "s2", "s3", "new"]


def test_the_lowest_priority_is_preempted_first() -> None:
    schedule = scheduler(prompt("low", 2, priority=-1), prompt("a", 2), prompt("b", 2))
    assert [schedule.preempt().id for _ in range(2)] == ["low", "b"]


def test_a_client_leaves_room_in_the_queue_for_others() -> None:
    schedule = Scheduler(4, CHUNK, max_waiting=36)
    for i in range(32):  # of 40: four times as many as stay free
        schedule.add(prompt(f"flood{i}", 2, client="flood"))
    with pytest.raises(Busy, match="this client"):
        schedule.add(prompt("more", 2, client="flood"))
    for i in range(3):
        schedule.add(prompt(f"other{i}", 2, client="other"))
    anonymous = Scheduler(4, CHUNK, max_waiting=36)
    for i in range(36):
        anonymous.add(prompt(f"a{i}", 2))


def test_a_full_queue_says_when_to_come_again() -> None:
    now = 0.0
    schedule = Scheduler(1, CHUNK, max_waiting=40, clock=lambda: now)
    for i in range(41):
        schedule.add(prompt(f"s{i}", 2))
        schedule.admit()
    for i in range(38):
        now += 5.0
        schedule.remove(f"s{i}")
        schedule.admit()
    for i in range(40, 80):
        schedule.add(prompt(f"t{i}", 2)) if schedule.waiting < 40 else None
    with pytest.raises(Busy) as refused:
        schedule.add(prompt("late", 2), slots=3)
    assert refused.value.retry_after_s == pytest.approx(15, rel=0.1)
    with pytest.raises(Busy) as refused:
        schedule.add(prompt("late", 2), slots=10**6)
    assert refused.value.retry_after_s == MAX_RETRY_S


def test_prompts_that_are_read_ahead_get_the_rows_that_no_other_prompt_needs() -> None:
    ahead, user = prompt("ahead", 40, prefill=True, priority=9), prompt("user", 20)
    schedule = scheduler(ahead)
    assert read(schedule) == {"ahead": 16}
    schedule.add(user)
    schedule.admit()
    assert read(schedule) == {"user": 16}
    assert read(schedule) == {"user": 4}
    user.tokens.append(1)
    assert read(schedule) == {"user": 1, "ahead": 16}


def test_prompts_that_are_read_ahead_are_admitted_last() -> None:
    schedule = Scheduler(1, CHUNK)
    for i in range(3):
        schedule.add(prompt(f"ahead {i}", 4, prefill=True, priority=50))
    users = [prompt(f"user {i}", 4, priority=-50) for i in range(OLDEST_EVERY + 1)]
    for user in users:
        schedule.add(user)
    order = []
    while schedule.waiting:
        (seq,) = schedule.admit()
        order.append(seq.id)
        schedule.remove(seq.id)
    assert order == [*(user.id for user in users), "ahead 0", "ahead 1", "ahead 2"]


def test_a_prompt_that_is_read_ahead_gives_its_place_to_one_that_generates() -> None:
    ahead, user = prompt("ahead", 40, prefill=True), prompt("user", 4)
    schedule = Scheduler(1, CHUNK)
    schedule.add(ahead)
    schedule.admit()
    assert schedule.displace() is None
    schedule.add(prompt("other", 40, prefill=True))
    assert schedule.displace() is None
    schedule.add(user)
    assert schedule.displace() is ahead
    assert schedule.admit() == [user]
    assert schedule.displace() is None
    schedule.remove("user")
    assert schedule.admit() == [ahead]


def test_of_running_sequences_one_that_is_read_ahead_is_preempted_first() -> None:
    schedule = scheduler(prompt("ahead", 40, prefill=True, priority=9), prompt("user", 20))
    assert schedule.preempt().id == "ahead"
