"""Prefixes that were used last are in memory before they are asked for; nothing else changes."""

from itertools import pairwise
from pathlib import Path
from random import Random
from zlib import crc32

import pytest

from paceline.target.kv import preload
from paceline.target.kv.cache import PagedCache
from paceline.target.kv.disk_cache import DiskCache, Prefix, clear
from paceline.target.kv.page_file import PageFormat
from paceline.target.kv.preload import Preload
from support.references import check_books, feed, holds, small_cache

BLOCK = 16


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "kv"


def started(folder: Path, blocks: int = 40, mb: int = 16) -> PagedCache:
    cache = small_cache(blocks, BLOCK)
    checked = PageFormat(bytes(32), lambda page: crc32(page.data))
    cache.disk = DiskCache(folder, checked, mb << 20, cache._rows.page_bytes, BLOCK)
    return cache


def preloaded(folder: Path, blocks: int = 40) -> PagedCache:
    """An empty cache after a restart that has loaded what it may."""
    cache = started(folder, blocks)
    assert cache.disk is not None
    load = Preload(cache, cache.disk.recent())
    while load.step():
        check_books(cache)
    check_books(cache)
    assert cache.stats.live == 0
    return cache


def request(
    cache: PagedCache, prompt: list[int], answer: int = 0, tenant: str = "", **options: bool
) -> tuple[int, int]:
    """What a request finds in memory, and then on the disk."""
    found = cache.open("r", tenant, prompt, **{"writes": True, **options})
    rows, more = cache.restore("r", 60)
    assert not more
    assert holds(cache, cache.slots("r", 0, rows), prompt[:rows])
    feed(cache, "r", [*prompt, *text(answer, 99)])
    cache.close("r")
    check_books(cache)
    assert cache.disk is not None
    assert cache.disk.flush()
    cache.disk.recent()  # written
    return found, rows - found


def text(count: int, seed: int = 0) -> list[int]:
    random = Random(seed)
    return [random.randrange(200) for _ in range(count)]


def test_what_was_used_last_is_in_memory_after_a_restart(folder: Path) -> None:
    before = started(folder)
    assert request(before, text(75), 15) == (0, 0)
    assert request(before, text(40, 1), tenant="other") == (0, 0)
    cache = preloaded(folder)
    assert cache.stats.cached == 6 + 3
    assert request(cache, text(75), 9) == (74, 0)
    assert request(cache, text(40, 1), tenant="other") == (39, 0)


def test_loading_is_no_hit(folder: Path) -> None:
    request(started(folder), text(75))
    cache = preloaded(folder)
    stats = cache.stats
    assert (stats.queried_tokens, stats.hit_tokens) == (0, 0)
    assert stats.disk is not None
    assert stats.disk.hit_tokens == 0


def test_tenants_stay_apart_and_strangers_find_whole_blocks_only(folder: Path) -> None:
    request(started(folder), text(75), tenant="a")
    request(started(folder), text(75), 9, tenant="stranger", partial=False)
    cache = preloaded(folder)
    assert request(cache, text(75), tenant="b") == (0, 0)
    assert request(cache, text(75), tenant="stranger", partial=False) == (64, 0)


def test_what_must_not_be_remembered_is_not_loaded(folder: Path) -> None:
    cache = started(folder)
    request(cache, text(75))
    request(cache, text(64, 1), writes=False)
    request(cache, [*text(75), *text(64, 2)], writes=False)
    assert cache.disk is not None
    assert [list(prefix.tokens) for prefix in cache.disk.recent()] == [text(75)]
    assert preloaded(folder).stats.cached == 5


def test_the_turns_of_a_run_are_one_prefix(folder: Path) -> None:
    cache, run = started(folder), text(50)
    for turn in range(3):
        request(cache, run)
        run = [*run, *text(30, turn)]
    assert cache.disk is not None
    assert [len(prefix.tokens) for prefix in cache.disk.recent()] == [110]


def test_no_more_than_a_share_of_memory_is_filled_with_what_was_used_last(folder: Path) -> None:
    before = started(folder)
    for seed in range(6):
        request(before, text(64, seed))  # four blocks
    request(before, text(600, 7))  # too long
    cache = preloaded(folder)
    assert cache.stats.cached == 8 <= preload.SHARE * 40
    assert [request(cache, text(64, seed))[0] for seed in (5, 4, 3)] == [63, 63, 0]


def test_memory_that_is_in_use_is_left_alone(folder: Path) -> None:
    before = started(folder)
    for seed in range(6):
        request(before, text(32, seed))
    cache = started(folder)
    assert cache.disk is not None
    load = Preload(cache, cache.disk.recent())
    cache.open("live", "", text(600, 9))
    cache.extend("live", 600)
    while load.step():
        check_books(cache)
    assert cache.stats.cached == 0
    assert cache.stats.evicted == 0


def test_what_was_used_longest_ago_is_given_up_first(folder: Path) -> None:
    before = started(folder)
    for seed in range(3):
        request(before, text(48, seed))
    cache = preloaded(folder)
    assert cache.stats.cached == 9
    cache.open("live", "", text(20, 9))
    cache.extend("live", 34 * BLOCK)  # three blocks more than are free
    assert [cache.open(str(seed), "", [*text(48, seed), 1]) for seed in (2, 1, 0)] == [48, 48, 0]


def test_a_request_may_come_after_every_page(folder: Path) -> None:
    request(started(folder), text(200))
    cache = started(folder, blocks=100)
    assert cache.disk is not None
    load, found = Preload(cache, cache.disk.recent()), list[int]()
    while load.step():
        found.append(request(cache, [*text(64), 1], tenant="live", writes=False)[0])
        found.append(request(cache, [*text(140), 1, len(found)], writes=False)[0])
    assert len(found) > 10
    assert found[1] == 0
    assert found[3] >= 140
    assert request(cache, text(200)) == (199, 0)


def test_a_step_loads_one_page(folder: Path) -> None:
    request(started(folder), text(159))
    cache = started(folder)
    assert cache.disk is not None
    load, used = Preload(cache, cache.disk.recent()), [0]
    while load.step():
        used.append(cache.blocks - cache.stats.free)
    assert {after - before for before, after in pairwise(used)} == {0, 1}
    assert used[-1] == 10


def test_it_ends_when_its_time_is_up(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    request(started(folder), text(75))
    request(started(folder), text(75, 1))
    monkeypatch.setattr(preload, "SECONDS", 0.0)
    cache = started(folder)
    assert cache.disk is not None
    assert not Preload(cache, cache.disk.recent()).step()
    monkeypatch.setattr(preload, "SECONDS", 1e-9)
    assert preloaded(folder).stats.cached <= 1


def test_a_damaged_page_ends_its_prefix_there(folder: Path) -> None:
    before = started(folder)
    request(before, text(75))
    request(before, text(40, 1))
    assert before.disk is not None
    key = before.disk.keys("", text(75))[3]
    page = next(folder.rglob(f"{key.hex()}.page"))
    page.write_bytes(page.read_bytes()[:-1] + b"\xaa")
    cache = preloaded(folder)
    assert request(cache, text(75))[0] == 32
    assert request(cache, text(40, 1)) == (39, 0)


def test_a_page_that_went_and_a_file_that_is_wrong_find_nothing(folder: Path) -> None:
    before = started(folder)
    request(before, text(75))
    recent = next(folder.rglob("recent"))
    assert before.disk is not None
    before.disk.ended(Prefix("", text(75, 1)))  # no such pages
    assert len(before.disk.recent()) == 2
    assert preloaded(folder).stats.cached == 5
    recent.write_bytes(recent.read_bytes()[:-1] + b"\xaa")
    assert preloaded(folder).stats.cached == 0
    assert request(preloaded(folder), text(75)) == (0, 74)  # as without it


def test_two_processes_tell_the_next_start_of_both(folder: Path) -> None:
    one, other = started(folder), started(folder)
    request(one, text(75), tenant="one")
    request(other, text(75), tenant="other")
    cache = preloaded(folder)
    assert request(cache, text(75), tenant="one") == (74, 0)
    assert request(cache, text(75), tenant="other") == (74, 0)


def test_cleared_pages_are_not_loaded(folder: Path) -> None:
    request(started(folder), text(75))
    assert clear(folder) > 0
    assert not list(folder.rglob("recent"))
    assert preloaded(folder).stats.cached == 0


@pytest.mark.parametrize("tenant", ["", "a", "naïve \ud800"])
def test_a_prefix_is_read_as_it_was_written(tenant: str) -> None:
    written = Prefix(tenant, text(9)).packed()
    read = Prefix.unpacked(written)
    assert (read.tenant, list(read.tokens)) == (tenant, text(9))
    assert Prefix(tenant, text(10)).packed().startswith(written)
    assert not Prefix(f"{tenant}x", text(10)).packed().startswith(written)


def test_a_request_may_take_all_memory_from_a_prefix_that_is_half_loaded(folder: Path) -> None:
    request(started(folder), text(140))
    cache = started(folder)
    assert cache.disk is not None
    load = Preload(cache, cache.disk.recent())
    for _ in range(3):
        assert load.step()
    assert 0 < cache.stats.cached < 8
    cache.open("all", "", text(40 * BLOCK, 5), partial=True)
    feed(cache, "all", text(40 * BLOCK, 5))
    check_books(cache)


def test_what_was_used_before_the_start_is_not_loaded_long_after_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request(started(folder), text(75))
    monkeypatch.setattr(preload, "UNTIL_S", -1.0)
    assert preloaded(folder).stats.cached == 0


def test_clearing_leaves_no_unfinished_file(folder: Path) -> None:
    request(started(folder), text(75))
    (recent,) = folder.rglob("recent")
    recent.with_name("recent.0123.new").write_bytes(b"tokens")
    clear(folder)
    assert not list(folder.rglob("recent*"))
