"""A trained head on disk: it comes back as it was, or with a word on what is wrong."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import CorruptModel, DrafterMismatch, PacelineError, UnknownArchitecture, UnknownModel
from paceline.heads.block import BlockHead
from paceline.heads.calibration import Calibration
from paceline.heads.head_checkpoint import (
    CARD,
    SCALE,
    WEIGHTS,
    Card,
    Int8Weights,
    Storage,
    load,
    quantize_int8,
    read_card,
    save,
    save_card,
)
from paceline.train.recipe import pieces_of
from support.heads import random_net, tiny_model

PIECES = pieces_of(tiny_model())


def a_card(net: BlockHead, weights: Storage = "int8") -> Card:
    calibration = Calibration((1.5,) * net.shape.block, (0.25,) * net.shape.block)
    return Card(
        "block", net.shape, "tiny", PIECES.fingerprint, weights, calibration, (0.5,), (1.5,), {"texts": 3}
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    net = random_net(draft_vocab=60)
    save(tmp_path / "mine", a_card(net), net)
    return tmp_path / "mine"


def test_floats_come_back_bit_for_bit(tmp_path: Path) -> None:
    net = random_net(draft_vocab=60)
    save(tmp_path, a_card(net, "float32"), net)
    back = load(tmp_path, PIECES)
    assert back.card == a_card(net, "float32")
    assert torch.equal(back.net.draft_ids, net.draft_ids)
    for name, weight in net.state_dict().items():
        assert torch.equal(back.net.state_dict()[name], weight)


def test_bytes_come_back_as_what_they_stand_for(folder: Path) -> None:
    net, back = random_net(draft_vocab=60), load(folder, PIECES).net
    stored = Int8Weights(quantize_int8(net.state_dict()))
    for name, weight in back.state_dict().items():
        assert torch.equal(weight, stored[name])
    again = load(folder, PIECES).net
    assert all(torch.equal(a, b) for a, b in zip(back.parameters(), again.parameters(), strict=True))
    whole = sum(4 * weight.numel() for weight in net.parameters())
    assert (folder / WEIGHTS).stat().st_size < 0.4 * whole


@given(
    st.integers(0, 1000),
    st.integers(1, 8),
    st.sampled_from([1, 40, 64, 192]),
    st.sampled_from([1e-12, 1e-3, 1.0, 1e6]),
)
def test_a_byte_is_off_by_half_a_step_at_most(seed: int, rows: int, columns: int, size: float) -> None:
    weight = size * torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    weight[0] *= 0
    stored = quantize_int8({"w": weight, "norm": weight[-1]})
    assert stored["w"].dtype == torch.int8
    back = Int8Weights(stored)
    scales = stored["w" + SCALE]
    step = scales.repeat_interleave(columns // scales.shape[1], 1)
    assert bool(((back["w"] - weight).abs() <= 0.501 * step).all())
    assert torch.equal(back["norm"], weight[-1])


def test_the_card_can_be_written_alone(folder: Path) -> None:
    card = replace(read_card(folder), acceptance=(0.9, 0.8), calibration=None)
    save_card(folder, card)
    assert load(folder, PIECES).card == card


def test_files_of_a_killed_writer_are_removed(folder: Path) -> None:
    stored = load(folder, PIECES)
    for name in ("drafter.json.0123.new", "drafter.safetensors.4567.new"):
        (folder / name).touch()
    save(folder, stored.card, stored.net)
    assert list(folder.glob("*.new")) == []


def test_another_target_is_refused(folder: Path) -> None:
    with pytest.raises(DrafterMismatch, match="was trained for tiny"):
        load(folder, replace(PIECES, fingerprint="another"))


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnknownModel, match=CARD):
        load(tmp_path, PIECES)
    with pytest.raises(UnknownModel, match=CARD):
        load(tmp_path / "nowhere", PIECES)


def changed(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    def apply(folder: Path) -> None:
        table = json.loads((folder / CARD).read_text())
        change(table)
        (folder / CARD).write_text(json.dumps(table))

    return apply


BROKEN: list[tuple[Callable[[Path], object], type[PacelineError], str]] = [
    (lambda f: (f / CARD).write_text("{"), CorruptModel, "not JSON"),
    (lambda f: (f / CARD).write_text("[1]"), CorruptModel, "not a table"),
    (changed(lambda t: t.update(format=2)), CorruptModel, "format 1"),
    (
        changed(lambda t: t.update(kind="oracle")),
        UnknownArchitecture,
        "'oracle'; known: block, eagle",
    ),
    (changed(lambda t: t["shape"].update(width=-1)), CorruptModel, "width is -1"),
    (changed(lambda t: t["shape"].update(layers="two")), CorruptModel, "layers is 'two'"),
    (changed(lambda t: t["shape"].update(colour=1)), CorruptModel, "colour"),
    (changed(lambda t: t["shape"].update(taps=["a"])), CorruptModel, "taps"),
    (changed(lambda t: t.update(taste=1)), CorruptModel, "taste"),
    (changed(lambda t: t.pop("shape")), CorruptModel, "shape"),
    (changed(lambda t: t["calibration"]["scale"].pop()), CorruptModel, "5 positions"),
    (changed(lambda t: t["shape"].update(ff_width=65)), CorruptModel, r"layers\.\d\.\w+\.weight should be"),
    (changed(lambda t: t["shape"].update(draft_vocab=61)), CorruptModel, "61 tokens"),
    (lambda f: (f / WEIGHTS).unlink(), CorruptModel, f"no {WEIGHTS}"),
    (lambda f: (f / WEIGHTS).write_bytes((f / WEIGHTS).read_bytes()[:-9]), CorruptModel, "damaged"),
    (lambda f: (f / WEIGHTS).write_bytes(b"not tensors"), CorruptModel, "damaged"),
]


@pytest.mark.parametrize(("harm", "error", "says"), BROKEN, ids=[says for *_, says in BROKEN])
def test_damage_is_named(
    folder: Path, harm: Callable[[Path], object], error: type[PacelineError], says: str
) -> None:
    harm(folder)
    with pytest.raises(error, match=says):
        load(folder, PIECES)


def test_settings_that_are_words_or_yes_or_no_are_checked(tmp_path: Path) -> None:
    from support.heads import eagle_net

    net = eagle_net()
    card = Card("eagle", replace(net.shape, tap_norm="all"), "tiny", PIECES.fingerprint)
    save(tmp_path, card, net)
    assert read_card(tmp_path) == card
    for change, says in (
        ({"tap_norm": "some"}, "tap_norm is 'some'"),
        ({"tap_norm": None}, "tap_norm is None"),
        ({"biased": 1}, "biased is 1"),
        ({"own_embed": None}, "own_embed is None"),
    ):
        save_card(tmp_path, card)
        changed(lambda t, new=change: t["shape"].update(new))(tmp_path)  # type: ignore[misc]
        with pytest.raises(CorruptModel, match=says):
            read_card(tmp_path)
