"""Gradual promotion: a candidate's share of users rises stage by stage while the verdict says so.

A rollout begins with mirroring alone (share 0). A stage ends with "promote" over its own pairs, at least so
many of them, and the next stage needs its own proof: under more load a candidate may behave differently.
"Roll back" ends the rollout at once, at any stage, the last included. The share and the audit are in the
store: whichever of several gate processes comes first makes a change, the others find it done.
"""

import asyncio
import logging
import os
import socket
import time
from collections.abc import Callable, Mapping
from concurrent.futures import BrokenExecutor, Executor
from dataclasses import asdict, dataclass
from typing import Any, Final, NamedTuple

from paceline.errors import StoreError
from paceline.gate.policy import Policy
from paceline.gate.store import GateStore, Rollout, RolloutState
from paceline.gate.verdict import Decision, Verdict, decide

log = logging.getLogger("paceline.gate")

POLL_S: Final = 2.0  # between two looks at the store: so long may processes disagree


class Step(NamedTuple):
    state: RolloutState
    share: float


@dataclass(frozen=True, slots=True)
class Plan:
    """How an experiment is promoted."""

    experiment: str
    stages: tuple[float, ...]
    min_pairs: int
    check_every_s: float
    automatic: bool
    policy: Policy


class Judgement(NamedTuple):
    decision: Decision
    pairs: int
    summary: str
    verdict: dict[str, Any]


def next_step(rollout: Rollout, decision: Decision, pairs: int, plan: Plan) -> Step | None:
    """None: nothing changes. pairs: of the current stage."""
    if rollout.state == "rolled_back":
        return None
    if decision == "roll back":
        return Step("rolled_back", 0.0)
    further = [stage for stage in plan.stages if stage > rollout.share]
    if decision != "promote" or not further or pairs < plan.min_pairs:
        return None
    return Step("promoting" if len(further) > 1 else "promoted", further[0])


def judge(store_url: str | None, experiment: str, since: float, policy: dict[str, Any]) -> Judgement:
    """The verdict on a stage. Arguments and result can go to another process and come back."""
    store = GateStore.open(store_url, create=False)
    try:
        verdict = verdict_on(store, experiment, since, Policy.model_validate(policy, strict=False))
    finally:
        store.close()
    return Judgement(verdict.decision, verdict.pairs, verdict.summary, verdict.to_dict())


def verdict_on(store: GateStore, experiment: str, since: float, policy: Policy) -> Verdict:
    """Over the pairs, the feedback and the upstreams' counters of a stage."""
    pairs, feedback = list(store.pairs(experiment, since)), store.feedback(experiment, since)
    return decide(pairs, policy, feedback, store.windows(experiment, since))


def rollout_facts(store: GateStore, plan: Plan) -> tuple[dict[str, Any], Verdict]:
    """A rollout, the verdict on its stage so far, and its audit, as JSON: `gate status` and the page."""
    rollout = store.rollout(plan.experiment)
    verdict = verdict_on(store, plan.experiment, rollout.since, plan.policy)
    facts = {
        **asdict(rollout),
        "stages": plan.stages,
        "pairs": verdict.pairs,
        "verdict": verdict.decision,
        "missing_pairs": verdict.missing_pairs,
        "reasons": verdict.reasons,
        "changes": audit(store, plan.experiment),
    }
    return facts, verdict


def audit(store: GateStore, experiment: str) -> list[dict[str, Any]]:
    """The changes of a rollout, oldest first, without their verdicts."""
    return [{**asdict(change), "verdict": None} for change in store.changes(experiment)]


class Promoter:
    """One gate process's view of the rollouts.

    plans: of the experiments as they are configured now. executor: computes verdicts; None: a thread does.
    """

    def __init__(
        self,
        store: GateStore,
        store_url: str | None,
        plans: Callable[[], Mapping[str, Plan]],
        changed: Callable[[Rollout], None] = lambda rollout: None,
        executor: Executor | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store, self._store_url, self._plans = store, store_url, plans
        self._changed, self.executor, self._clock = changed, executor, clock
        self._rollouts: dict[str, Rollout] = {}
        self._checked: dict[str, tuple[float, int]] = {}  # when, and with how many pairs
        self.actor = f"gate {socket.gethostname()}:{os.getpid()}"

    def share(self, experiment: str) -> float:
        """Of users that the candidate serves."""
        return self._rollouts[experiment].share if experiment in self._rollouts else 0.0

    def mirrors(self, experiment: str) -> bool:
        """A candidate that was rolled back gets nothing more."""
        rollout = self._rollouts.get(experiment)
        return rollout is None or rollout.state != "rolled_back"

    def close(self) -> None:
        if self.executor is not None:
            self.executor.shutdown(cancel_futures=True)

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(POLL_S)

    async def look(self) -> None:
        """Reads the rollouts, and judges those whose time has come. A store that is away changes nothing."""
        try:
            plans = self._plans()
            await asyncio.to_thread(self.refresh, plans)
            for plan in plans.values():
                if plan.automatic and self._due(plan):
                    await self._check(plan)
        except (StoreError, BrokenExecutor) as error:
            log.warning("rollouts stay as they are: %s", error or type(error).__name__)

    def refresh(self, plans: Mapping[str, Plan]) -> None:
        current = {name: self._store.rollout(name) for name in plans}
        for name, rollout in current.items():
            if self._rollouts.get(name) != rollout:
                self._changed(rollout)
        self._rollouts = current

    def _due(self, plan: Plan) -> bool:
        rollout = self._rollouts[plan.experiment]
        at, _ = self._checked.get(plan.experiment, (float("-inf"), 0))
        return rollout.state != "rolled_back" and self._clock() - at >= plan.check_every_s

    async def _check(self, plan: Plan) -> None:
        rollout = self._rollouts[plan.experiment]
        count = await asyncio.to_thread(self._store.count, plan.experiment, rollout.since)
        _, before = self._checked.get(plan.experiment, (0.0, -1))
        self._checked[plan.experiment] = (self._clock(), count)
        if count == before or not count:
            return
        loop = asyncio.get_running_loop()
        judgement = await loop.run_in_executor(
            self.executor,
            judge,
            self._store_url,
            plan.experiment,
            rollout.since,
            plan.policy.model_dump(mode="json"),
        )
        step = next_step(rollout, judgement.decision, judgement.pairs, plan)
        if step is not None:
            await asyncio.to_thread(self._apply, rollout, step, judgement)

    def _apply(self, seen: Rollout, step: Step, judgement: Judgement) -> None:
        summary, verdict = judgement.summary, judgement.verdict
        if self._store.change(seen, step.state, step.share, self.actor, summary, verdict, self._clock()):
            log.info("%s: %s, share %g: %s", seen.experiment, step.state, step.share, summary)
        self._checked.pop(seen.experiment, None)
        self.refresh(self._plans())
