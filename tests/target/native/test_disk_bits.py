"""Logits after a prefix from the disk are those after the same prefix computed, to the bit."""

import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from paceline.target.kv.page_file import HEADER, PageFile, PageStatus
from paceline.target.native import library
from paceline.target.native.target import BLOCKS_BEFORE, NativeKVMemory, NativeTarget
from paceline.types import Draft, Feed, Seq
from support.models import some_tokens
from support.native_targets import SIZES, native_target, runnable, tiny_model
from support.pages import DAMAGES

PROMPT = some_tokens(300, seed=3, vocab=SIZES.vocab)
REST = (5, 9, 2, 7)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("disk") / "m.gguf", "qwen2", "Q4_0")


@pytest.fixture(scope="module")
def expected(model: Path) -> torch.Tensor:
    return logits(native_target(model))[0]


def started(model: Path, folder: Path, **options: Any) -> NativeTarget:
    target = native_target(model, **options)
    target.add_disk_cache(folder, 64 << 20, "m")
    return target


def logits(
    target: NativeTarget, tenant: str = "", remember: bool = True, prompt: list[int] = PROMPT
) -> tuple[torch.Tensor, int]:
    """Of the rows after the prompt, in a pass with a tree; and the tokens that were found on the disk."""
    seq = Seq("s", list(prompt), len(prompt), tenant=tenant, remember=remember)
    computed = target.open(seq)
    assert computed == 0
    computed, more = target.restore(seq.id, 60)
    found = computed
    assert not more
    while computed < len(prompt) - 1:
        piece = prompt[computed : min(computed + 70, len(prompt) - 1)]
        target.forward([Feed(seq.id, piece, scored=False)])
        computed += len(piece)
        target.keep(seq.id, computed)
    rows = target.forward([Feed(seq.id, prompt[computed:], Draft(REST, (-1, 0, -1, 2)))]).logits.clone()
    target.keep(seq.id, len(prompt), (0, 1))
    target.close(seq.id)
    assert target._cache.disk is None or target._cache.disk.flush()
    return rows, found


def pages(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/*.page"))


def test_bits_are_equal_with_any_threads_and_on_every_path(
    model: Path, expected: torch.Tensor, tmp_path: Path
) -> None:
    written, found = logits(started(model, tmp_path))
    assert found == 0
    assert torch.equal(written, expected)
    assert len(pages(tmp_path)) == 6  # four blocks, the end of the prompt, the end of the sequence
    for path in runnable():
        for threads in (1, 3):
            read, found = logits(started(model, tmp_path, path=path, threads=threads, cache_mb=8 * threads))
            assert found == 299
            assert torch.equal(read, expected), (path, threads)
    assert len(pages(tmp_path)) == 6


def test_every_longer_and_shorter_prompt_has_its_own_bits(model: Path, tmp_path: Path) -> None:
    """The rows after a page that is a part of a block, too, and those of another end."""
    logits(started(model, tmp_path))
    for length in (65, 190, 299):
        other = [*PROMPT[:length], *some_tokens(40, seed=length, vocab=SIZES.vocab)]
        read, found = logits(started(model, tmp_path), prompt=other)
        assert found == (299 if length == 299 else length // 64 * 64)
        assert torch.equal(read, logits(native_target(model), prompt=other)[0])


def flip(page: Path) -> None:
    data = bytearray(page.read_bytes())
    data[HEADER + len(data) // 3] ^= 32
    page.write_bytes(data)


def test_flipped_bits_and_swapped_pages_are_computed_again(
    model: Path, expected: torch.Tensor, tmp_path: Path
) -> None:
    for damage in ("flip", "swap"):
        logits(started(model, tmp_path))
        one, two, *_ = [
            page for page in pages(tmp_path) if page.stat().st_size == pages(tmp_path)[0].stat().st_size
        ]
        if damage == "flip":
            for page in pages(tmp_path):
                flip(page)
        else:
            data = one.read_bytes()
            one.write_bytes(two.read_bytes())
            two.write_bytes(data)
        read, found = logits(started(model, tmp_path))
        assert found < 299
        assert torch.equal(read, expected)


@pytest.mark.parametrize("damage", [None, *DAMAGES])
def test_the_threads_of_the_pass_read_a_page_as_python_does(
    model: Path, tmp_path: Path, damage: str | None
) -> None:
    """One that is not whole leaves zeros: a pass may look past the last row."""
    target = started(model, tmp_path)
    logits(target)
    kv, disk = target._kv, target._cache.disk
    assert disk is not None
    keys = disk.keys("", PROMPT[:256])[1:4]
    files = [
        disk._format.file(f"{disk._folder}/{key.hex()}.page", key, 64, kv.page_bytes(64)) for key in keys
    ]
    if damage is not None:
        DAMAGES[damage](Path(files[1].path))
    pages = [np.zeros(kv.page_bytes(64), np.uint8) for _ in files]
    expected = [file.read(page) for file, page in zip(files, pages, strict=True)]
    kv.fill_with_noise(list(range(1024, 1024 + 64 * 3)))
    assert kv.load([1024, 1088, 1152], files) == expected
    assert expected[0] == expected[2] == PageStatus.WHOLE
    assert (expected[1] == PageStatus.WHOLE) == (damage is None)
    for i, page in enumerate(pages):
        read = np.empty_like(page)
        kv.save(1024 + 64 * i, 64, read)
        assert np.array_equal(read, page if expected[i] == PageStatus.WHOLE else np.zeros_like(page))
        assert page.any() or damage is not None


def test_tenants_and_private_requests_stay_apart(model: Path, expected: torch.Tensor, tmp_path: Path) -> None:
    assert logits(started(model, tmp_path), remember=False)[1] == 0
    assert not pages(tmp_path)
    assert logits(started(model, tmp_path), tenant="anna")[1] == 0
    assert logits(started(model, tmp_path), tenant="bert")[1] == 0
    read, found = logits(started(model, tmp_path), tenant="anna")
    assert found == 299
    assert torch.equal(read, expected)


def test_other_weights_find_nothing(model: Path, tmp_path: Path) -> None:
    """Even where only a byte in the middle of a tensor differs, which no sample at its ends shows."""
    logits(started(model, tmp_path))
    other = tmp_path / "other" / "m.gguf"
    other.parent.mkdir()
    other.write_bytes(model.read_bytes())
    target = started(other, tmp_path)
    assert logits(target)[1] == 299  # an equal file elsewhere
    target._held[0].digest = "another"
    target.add_disk_cache(tmp_path, 64 << 20, "m")
    target.forget("")
    assert logits(target)[1] == 0


def test_another_engine_or_layout_finds_nothing(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits(started(model, tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(library, "source_digest", lambda: "another source")
        assert logits(started(model, tmp_path))[1] == 0
    with monkeypatch.context() as patch:
        patch.setattr(NativeKVMemory, "layout", lambda self: ["another layout"])
        assert logits(started(model, tmp_path))[1] == 0
    assert len(library.source_digest()) == 64


def test_rows_of_earlier_sequences_are_never_written(model: Path, tmp_path: Path) -> None:
    """A page that is a part of a block has zeros after its rows, whatever was in the block before."""
    target = started(model, tmp_path)
    target._kv.keys[:], target._kv.values[:] = 1, 1
    logits(target)
    parts = {int.from_bytes(page.read_bytes()[80:84], "little"): page for page in pages(tmp_path)}
    assert sorted(parts) == [299 % 64, 302 % 64, 64]
    for rows in (299 % 64, 302 % 64):
        page = np.frombuffer(parts[rows].read_bytes()[HEADER:], np.int16)
        keys, values = page.reshape(2, SIZES.layers, SIZES.kv_heads, 3, -1)[:, :, :, -1]
        by_token = keys.reshape(*keys.shape[:2], -1, 16, 2)  # codes and scales alike
        assert by_token[:, :, :, : rows % 16].any()
        assert not by_token[:, :, :, rows % 16 :].any()
        codes, scales = np.split(values, [16 * SIZES.head_dim], axis=-1)
        by_token = codes.reshape(*codes.shape[:2], 8, SIZES.head_dim, 2).swapaxes(-1, -2)
        by_token = by_token.reshape(*codes.shape[:2], 16, SIZES.head_dim)
        assert by_token[:, :, : rows % 16].any()
        assert not by_token[:, :, rows % 16 :].any()
        assert not scales.reshape(*codes.shape[:2], 16, 2)[:, :, rows % 16 :].any()


def unchecked(self: NativeKVMemory, slots: Sequence[int], pages: Sequence[PageFile]) -> list[PageStatus]:
    for slot, page in zip(slots, pages, strict=True):
        place(self, slot, page.rows, np.fromfile(page.path, np.uint8)[HEADER:])
    return [PageStatus.WHOLE] * len(pages)


def exchanged(self: NativeKVMemory, slots: Sequence[int], pages: Sequence[PageFile]) -> list[PageStatus]:
    for slot, page in zip(slots, pages, strict=True):
        keys, values = np.split(np.fromfile(page.path, np.uint8)[HEADER:], 2)
        place(self, slot, page.rows, np.concatenate((values, keys)))
    return [PageStatus.WHOLE] * len(pages)


def place(kv: NativeKVMemory, slot: int, rows: int, page: Any) -> None:
    sub, count = slot // 16, -(-rows // 16)
    for array, part in zip((kv.keys, kv.values), np.split(page.view(np.int16), 2), strict=True):
        view = array[:, :, sub : sub + count]
        view[:] = part.reshape(view.shape)


@pytest.mark.parametrize("mistake", ["no checksum", "no tenant", "no layout", "keys and values exchanged"])
def test_these_tests_notice(
    model: Path, expected: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mistake: str
) -> None:
    if mistake == "no checksum":
        monkeypatch.setattr(NativeKVMemory, "load", unchecked)
        caught = test_flipped_bits_and_swapped_pages_are_computed_again
    elif mistake == "no tenant":
        for_all = lambda format, tenant: format  # noqa: E731
        monkeypatch.setattr("paceline.target.kv.disk_cache.root_key", for_all)
        caught = test_tenants_and_private_requests_stay_apart
    elif mistake == "no layout":
        same = SimpleNamespace(dumps=lambda parts: "all the same")
        monkeypatch.setattr("paceline.target.native.target.json", same)
        with pytest.raises(AssertionError):
            test_another_engine_or_layout_finds_nothing(model, tmp_path, monkeypatch)
        return
    else:
        monkeypatch.setattr(NativeKVMemory, "load", exchanged)
        caught = test_bits_are_equal_with_any_threads_and_on_every_path
    with pytest.raises(AssertionError):
        caught(model, expected, tmp_path)


def test_memory_is_ready_for_the_pages_and_what_comes_before_them(
    model: Path, expected: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready: list[int] = []
    ended = threading.Event()

    def noted(memory: NativeKVMemory, slots: int) -> None:
        real(memory, slots)
        ready.append(slots)
        ended.set()

    real = NativeKVMemory.make_ready
    monkeypatch.setattr(NativeKVMemory, "make_ready", noted)
    first = started(model, tmp_path)
    first.make_ready()
    logits(first)  # six pages
    read = started(model, tmp_path, cache_mb=256)
    assert not ready
    read.make_ready()
    assert ended.wait(60)
    assert ready == [(6 + BLOCKS_BEFORE) * 64]
    rows, found = logits(read)
    assert found == 299
    assert torch.equal(rows, expected)


def test_bits_are_equal_after_pages_were_loaded_ahead(
    model: Path, expected: torch.Tensor, tmp_path: Path
) -> None:
    first = started(model, tmp_path)
    assert first.preload() is None
    logits(first, "a")
    logits(first, remember=False)
    assert first._cache.disk is not None
    assert len(first._cache.disk.recent()) == 1
    again = started(model, tmp_path)
    load = again.preload()
    assert load is not None
    while load():
        pass
    seq = Seq("s", list(PROMPT), len(PROMPT), tenant="a")
    assert again.open(seq) == len(PROMPT) - 1
    rows = again.forward([Feed("s", PROMPT[-1:], Draft(REST, (-1, 0, -1, 2)))]).logits
    assert torch.equal(rows, expected)
    again.close("s")
    assert again.open(Seq("t", list(PROMPT), len(PROMPT))) == 0
