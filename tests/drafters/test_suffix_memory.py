import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.drafters.suffix.index import ContextIndex
from paceline.drafters.suffix.memory import STRIDE, Memory, load, save
from paceline.errors import CorruptModel, DrafterMismatch, ModelError, UnknownModel, UsageError

DEPTH = 8
Tokens = list[int]


def text(seed: int, length: int) -> Tokens:
    return random.Random(seed).choices(range(1000), k=length)


def filled(**texts: list[Tokens]) -> Memory:
    memory = Memory(10_000, DEPTH)
    for tenant, documents in texts.items():
        for document in documents:
            memory.learn(tenant, document)
    return memory


def continuations(memory: Memory, tenant: str, context: Tokens) -> list[tuple[int, int]]:
    """(tokens in common, what followed), best first."""
    index = memory.index(tenant)
    found = ContextIndex.restore(DEPTH, index.snapshot()).nearest(context, 100) if index else []
    return [(length, log[place]) for length, _, place, log in sorted(found, reverse=True)]


def test_what_is_sent_again_is_not_learnt_again() -> None:
    first = text(1, 10 * STRIDE)
    memory = filled(a=[first])
    held = len(memory)
    memory.learn("a", first)
    assert len(memory) == held
    memory.learn("a", first + text(2, 50))
    assert len(memory) <= held + 50 + DEPTH + 2
    assert memory.known("a", first) == len(first)


def test_what_is_new_is_found_with_what_stood_before_it() -> None:
    first, new = text(1, 3 * STRIDE), text(2, 20)
    memory = filled(a=[first, first + new])
    assert continuations(memory, "a", first[-DEPTH:])[0] == (DEPTH, new[0])
    assert continuations(memory, "a", first[-DEPTH:] + new[:3])[0] == (DEPTH, new[3])


def test_another_past_is_another_text() -> None:
    """The same tokens after a different start are learnt: they may go on differently."""
    common = text(1, 2 * STRIDE)
    memory = filled(a=[[1] * STRIDE + common])
    assert memory.known("a", [2] * STRIDE + common) == 0


def test_a_piece_counts_only_after_the_past_it_was_learnt_with() -> None:
    one, two = text(1, 2 * STRIDE), text(2, 2 * STRIDE)
    memory = filled(a=[one, two])
    assert memory.known("a", one[:STRIDE] + two[STRIDE:]) == STRIDE


def test_what_two_documents_hold_outlives_the_older() -> None:
    memory = Memory(10_000, DEPTH)
    whole = text(1, 4 * STRIDE)
    memory.learn("a", whole[: 2 * STRIDE])
    memory.learn("a", whole)
    memory.tenants["a"].evict()
    memory.learn("a", whole)
    memory.tenants["a"].evict()
    assert memory.known("a", whole) == len(whole)


def test_tenants_are_strangers() -> None:
    secret = text(1, 100)
    memory = filled(a=[secret])
    memory.learn("b", text(2, 100))
    assert continuations(memory, "a", secret[:10])[0] == (DEPTH, secret[10])
    assert all(token not in secret for _, token in continuations(memory, "b", secret[:10]))
    assert memory.known("b", secret) == 0
    assert memory.index("nobody") is None


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 5), st.integers(0, 150)), max_size=12),
    st.integers(10, 300),
)
def test_memory_is_bounded(learnt: list[tuple[str, int, int]], limit: int) -> None:
    memory = Memory(limit, DEPTH)
    for tenant, seed, length in learnt:
        memory.learn(tenant, text(seed, length))
        assert len(memory) <= limit
        assert len(memory) == sum(of_tenant.index.held for of_tenant in memory.tenants.values())
        assert len(memory.order) == sum(of_tenant.index.documents for of_tenant in memory.tenants.values())
        assert all(len(of_tenant.holders) <= limit for of_tenant in memory.tenants.values())


def test_the_oldest_go_first_whoever_they_are() -> None:
    memory = Memory(250, DEPTH)
    for tenant in ("a", "b", "c"):
        memory.learn(tenant, text(ord(tenant), 100))
    assert sorted(memory.tenants) == ["b", "c"]
    memory.learn("b", text(9, 100))
    assert sorted(memory.tenants) == ["b", "c"]
    assert continuations(memory, "b", text(ord("b"), 100)[:20]) == []
    assert continuations(memory, "b", text(9, 100)[:20])[0][0] == DEPTH


def test_what_was_forgotten_is_learnt_again() -> None:
    memory = Memory(250, DEPTH)
    first = text(1, 4 * STRIDE)
    memory.learn("a", first)
    memory.learn("a", text(2, 200))
    assert memory.known("a", first) == 0
    memory.learn("a", first)
    assert memory.known("a", first) == len(first)


def test_of_a_text_that_does_not_fit_the_end_is_kept() -> None:
    memory = Memory(100, DEPTH)
    long = text(1, 1000)
    memory.learn("a", long)
    assert 90 <= len(memory) <= 100
    assert continuations(memory, "a", long[980:990])[0] == (DEPTH, long[990])
    assert memory.known("a", long) == 0  # most of it is not here


def test_saved_and_loaded_it_is_the_same(tmp_path: Path) -> None:
    memory = filled(a=[text(1, 200), text(1, 200) + text(2, 77)], b=[text(3, 50)])
    save(memory, tmp_path / "memory", "tok")
    loaded = load(tmp_path / "memory", "tok", memory.max_tokens, DEPTH)
    for one in (memory, loaded):
        one.learn("c", text(4, 40))
        one.learn("a", text(1, 200) + text(5, 30))
        one.max_tokens = 150
        one.shrink()
    assert (len(loaded), loaded.order) == (len(memory), memory.order)
    for tenant in "abc":
        assert loaded.known(tenant, text(1, 200)) == memory.known(tenant, text(1, 200))
        for seed in range(1, 6):
            assert continuations(loaded, tenant, text(seed, 33)) == continuations(
                memory, tenant, text(seed, 33)
            )


def test_nothing_is_a_memory_too(tmp_path: Path) -> None:
    save(Memory(100, DEPTH), tmp_path / "memory", "tok")
    assert len(load(tmp_path / "memory", "tok", 100, DEPTH)) == 0


def test_tenants_may_have_any_name(tmp_path: Path) -> None:
    memory = filled(**{"": [text(1, 20)], "ü\x00/..": [text(2, 20)], "ü": [text(3, 20)]})
    save(memory, tmp_path / "memory", "tok")
    assert set(load(tmp_path / "memory", "tok", 1000, DEPTH).tenants) == {"", "ü\x00/..", "ü"}


def test_a_smaller_limit_evicts_on_loading(tmp_path: Path) -> None:
    save(filled(a=[text(1, 100)], b=[text(2, 100)]), tmp_path / "memory", "tok")
    assert list(load(tmp_path / "memory", "tok", 150, DEPTH).tenants) == ["b"]


def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "memory"
    save(filled(a=[text(1, 100)]), path, "tok")
    with pytest.raises(DrafterMismatch, match=r"memory was learnt with tokenizer tok.*other"):
        load(path, "other", 1000, DEPTH)
    with pytest.raises(UsageError, match=r"max_depth=9.*expected 8"):
        load(path, "tok", 1000, 9)


def cut(raw: bytes) -> bytes:
    return raw[: len(raw) // 2]


def overwritten(raw: bytes) -> bytes:
    return raw[:2000] + bytes(64) + raw[2064:]


def nothing(raw: bytes) -> bytes:
    return b""


def something_else(raw: bytes) -> bytes:
    return b"not a memory at all"


@pytest.mark.parametrize("damage", [cut, overwritten, nothing, something_else])
def test_a_damaged_file_is_named(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    path = tmp_path / "memory"
    save(filled(a=[text(1, 1000)]), path, "tok")
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(CorruptModel, match=r"memory is damaged or no suffix memory"):
        load(path, "tok", 10_000, DEPTH)


def test_damage_anywhere_is_noticed_or_harmless(tmp_path: Path) -> None:
    """Either the file is refused, or what is loaded is what was saved."""
    path = tmp_path / "memory"
    document = text(1, 60)
    save(filled(a=[document]), path, "tok")
    raw = path.read_bytes()
    for position in range(0, len(raw), 3):
        path.write_bytes(raw[:position] + bytes([raw[position] ^ 0x55]) + raw[position + 1 :])
        try:
            loaded = load(path, "tok", 10_000, DEPTH)
        except ModelError:
            continue
        assert continuations(loaded, "a", document[:20])[0] == (DEPTH, document[20])


def test_files_of_another_kind_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnknownModel, match="nowhere: no such file"):
        load(tmp_path / "nowhere", "tok", 100, DEPTH)
    np.save(tmp_path / "array.npy", np.arange(5))
    np.savez(tmp_path / "arrays.npz", header=np.frombuffer(b'{"format": "x"}', np.uint8))
    np.savez(tmp_path / "pickle.npz", header=np.array([{}], dtype=object))
    for name in ("array.npy", "arrays.npz", "pickle.npz"):
        with pytest.raises(CorruptModel, match=name):
            load(tmp_path / name, "tok", 100, DEPTH)


def test_a_save_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "memory"
    save(filled(a=[text(1, 20)]), path, "tok")
    before = path.read_bytes()

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    with pytest.raises(ModelError, match=r"memory: No space left on device"):
        save(filled(a=[text(2, 20)]), path, "tok")
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["memory"]


def test_a_save_to_nowhere_says_so(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot write"):
        save(Memory(100, DEPTH), tmp_path / "no such folder" / "memory", "tok")


def test_only_the_owner_can_read_it(tmp_path: Path) -> None:
    save(filled(a=[text(1, 20)]), tmp_path / "memory", "tok")
    assert (tmp_path / "memory").stat().st_mode & 0o077 == 0
