"""Estimates in a file: a restart plans as the last requests did; a changed drafter is estimated anew."""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from paceline.config import SpecConfig
from paceline.engine.control import Rate
from paceline.engine.estimates import Estimates
from paceline.engine.saved_estimates import MAX_ROUTES, SavedEstimates, estimates_path
from paceline.types import Drafter, Round
from support.simulation import SMALL_CPU, SimulatedDrafter, Timer, bursts, simulate

LIST = ("suffix", "ngram", "block")


def drafters(timer: Timer) -> list[SimulatedDrafter]:
    """One that claims too much, one that claims too little, and a dear head."""
    return [
        SimulatedDrafter("suffix", bursts(0.6, 0.5), timer, us=60, claims=lambda _: 0.95),
        SimulatedDrafter("ngram", bursts(0.3, 0.9, 6), timer, us=10, claims=lambda _: 0.4),
        SimulatedDrafter("block", bursts(1, 0.3), timer, us=900, read_us=100, taps=(1,), node_us=30),
    ]


def named(fingerprints: Mapping[str, str]) -> dict[str, Drafter]:
    made = {d.name: d for d in drafters(Timer())}
    for name, fingerprint in fingerprints.items():
        made[name].fingerprint = fingerprint
    return dict(made)


SAME = named(dict.fromkeys(LIST, "1"))


def plans(rate: Rate, tokens: int = 40) -> list[tuple[int, tuple[str, ...], int, int]]:
    """Budget, drafters asked, nodes drafted and verified, of every pass of new requests."""
    done = simulate(SMALL_CPU, drafters, SpecConfig(LIST), 2, tokens, controller=rate)
    rounds: Sequence[Round] = done.rounds
    return [(r.budget, r.asked, len(r.uncut), len(r.draft)) for r in rounds]


def taught() -> Rate:
    rate = Rate(SMALL_CPU)
    plans(rate, 200)
    rate._texts.clear()  # these requests have ended
    return rate


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "estimates.json"
    SavedEstimates(path, taught().estimates, SAME).save()
    return path


def restarted(path: Path, members: Mapping[str, Drafter] = SAME) -> Rate:
    rate = Rate(SMALL_CPU)
    SavedEstimates(path, rate.estimates, members).load()
    return rate


def test_the_first_requests_after_a_restart_are_planned_as_the_last_ones_were(saved: Path) -> None:
    without_restart = taught()
    without_restart._explored = 0.0  # time to look at drafters that do not pay is not saved
    without_restart.cost = Rate(SMALL_CPU).cost  # nor is the time of passes, which is measured at the start
    expected = plans(without_restart)
    assert plans(restarted(saved)) == expected
    assert plans(Rate(SMALL_CPU)) != expected


def test_a_changed_drafter_is_estimated_anew_and_the_others_are_not(saved: Path) -> None:
    changed = restarted(saved, named({"suffix": "2", "ngram": "1", "block": "1"})).estimates
    before = restarted(saved).estimates
    assert {name for _, name in before.acceptance} == set(LIST)
    assert {name for _, name in changed.acceptance} == {"ngram", "block"}
    assert {name for _, name in changed.gains} == {"ngram", "block"}
    assert set(changed.draft_us) == {"ngram", "block"}


def test_what_a_head_adds_to_passes_is_kept_as_long_as_it_is_the_same(saved: Path) -> None:
    learned = taught().estimates.slowdown["block"].state()
    assert restarted(saved).estimates.slowdown["block"].state() == learned
    assert not restarted(saved, named({"suffix": "1", "ngram": "1", "block": "2"})).estimates.slowdown


def test_a_drafter_without_a_fingerprint_is_never_saved(tmp_path: Path) -> None:
    path, rate = tmp_path / "e.json", taught()
    SavedEstimates(path, rate.estimates, named({"ngram": "1"})).save()
    assert set(json.loads(path.read_text())["drafters"]) == {"ngram"}


def test_entries_of_drafters_that_are_not_loaded_stay(tmp_path: Path) -> None:
    path, rate = tmp_path / "e.json", taught()
    SavedEstimates(path, rate.estimates, SAME).save()
    SavedEstimates(path, Estimates(), {"ngram": SAME["ngram"]}).save()
    after = restarted(path).estimates
    assert {name for _, name in after.acceptance} == {"suffix", "block"}


def test_the_file_holds_numbers_and_names_alone_and_is_bounded(tmp_path: Path) -> None:
    path, rate = tmp_path / "e.json", taught()
    known = rate.estimates
    some = next(iter(known.acceptance.values()))
    known.acceptance.update({(f"route {i}", "suffix"): some for i in range(2 * MAX_ROUTES)})
    SavedEstimates(path, known, SAME).save()
    assert path.stat().st_size < 500_000
    routes = json.loads(path.read_text())["drafters"]["suffix"]["routes"]
    assert len(routes) == MAX_ROUTES
    assert f"route {2 * MAX_ROUTES - 1}" in routes
    for state in routes.values():
        assert set(state) == {"acceptance", "gain"}
        assert all(isinstance(x, int | float) for values in state.values() for x in values or ())


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "[]",
        lambda text: '{"version": 2}',
        lambda text: text.replace('"fingerprint": "1"', '"fingerprint": "1", "routes": 3, "x": 1').replace(
            '"routes": {', '"y": {'
        ),
        lambda text: text.replace('"gain": [', '"gain": [-1, '),
        lambda text: text.replace('"gain": [', '"gain": ["NaN", '),
        lambda text: text.replace('"acceptance": [', '"acceptance": [1e9, '),
        lambda text: "{" * 100_000,
    ],
)
def test_a_damaged_file_is_a_fresh_start_and_a_line_in_the_log(
    damage: Callable[[str], str], saved: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, rate = tmp_path / "e.json", Rate(SMALL_CPU)
    damaged = damage(saved.read_text())
    assert damaged != saved.read_text()
    path.write_text(damaged)
    with caplog.at_level(logging.WARNING, "paceline"):
        assert not SavedEstimates(path, rate.estimates, SAME).load()
    assert "drafters are estimated anew" in caplog.text
    assert rate.estimates == Estimates()
    SavedEstimates(path, taught().estimates, SAME).save()  # it is written anew
    assert SavedEstimates(path, rate.estimates, SAME).load()


def test_no_file_and_one_of_another_version_are_no_damage(
    tmp_path: Path, saved: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "e.json"
    assert not SavedEstimates(path, Estimates(), SAME).load()
    path.write_text(saved.read_text().replace('"version": 2', '"version": 1'))
    assert not SavedEstimates(path, Estimates(), SAME).load()
    assert not caplog.text


def test_a_model_and_a_machine_have_a_file_of_their_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    one, other = estimates_path("model a, native, cpu"), estimates_path("model b, native, cpu")
    assert one != other
    assert one.parent == tmp_path / "estimates"
