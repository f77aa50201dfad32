"""The `metrics` object at the root of a response, in vLLM's shape."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paceline.server.finished import RequestStats
from paceline.types import Round


def speculative_metrics(rounds: Sequence[Round], detailed: bool, max_draft: int = 0) -> dict[str, Any]:
    """`metrics.speculative_decoding` of one output. A step is a round that had a draft.

    max_draft: what the request allows; guesses that are certain and trees may go beyond it.
    """
    steps = [r for r in rounds if len(r.draft)]
    drafted = [len(r.draft) for r in steps]
    accepted = [len(r.path) for r in steps]
    longest = max([max_draft, *drafted])
    histogram = [0] * (longest + 1)
    for count in accepted:
        histogram[count] += 1
    per_step = {"per_step_accepted": accepted, "per_step_drafted": drafted} if detailed else {}
    return {
        "mean_acceptance_length": 1 + _ratio(sum(accepted), len(steps)),
        "draft_acceptance_rate": _ratio(sum(accepted), sum(drafted)),
        "acceptance_histogram": histogram,
        "num_spec_steps": len(steps),
        "num_accepted_draft_tokens": sum(accepted),
        "num_draft_tokens": sum(drafted),
        "num_spec_tokens": longest,
        **per_step,
    }


def request_timings(finished: RequestStats) -> dict[str, float | None]:
    """The other fields of `metrics`; None where there were no tokens to measure.

    As with vLLM, the first token is timed from when the engine took the request up, not from its arrival.
    """
    at_work = None if finished.prefill_s is None else finished.prefill_s + finished.decode_s
    return {
        "time_to_first_token_ms": _ms(finished.prefill_s),
        "generation_time_ms": _ms(None if at_work is None else finished.decode_s),
        "queue_time_ms": _ms(finished.queue_s),
        "mean_itl_ms": _ms(finished.token_s),
        "tokens_per_second": finished.output_tokens / at_work if at_work else None,
    }


@dataclass(frozen=True, slots=True)
class SpecWork:
    """Who guessed for one output, and its share of the passes it was in."""

    method: str  # drafters, in the order they were to be asked
    draft_s: float
    verify_s: float


def spec_work(rounds: Sequence[Round]) -> SpecWork:
    method = "+".join(rounds[0].drafters) if rounds else ""
    return SpecWork(method, sum(draft_share(r) for r in rounds), sum(target_share(r) for r in rounds))


def draft_share(r: Round) -> float:
    """Seconds. The shares of a pass add up to what it took."""
    return r.draft_us / 1e6 / max(1, r.batch)


def draft_shares(r: Round) -> dict[str, float]:
    """Seconds by drafter; what was spent on choosing among their guesses is nobody's: ""."""
    rest = r.draft_us - sum(r.draft_us_by.values())
    return {name: us / 1e6 / max(1, r.batch) for name, us in {**r.draft_us_by, "": rest}.items() if us > 0}


def target_share(r: Round) -> float:
    return r.target_us / 1e6 / max(1, r.batch)


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1000
