"""The gate's part of the trace store: pairs, feedback, and the rollouts with their audit.

Several gate processes may share one database. A rollout changes only from the version that its writer has
seen (compare and swap), and with an entry in the audit, in one transaction.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

from sqlalchemy import Table, delete, func, insert, or_, select, update

from paceline.gate.pair import Arm, Feedback, Pair, pair_from_dict
from paceline.gate.upstream_metrics import UpstreamWindow
from paceline.paths import home
from paceline.trace.store import Store
from paceline.trace.store.schema import (
    FEEDBACK,
    PAIRS,
    ROLLOUT_CHANGES,
    ROLLOUTS,
    SERVED,
    UPSTREAM_WINDOWS,
)

RolloutState = Literal["mirroring", "promoting", "promoted", "rolled_back"]
MAX_AGE_S: Final = 30 * 86_400.0
MAX_PAIRS: Final = 200_000
BATCH: Final = 500  # pairs in memory while they are read


def default_url() -> str:
    return str(home() / "gate.db")


@dataclass(frozen=True, slots=True)
class Served:
    """Who answered a user's request."""

    request: str  # the gate's id
    response: str  # the upstream's id of its answer
    created: float  # unix seconds
    client: str  # the name of the key
    experiment: str
    route: str
    cohort: str
    arm: Arm


@dataclass(frozen=True, slots=True)
class Rollout:
    """share: of users that the candidate serves. since: unix seconds, when its stage began."""

    experiment: str
    state: RolloutState = "mirroring"
    share: float = 0.0
    since: float = 0.0
    version: int = 0


@dataclass(frozen=True, slots=True)
class Change:
    """An entry of the audit."""

    created: float  # unix seconds
    experiment: str
    actor: str
    reason: str
    from_state: RolloutState
    to_state: RolloutState
    from_share: float
    to_share: float
    verdict: dict[str, Any] | None = None


class GateStore:
    def __init__(self, store: Store) -> None:
        self._store = store
        self.name = store.name

    @classmethod
    def open(cls, url: str | None = None, create: bool = True) -> "GateStore":
        return cls(Store.open(url or default_url(), create=create, made_by="`paceline gate serve`"))

    @property
    def traces(self) -> Store:
        return self._store

    def close(self) -> None:
        self._store.close()

    # Pairs

    def save_pair(self, pair: Pair) -> None:
        """An id is saved once."""
        with self._store.transaction("a pair cannot be saved", writes=True) as connection:
            connection.execute(
                insert(PAIRS).values(
                    id=pair.id, created=pair.created, experiment=pair.experiment, pair=asdict(pair)
                )
            )

    def experiments(self) -> list[str]:
        """Those with pairs."""
        with self._store.transaction("experiments cannot be read") as connection:
            return list(
                connection.scalars(select(PAIRS.c.experiment).distinct().order_by(PAIRS.c.experiment))
            )

    def pairs(self, experiment: str, since: float = 0.0) -> Iterator[Pair]:
        """In the order they were saved."""
        last = 0
        query = select(PAIRS.c.key, PAIRS.c.pair).order_by(PAIRS.c.key).limit(BATCH)
        query = query.where(PAIRS.c.experiment == experiment, PAIRS.c.created >= since)
        while True:
            with self._store.transaction("pairs cannot be read") as connection:
                rows = connection.execute(query.where(PAIRS.c.key > last)).all()
            if not rows:
                return
            yield from (pair_from_dict(row.pair) for row in rows)
            last = rows[-1].key

    def pair(self, experiment: str, id: str) -> Pair | None:
        query = select(PAIRS.c.pair).where(PAIRS.c.experiment == experiment, PAIRS.c.id == id)
        with self._store.transaction("a pair cannot be read") as connection:
            stored = connection.execute(query).scalar()
        return None if stored is None else pair_from_dict(stored)

    def count(self, experiment: str, since: float = 0.0) -> int:
        query = select(func.count()).where(PAIRS.c.experiment == experiment, PAIRS.c.created >= since)
        with self._store.transaction("pairs cannot be counted") as connection:
            return int(connection.execute(query).scalar_one())

    # Feedback

    def save_served(self, served: Served) -> None:
        with self._store.transaction("an answer cannot be saved", writes=True) as connection:
            connection.execute(insert(SERVED).values(asdict(served)))

    def served(self, id: str) -> Served | None:
        """By the id of the request or of the response; the newest, should an upstream repeat its ids."""
        query = select(SERVED).where(or_(SERVED.c.request == id, SERVED.c.response == id))
        with self._store.transaction("an answer cannot be read") as connection:
            row = connection.execute(query.order_by(SERVED.c.key.desc()).limit(1)).mappings().first()
        return None if row is None else Served(**{k: v for k, v in row.items() if k != "key"})

    def save_feedback(self, feedback: Feedback, experiment: str) -> None:
        """A later word on a request takes the place of an earlier one."""
        row = asdict(feedback) | {"experiment": experiment}
        with self._store.transaction("feedback cannot be saved", writes=True) as connection:
            connection.execute(delete(FEEDBACK).where(FEEDBACK.c.request == feedback.request))
            connection.execute(insert(FEEDBACK).values(row))

    def feedback(self, experiment: str, since: float = 0.0) -> list[Feedback]:
        query = select(FEEDBACK).where(FEEDBACK.c.experiment == experiment, FEEDBACK.c.created >= since)
        with self._store.transaction("feedback cannot be read") as connection:
            rows = connection.execute(query.order_by(FEEDBACK.c.key)).mappings().all()
        return [Feedback(**{k: v for k, v in r.items() if k not in ("key", "experiment")}) for r in rows]

    # Counters of upstreams

    def save_window(self, experiment: str, window: UpstreamWindow) -> None:
        row = {"created": window.created, "experiment": experiment, "window": window.to_dict()}
        with self._store.transaction("upstream counters cannot be saved", writes=True) as connection:
            connection.execute(insert(UPSTREAM_WINDOWS).values(row))

    def windows(self, experiment: str, since: float = 0.0) -> list[UpstreamWindow]:
        """In order, without overlaps: several gates may read the same upstreams."""
        table = UPSTREAM_WINDOWS
        query = select(table.c.window).where(table.c.experiment == experiment, table.c.created >= since)
        with self._store.transaction("upstream counters cannot be read") as connection:
            rows = connection.execute(query.order_by(table.c.created)).scalars().all()
        found: list[UpstreamWindow] = []
        for window in map(UpstreamWindow.from_dict, rows):
            if not found or window.created - window.seconds / 2 >= found[-1].created:
                found.append(window)
        return found

    # Rollouts

    def rollout(self, experiment: str) -> Rollout:
        """One that nobody has begun mirrors only."""
        query = select(ROLLOUTS).where(ROLLOUTS.c.experiment == experiment)
        with self._store.transaction("a rollout cannot be read") as connection:
            row = connection.execute(query).mappings().first()
        return Rollout(experiment) if row is None else Rollout(**row)

    def rollouts(self) -> list[Rollout]:
        with self._store.transaction("rollouts cannot be read") as connection:
            rows = connection.execute(select(ROLLOUTS).order_by(ROLLOUTS.c.experiment)).mappings().all()
        return [Rollout(**row) for row in rows]

    def change(
        self,
        seen: Rollout,
        state: RolloutState,
        share: float,
        actor: str,
        reason: str,
        verdict: dict[str, Any] | None = None,
        now: float | None = None,
    ) -> bool:
        """Changes a rollout from the version that was seen; False: another was quicker, nothing changed."""
        at = time.time() if now is None else now
        new = {"state": state, "share": share, "since": at, "version": seen.version + 1}
        with self._store.transaction("a rollout cannot be changed", writes=True) as connection:
            if connection.dialect.name == "postgresql":  # two may want to make the first row
                connection.execute(
                    select(func.pg_advisory_xact_lock(func.hashtext(f"rollout:{seen.experiment}")))
                )
            current = select(ROLLOUTS.c.version).where(ROLLOUTS.c.experiment == seen.experiment)
            if (connection.execute(current).scalar() or 0) != seen.version:
                return False
            if seen.version == 0:
                connection.execute(insert(ROLLOUTS).values(experiment=seen.experiment, **new))
            else:
                connection.execute(
                    update(ROLLOUTS).where(ROLLOUTS.c.experiment == seen.experiment).values(new)
                )
            connection.execute(
                insert(ROLLOUT_CHANGES).values(
                    created=at,
                    experiment=seen.experiment,
                    actor=actor,
                    reason=reason,
                    from_state=seen.state,
                    to_state=state,
                    from_share=seen.share,
                    to_share=share,
                    verdict=verdict,
                )
            )
        return True

    def changes(self, experiment: str) -> list[Change]:
        """The audit, oldest first."""
        query = select(ROLLOUT_CHANGES).where(ROLLOUT_CHANGES.c.experiment == experiment)
        with self._store.transaction("the audit cannot be read") as connection:
            rows = connection.execute(query.order_by(ROLLOUT_CHANGES.c.key)).mappings().all()
        return [Change(**{name: value for name, value in row.items() if name != "key"}) for row in rows]

    def prune(self, max_age_s: float = MAX_AGE_S, max_pairs: int = MAX_PAIRS) -> int:
        """Deletes what is too old, and the oldest pairs beyond their number. Returns how many rows."""
        before = time.time() - max_age_s
        tables: Sequence[Table] = (PAIRS, SERVED, FEEDBACK, UPSTREAM_WINDOWS)
        with self._store.transaction("old pairs cannot be deleted", writes=True) as connection:
            gone = sum(connection.execute(delete(t).where(t.c.created < before)).rowcount for t in tables)
            newest = select(PAIRS.c.key).order_by(PAIRS.c.key.desc()).offset(max_pairs).limit(1)
            last = connection.execute(newest).scalar()
            if last is not None:
                gone += connection.execute(delete(PAIRS).where(PAIRS.c.key <= last)).rowcount
        return gone
