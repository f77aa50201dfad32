"""Measures what the planner needs at a server: round trip, time of a token, and how drafts are accepted."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from paceline.drafters.ngram import Ngram
from paceline.errors import PacelineError, UsageError
from paceline.split.edge import Edge, EdgeSettings
from paceline.split.planner import SplitCosts
from paceline.split.wire import MAX_WAIT_MS, Mode
from paceline.types import Ask, Draft

PINGS: Final = 20
PERCENTILE: Final = 0.95
MAX_ACCEPTANCE: Final = 0.99  # of a sample in which nothing was rejected
ONLY_EDGE: Final[Mapping[str, Any]] = {"speculative_config": {"drafters": ["mailbox"]}}
PLAIN: Final[Mapping[str, Any]] = {"speculative_config": {"num_speculative_tokens": 0}}


@dataclass(frozen=True, slots=True)
class Measured:
    """Figures of one server, from here. acceptance: share of the verified tokens that were accepted."""

    rtt_ms: float  # 95th percentile of pings
    target_ms: float  # between two tokens without drafts, after the first
    draft_ms: float  # of a token of the drafter `ngram`
    acceptance: float | None  # None: no draft was verified
    tokens: int  # that target_ms and acceptance rest on
    verified: int

    def costs(self, **given: float) -> SplitCosts:
        """For the planner. given: values that replace measured ones, and further settings of the planner."""
        found = {name: getattr(self, name) for name in ("rtt_ms", "target_ms", "draft_ms", "acceptance")}
        values: dict[str, Any] = {**found, **given}
        if values["acceptance"] is None:
            raise UsageError("no draft was verified in this answer: give another --prompt, or --acceptance")
        return SplitCosts(**values)


class _TimedNgram(Ngram):
    seconds = 0.0
    drafted = 0

    def draft(self, asks: Sequence[Ask]) -> list[Draft]:
        begun = time.perf_counter()
        drafts = super().draft(asks)
        self.seconds += time.perf_counter() - begun
        self.drafted += sum(len(draft.tokens) for draft in drafts)
        return drafts


async def measure(url: str, body: Mapping[str, Any], api_key: str | None = None) -> Measured:
    """Answers a request twice, once without drafts. body: as for /v1/chat/completions or /v1/completions."""
    seeded, ngram = {"seed": 0, **body}, _TimedNgram()
    async with Edge(url, [], api_key=api_key) as streaming:
        plain = await streaming.generate({**seeded, **PLAIN})
        round_trips = sorted(await streaming.round_trips_s(PINGS))
    if len(plain.token_ids) < 2:
        raise PacelineError(
            "the answer has less than two tokens: nothing can be measured; give another prompt"
        )
    patient = EdgeSettings(Mode.PATIENT, MAX_WAIT_MS)  # drafts are to be verified, however far the server is
    drafted = await Edge(url, [ngram], patient, api_key).generate({**seeded, **ONLY_EDGE})
    verified = int(drafted.report.get("drafted_tokens", 0))
    accepted = int(drafted.report.get("accepted_tokens", 0))
    streamed_s = plain.seconds - plain.first_token_s
    return Measured(
        1000 * round_trips[int(PERCENTILE * (PINGS - 1))],
        1000 * streamed_s / (len(plain.token_ids) - 1),
        1000 * ngram.seconds / ngram.drafted if ngram.drafted else 0.0,
        min(MAX_ACCEPTANCE, accepted / verified) if verified else None,
        len(plain.token_ids),
        verified,
    )
