"""Rounds: every server replays the same conversations, one at a time, in another order every round.

cold: new processes with empty caches. Later conversations may find what earlier ones left.
seen: new processes again, after an earlier one has read the system prompts and tools of all conversations,
and nothing else. Its folder, with whatever it left there, is copied for each round.
"""

import random
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from bench.runs.arms import PLAIN, Arm, Server, command_line, copied
from bench.runs.conversations import Conversation
from bench.runs.replay import History, Run, chat_body, replay, timed
from bench.serve.http_client import Refused, read
from bench.serve.servers import CHAT, RunningServer

COLD, SEEN = "cold", "seen"
STATES: Final = (COLD, SEEN)
FIRST: Final = 1.5  # the first round's time in rounds: plain decoding takes part, and the heads are read
COLD_SHARE: Final = 0.6  # of a round's time, where there is a seen part too
Running = Mapping[str, RunningServer]  # by the name of the server


@dataclass(frozen=True)
class Plan:
    arms: Sequence[Arm]
    conversations: Sequence[Conversation]
    rounds: int
    states: Sequence[str] = STATES
    max_tokens: int = 64
    limit_s: float = float("inf")
    history: History = "recorded"
    seed: int = 0

    @property
    def servers(self) -> list[Server]:
        return list({arm.server.name: arm.server for arm in self.arms}.values())


@dataclass
class Outcome:
    runs: list[Run] = field(default_factory=list)
    conversations: list[Conversation] = field(default_factory=list)  # that all arms answered
    failed: dict[str, str] = field(default_factory=dict)  # conversation -> why
    commands: dict[str, str] = field(default_factory=dict)  # server -> its command line
    rounds: int = 0
    seconds: float = 0.0


class Rounds:
    def __init__(
        self,
        plan: Plan,
        report: Callable[[str], None] = print,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._plan = plan
        self._report = report
        self._clock = clock
        self._rng = random.Random(plan.seed)
        self._outcome = Outcome(conversations=list(plan.conversations))
        self._begun = clock()

    def run(self) -> Outcome:
        """A further round begins only if it can end in time, judged by the last one."""
        with tempfile.TemporaryDirectory() as folder:
            last_s = 0.0
            for number in range(self._plan.rounds):
                begun = self._clock()
                if number and begun - self._begun + last_s > self._plan.limit_s:
                    self._report(f"{number} of {self._plan.rounds} rounds: no time for another")
                    break
                self._round(number, Path(folder))
                last_s = self._clock() - begun
                self._outcome.rounds = number + 1
        names = {one.name for one in self._outcome.conversations}
        self._outcome.runs = [run for run in self._outcome.runs if run.conversation in names]
        self._outcome.seconds = self._clock() - self._begun
        return self._outcome

    def _round(self, number: int, folder: Path) -> None:
        if COLD in self._plan.states:
            self._cold(number, folder)
        if SEEN in self._plan.states:
            heads = folder / "heads"
            if number == 0:
                self._read_heads(heads)
            with self._started(lambda server: copied(heads / server.name, _new(folder))) as running:
                for conversation in self._order(number):
                    self._replay(running, conversation, number, SEEN)

    def _cold(self, number: int, folder: Path) -> None:
        """The first round settles how many conversations there is time for."""
        share = self._plan.limit_s * FIRST / (FIRST + self._plan.rounds - 1)
        share *= COLD_SHARE if SEEN in self._plan.states else 1.0
        done = 0  # tokens: each conversation is read once, as far as its longest prompt goes
        with self._started(lambda server: _new(folder)) as running:
            for place, conversation in enumerate(self._order(number)):
                used_s, tokens = self._clock() - self._begun, max(conversation.prompt_tokens)
                if number == 0 and place and used_s * (done + tokens) / done > share:
                    self._report(f"{place} of {len(self._plan.conversations)} conversations: time is short")
                    self._outcome.conversations = self._outcome.conversations[:place]
                    break
                self._replay(running, conversation, number, COLD)
                done += tokens

    def _order(self, number: int) -> list[Conversation]:
        """As chosen in the first round, then shuffled."""
        here = list(self._outcome.conversations)
        return self._rng.sample(here, len(here)) if number else here

    @contextmanager
    def _started(self, folder_of: Callable[[Server], Path]) -> Iterator[Running]:
        with ExitStack() as stack:
            running = {}
            for server in self._plan.servers:
                running[server.name] = served = server.start(folder_of(server))
                stack.callback(served.close)
                self._outcome.commands.setdefault(server.name, command_line(served))
            yield running

    def _read_heads(self, heads: Path) -> None:
        """An earlier process of each server reads every head once, and ends."""
        arms = {arm.server.name: arm for arm in self._plan.arms if arm.name != PLAIN}
        for arm in arms.values():
            own = heads / arm.server.name
            own.mkdir(parents=True)
            served = arm.server.start(own)
            try:
                for conversation in {one.head_id: one for one in self._outcome.conversations}.values():
                    messages, tools = conversation.head
                    read(served.port, CHAT, chat_body(messages, tools, 1, arm.body))
                    arm.server.save(served, conversation.head_id)
            finally:
                served.close()

    def _replay(self, running: Running, conversation: Conversation, number: int, state: str) -> None:
        """Plain decoding takes part once: its text is the same in every round."""
        arms = [arm for arm in self._plan.arms if arm.name != PLAIN or (number == 0 and state == COLD)]
        for arm in self._rng.sample(arms, len(arms)):
            if conversation.name in self._outcome.failed:
                return
            try:
                run = self._run(running[arm.server.name], arm, conversation, number, state)
            except (Refused, OSError) as problem:
                self._fail(conversation, f"{arm.name}: {problem}")
            else:
                self._outcome.runs.append(run)
                self._report(
                    f"round {number + 1} {state} {conversation.name}: {arm.name} {run.seconds:.1f} s"
                )

    def _run(
        self, served: RunningServer, arm: Arm, conversation: Conversation, number: int, state: str
    ) -> Run:
        setup_s = timed(lambda: arm.server.restore(served, conversation.head_id)) if state == SEEN else 0.0
        plan = self._plan
        turns = replay(served.port, conversation, plan.max_tokens, arm.body, plan.history)
        return Run(arm.name, state, number, conversation.name, turns, setup_s)

    def _fail(self, conversation: Conversation, reason: str) -> None:
        """A conversation that one arm cannot answer is left out for all."""
        self._report(f"left out: {conversation.name}: {reason}")
        self._outcome.failed[conversation.name] = reason
        self._outcome.conversations.remove(conversation)


def fastest(
    plan: Plan, candidates: Sequence[Arm], report: Callable[[str], None]
) -> tuple[Arm, dict[str, float]]:
    """The arm that replays the shortest conversation soonest, and the seconds of each."""
    shortest = min(plan.conversations, key=lambda one: (sum(one.prompt_tokens), one.name))
    seconds: dict[str, float] = {}
    for arm in candidates:
        trial = Plan([arm], [shortest], 1, (COLD,), plan.max_tokens, seed=plan.seed)
        try:
            runs = Rounds(trial, lambda _: None).run().runs
        except RuntimeError as problem:
            report(f"left out: {arm.name}: {problem}")
            continue
        if runs:
            seconds[arm.name] = runs[0].seconds
            report(f"{arm.name}: {runs[0].seconds:.1f} s for {shortest.name}")
    if not seconds:
        raise RuntimeError("none of these settings answers")
    best = min(seconds, key=lambda name: seconds[name])
    return next(arm for arm in candidates if arm.name == best), seconds


def _new(folder: Path) -> Path:
    return Path(tempfile.mkdtemp(dir=folder))
