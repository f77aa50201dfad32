"""The policy: margins and error rates of a verdict, written before the data are seen."""

import hashlib
from typing import Annotated, Final

from pydantic import Field

from paceline.web.config_file import StrictModel

Share = Annotated[float, Field(gt=0, lt=1)]
Ratio = Annotated[float, Field(ge=1)]
Milliseconds = Annotated[float, Field(ge=0)]

# Shares of the speed checks' error rate. The rest is for proof of a gain: gains are large, so that little
# suffices.
HARM_SHARE: Final = 0.8
DISTRIBUTION_SHARE: Final = 0.25  # of the other checks' error rate: its looks divide it again
# Of a latency check's error rate for proof, where a margin in milliseconds may prove harmlessness too.
INCREASE_SHARE: Final = 0.2
LATENCY_WEIGHTS: Final = {"end_to_end": 0.5, "tpot": 0.25, "ttft": 0.25}


class Policy(StrictModel):
    """Ratios are candidate over baseline; margins of rates are differences of shares.

    A latency may grow by its ratio or by its milliseconds, whichever is more; 0 ms: by the ratio alone. 10 ms
    are the ratio's tenth of 100 ms, below which people perceive no delay. TPOT has none: it counts once for
    every token.
    """

    alpha: Share = 0.05  # chance of a false verdict, of the speed checks and of the other checks each
    min_speedup: Ratio = 1.0  # that TPOT or end-to-end time must exceed, proven
    max_ttft_ratio: Ratio = 1.10
    max_tpot_ratio: Ratio = 1.05
    max_end_to_end_ratio: Ratio = 1.05
    max_ttft_increase_ms: Milliseconds = 10.0
    max_tpot_increase_ms: Milliseconds = 0.0
    max_end_to_end_increase_ms: Milliseconds = 10.0  # also of its quantiles and its standard deviation
    max_quantile_ratio: Ratio = 1.20  # of p50 and p99; where the mean may grow by more, so may these
    max_variance_ratio: Ratio = 2.0  # of end-to-end time
    max_cost_ratio: Ratio = 1.05
    rate_margin: Share = 0.02  # errors, truncations, broken tool calls, ...
    schema_margin: Share = 0.005
    score_margin: Share = 0.05  # groundedness, task completion, a judge's scores
    min_acceptance_rate: Annotated[float, Field(ge=0, le=1)] = 0.0
    timeouts_s: tuple[float, ...] = (10.0, 30.0, 60.0)  # of tools and turns that wait for an answer
    lossless: bool = True  # the candidate claims to change no text
    tie_margin: Annotated[float, Field(ge=0)] = 0.1  # log-probability lead below which two tokens tie
    min_segment_share: Annotated[float, Field(ge=0, le=1)] = 0.05  # a smaller route or cohort proves nothing
    seed: int = 0  # of permutation tests

    @property
    def hash(self) -> str:
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()[:16]
