"""The KV cache over its disk tier: rows found after a restart are those that were computed."""

from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from random import Random
from zlib import crc32

import pytest

from paceline.target.kv import cache as kv
from paceline.target.kv.cache import PagedCache
from paceline.target.kv.disk_cache import DiskCache
from paceline.target.kv.page_file import PageFormat
from support.references import check_books, feed, holds, small_cache

BLOCK = 16
FORMAT = bytes(32)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "kv"


def started(folder: Path, blocks: int = 30, mb: int = 16) -> PagedCache:
    """An empty cache, as after a restart."""
    cache = small_cache(blocks, BLOCK)
    checked = PageFormat(FORMAT, lambda page: crc32(page.data))
    cache.disk = DiskCache(folder, checked, mb << 20, cache._rows.page_bytes, BLOCK)
    return cache


def request(
    cache: PagedCache,
    prompt: list[int],
    answer: list[int] | None = None,
    tenant: str = "",
    partial: bool = True,
    writes: bool = True,
    seconds: float = 0.0,
) -> tuple[int, int]:
    """A whole request: what it found in memory, and then on the disk."""
    found = cache.open("r", tenant, prompt, partial, writes)
    rows, more = cache.restore("r", seconds)
    while more:
        check_books(cache)
        rows, more = cache.restore("r", seconds)
    assert rows < len(prompt)
    assert holds(cache, cache.slots("r", 0, rows), prompt[:rows])
    feed(cache, "r", [*prompt, *(answer or [])])
    cache.close("r")
    check_books(cache)
    assert cache.disk is not None
    assert cache.disk.flush()
    return found, rows - found


def text(count: int, seed: int = 0) -> list[int]:
    random = Random(seed)
    return [random.randrange(200) for _ in range(count)]


def test_a_prompt_is_found_after_a_restart_up_to_its_last_token(folder: Path) -> None:
    prompt = text(75)
    assert request(started(folder), prompt, [1] * 9) == (0, 0)
    again = started(folder)
    assert request(again, prompt, [1] * 9) == (0, 74)
    assert request(again, prompt) == (74, 0)
    assert again.stats.hit_tokens == 148
    assert again.stats.disk is not None
    assert again.stats.disk.hit_tokens == 74


def test_the_next_turn_finds_the_answer_too(folder: Path) -> None:
    prompt, answer = text(50), text(40, 1)
    request(started(folder), prompt, answer)
    assert request(started(folder), [*prompt, *answer, 5, 6, 7]) == (0, 90)


def test_blocks_that_memory_gave_up_come_back(folder: Path) -> None:
    cache = started(folder, blocks=6)
    request(cache, text(80, 1))
    request(cache, text(90, 2))
    found, loaded = request(cache, text(80, 1))
    assert found < 64
    assert found + loaded == 79


def test_tenants_never_share_a_page(folder: Path) -> None:
    request(started(folder), text(75), tenant="anna")
    assert request(started(folder), text(75), tenant="bert") == (0, 0)
    assert request(started(folder), text(75), tenant="anna") == (0, 74)


def test_what_must_not_be_remembered_is_not_written(folder: Path) -> None:
    cache = started(folder)
    request(cache, text(75), [1] * 30, writes=False)
    assert not list(folder.glob("*/*.page"))
    assert request(cache, text(75), writes=False) == (74, 0)
    assert not list(folder.glob("*/*.page"))


def test_one_that_may_not_be_written_reads_what_is_there(folder: Path) -> None:
    request(started(folder), text(75))
    assert request(started(folder), text(75), writes=False) == (0, 74)


def test_for_strangers_no_page_ends_where_a_prompt_does(folder: Path) -> None:
    """Nobody can try the few tokens after a block that he knows; what a whole sequence had is found."""
    request(started(folder), text(60), [9] * 2, partial=False)
    assert request(started(folder), text(60), partial=False, writes=False) == (0, 48)
    assert request(started(folder), text(59), partial=False, writes=False) == (0, 48)
    whole = [*text(60), 9, 9]
    assert request(started(folder), [*whole, 1], partial=False, writes=False) == (0, 62)


def test_memory_is_not_given_up_for_a_shorter_page(folder: Path) -> None:
    cache = started(folder)
    request(cache, text(42))  # a part of 9 rows
    request(cache, text(47))  # in memory, a part of 15
    assert request(cache, text(47)) == (46, 0)


def test_blocks_in_memory_that_the_disk_lost_are_written_again_a_few_at_a_time(folder: Path) -> None:
    cache = started(folder)
    request(cache, text(120))
    pages = sorted(folder.glob("*/*.page"))
    for page in pages:
        page.unlink()
    assert cache.disk is not None
    cache.disk._writer.known.clear()
    cache.disk._files.own_version = b"none"  # as if another process had done it
    request(cache, text(120))
    assert len(list(folder.glob("*/*.page"))) == kv.MAX_REWRITES + 1
    request(cache, text(120))
    assert sorted(folder.glob("*/*.page")) == pages


def test_a_damaged_page_ends_the_prefix_there(folder: Path) -> None:
    request(started(folder), text(100))
    cache = started(folder)
    assert cache.disk is not None
    key = cache.disk.keys("", text(100)[:48])[3]
    page = next(folder.glob(f"*/{key.hex()}.page"))
    page.write_bytes(page.read_bytes()[:-1] + b"\7")
    assert request(cache, text(100)) == (0, 32)
    assert request(started(folder), text(100)) == (0, 96)  # computed and written again


def test_a_cache_without_room_computes_what_it_cannot_load(folder: Path) -> None:
    request(started(folder), text(160))
    cache = started(folder, blocks=11)
    cache.open("other", "o", [1] * 40)
    feed(cache, "other", [1] * 40)
    cache.open("s", "", text(160), writes=True)
    rows, more = cache.restore("s", 60)
    assert (rows, more) == (128, False)  # eight blocks are free
    assert holds(cache, cache.slots("s", 0, rows), text(160)[:rows])
    cache.close("s")
    cache.close("other")
    check_books(cache)


def test_pages_come_one_at_a_time_and_may_be_left(folder: Path) -> None:
    request(started(folder), text(160))
    cache = started(folder)
    assert cache.open("s", "", text(160)) == 0
    assert cache.restore("s", 0) == (16, True)
    assert cache.restore("s", 0) == (32, True)
    cache.close("s")
    check_books(cache)
    assert cache.open("t", "", text(160)) == 32
    assert cache.restore("t", 60) == (159, False)


def test_where_the_disk_is_slow_the_system_fetches_what_comes_next(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request(started(folder), text(160))
    fetched: list[int] = []
    monkeypatch.setattr(DiskCache, "read_ahead", lambda self, pages: fetched.append(len(pages)))
    for slow_s, expected in ((-1.0, [8, 7, 6, 5, 4, 3, 2, 1, 0]), (60.0, [])):
        monkeypatch.setattr("paceline.target.kv.cache.SLOW_PAGE_S", slow_s)
        fetched.clear()
        assert request(started(folder), text(160)) == (0, 159)
        assert fetched[1:] == expected


def test_two_sequences_that_load_the_same_share_it(folder: Path) -> None:
    request(started(folder), text(160))
    cache = started(folder)
    for name in ("s", "t"):
        assert cache.open(name, "", text(160)) == 0
    for _ in range(10):
        for name in ("s", "t"):
            cache.restore(name, 0)
            check_books(cache)
    assert cache.length("s") == cache.length("t") == 159
    assert cache.table("s")[:9] == cache.table("t")[:9]


def walk(folder: Path, seed: int) -> int:
    """Conversations that branch, of two tenants, with restarts, few blocks and a small disk."""
    random, past, hits = Random(seed), [list[int]()], 0
    cache = started(folder, blocks=12, mb=1)
    for _ in range(40):
        if random.random() < 0.3:
            cache = started(folder, blocks=12, mb=1)
        begin = random.choice(past)
        cut = random.randint(0, len(begin)) // random.choice((1, BLOCK))
        cut *= BLOCK if cut * BLOCK <= len(begin) else 1
        prompt = [*begin[:cut], *text(random.randint(1, 40), random.randrange(5))][:120]
        answer = text(random.randint(0, 40), random.randrange(3))
        partial, tenant = random.choice([(True, "a"), (True, "b"), (False, "s")])
        hits += request(cache, prompt, answer, tenant, partial, random.random() < 0.8, random.choice((0, 9)))[
            1
        ]
        past.append([*prompt, *answer])
    return hits


@pytest.mark.parametrize("seed", range(3))
def test_any_walk_finds_only_rows_as_they_were_computed(folder: Path, seed: int) -> None:
    assert walk(folder, seed) > 100


def ignores_what_came_before(parent: bytes, tokens: Sequence[int]) -> bytes:
    return sha256(bytes(tokens)).digest()


@pytest.mark.parametrize(
    "mistake", ["key without the prefix", "rows moved by one", "rows of another slot saved"]
)
def test_the_walk_notices(folder: Path, monkeypatch: pytest.MonkeyPatch, mistake: str) -> None:
    memory = type(small_cache(1, BLOCK)._rows)
    save, load = memory.save, memory.load
    if mistake == "key without the prefix":
        for module in ("cache", "disk_cache"):
            monkeypatch.setattr(f"paceline.target.kv.{module}.page_key", ignores_what_came_before)
    elif mistake == "rows moved by one":
        monkeypatch.setattr(
            memory, "load", lambda self, slots, pages: load(self, [s + 1 for s in slots], pages)
        )
    else:
        monkeypatch.setattr(memory, "save", lambda self, slot, rows, page: save(self, slot + 1, rows, page))
    with pytest.raises(AssertionError):
        walk(folder, 0)
