"""The estimates of a controller in a file, so that a restart plans as the last requests did.

One file for a model on a machine. A drafter's estimates are those of its fingerprint: they are dropped where
the drafter has changed, and never saved where it has none. The file holds numbers and the names of routes and
drafters; no text and no token.
"""

import hashlib
import json
import logging
import math
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from paceline.atomic import locked, write_bytes
from paceline.engine.estimates import FIRST, Acceptance, DraftTime, Estimates, Gain, Slowdown, StartTime
from paceline.paths import home
from paceline.types import Drafter

MAX_ROUTES: Final = 64  # of a drafter: the latest
MAX_DRAFTERS: Final = 32  # in the file
MAX_BYTES: Final = 8 << 20  # of a file that is read
_VERSION: Final = 2
_DAMAGE: Final = (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError)

log = logging.getLogger("paceline")

Table = dict[str, Any]  # as JSON


def estimates_path(target: str) -> Path:
    """target: its weights, how it computes, and the machine."""
    return home() / "estimates" / f"{hashlib.sha256(target.encode()).hexdigest()[:32]}.json"


class SavedEstimates:
    """Only `write` may be called from another thread than the controller's."""

    def __init__(self, path: Path, estimates: Estimates, drafters: Mapping[str, Drafter]) -> None:
        """drafters: by name, as they are at any time."""
        self.path = path
        self._estimates, self._drafters = estimates, drafters
        self._damaged = False

    def load(self) -> bool:
        """Puts saved estimates into place; False: there are none that can be used."""
        try:
            table = _read(self.path)
            known = _restored(table, self._fingerprints()) if table else None
        except _DAMAGE as problem:
            self._damaged = True
            log.warning(
                "%s is damaged (%s): drafters are estimated anew", self.path.name, type(problem).__name__
            )
            return False
        if known is None:
            return False
        own = self._estimates
        own.acceptance.update(known.acceptance)
        own.gains.update(known.gains)
        own.draft_us.update(known.draft_us)
        own.start_us.update(known.start_us)
        own.read_us.update(known.read_us)
        own.slowdown.update(known.slowdown)
        own.own_us, own.plain_us, own.real_us = known.own_us, known.plain_us, known.real_us
        return True

    def snapshot(self) -> Table:
        """Numbers of this moment, which `write` may take its time for."""
        known, fingerprints = self._estimates, self._fingerprints()
        return {
            "version": _VERSION,
            "times_us": [known.own_us, known.plain_us, known.real_us],
            "drafters": {name: _drafter_table(known, name, fp) for name, fp in fingerprints.items()},
        }

    def write(self, snapshot: Table) -> None:
        """Replaces the file atomically. Entries of drafters that are not loaded here stay in it."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with locked(self.path.with_suffix(".lock")):
            others: Table = {}
            if not self._damaged:
                with suppress(*_DAMAGE):  # else it is written anew
                    others = dict((_read(self.path) or {}).get("drafters", {}))
            drafters = {**others, **snapshot["drafters"]}
            whole = {**snapshot, "drafters": dict(list(drafters.items())[-MAX_DRAFTERS:])}
            write_bytes(self.path, (json.dumps(whole, allow_nan=False) + "\n").encode(), mode=0o600)
            self._damaged = False

    def save(self) -> None:
        self.write(self.snapshot())

    def _fingerprints(self) -> dict[str, str]:
        """Of the drafters that have one; those written before 0.2 have no such field."""
        named = {name: str(getattr(drafter, "fingerprint", "")) for name, drafter in self._drafters.items()}
        return {name: fingerprint for name, fingerprint in named.items() if fingerprint}


def _read(path: Path) -> Table | None:
    """None: there is no file, or one of another version."""
    if not path.exists():
        return None
    if path.stat().st_size > MAX_BYTES:
        raise ValueError("it is too large")
    table: Table = json.loads(path.read_text("utf-8"))
    return table if table["version"] == _VERSION else None


def _drafter_table(known: Estimates, name: str, fingerprint: str) -> Table:
    routes = [route for route, drafter in known.acceptance if drafter == name]
    routes += [route for route, drafter in known.gains if drafter == name and route not in set(routes)]
    table: Table = {"fingerprint": fingerprint, "routes": {}}
    kept = set(list(dict.fromkeys(route.removesuffix(FIRST) for route in routes))[-MAX_ROUTES:])
    for route in [route for route in routes if route.removesuffix(FIRST) in kept]:
        acceptance, gain = known.acceptance.get((route, name)), known.gains.get((route, name))
        table["routes"][route] = {
            "acceptance": acceptance.state() if acceptance else None,
            "gain": gain.state() if gain else None,
        }
    drafting, reading = known.draft_us.get(name), known.read_us.get(name)
    start, slowdown = known.start_us.get(name), known.slowdown.get(name)
    return {
        **table,
        "draft_us": drafting.state() if drafting else None,
        "start_us": start.state() if start else [],
        "read_us": reading.state() if reading else None,
        "slowdown": slowdown.state() if slowdown else None,
    }


def _restored(table: Table, fingerprints: Mapping[str, str]) -> Estimates:
    """The estimates about these drafters. Raises where a number of them cannot be one of theirs."""
    known = Estimates()
    known.own_us, known.plain_us, known.real_us = _numbers(table["times_us"])
    for name, of_drafter in table["drafters"].items():
        if fingerprints.get(name) != of_drafter["fingerprint"]:
            continue
        for route, state in of_drafter["routes"].items():
            if state["acceptance"] is not None:
                known.acceptance[route, name] = Acceptance.of_state(_numbers(state["acceptance"]))
            if state["gain"] is not None:
                known.gains[route, name] = Gain.of_state(_numbers(state["gain"]))
        if of_drafter["draft_us"] is not None:
            known.draft_us[name] = DraftTime.of_state(_numbers(of_drafter["draft_us"]))
        if of_drafter["start_us"]:
            known.start_us[name] = StartTime.of_state(_numbers(of_drafter["start_us"]))
        if of_drafter["read_us"] is not None:
            known.read_us[name] = DraftTime.of_state(_numbers(of_drafter["read_us"]))
        if of_drafter.get("slowdown") is not None:  # files of 0.2 may lack it
            known.slowdown[name] = Slowdown.of_state(_numbers(of_drafter["slowdown"]))
    return known


def _numbers(values: list[Any]) -> list[float]:
    numbers = [float(value) for value in values]
    if not all(math.isfinite(number) and number >= 0 for number in numbers):
        raise ValueError("a number is out of its range")
    return numbers
