"""Plans a split: time per token, passes saved and the longest round trip that pays, for each mode.

Symbols: R round trip, p a pass of the target for one token, v a pass that verifies a draft, d a drafted
token, a the probability that a drafted token is accepted if all before it were (as in arXiv 2211.17192), K
the tokens of a draft, E(K) = (1 - a^(K+1)) / (1 - a) the tokens that a pass over K drafted ones gives.

Plain streaming pays R once per request and p per token, so a split has no network latency to hide. It saves
passes, and it saves time only where R is short against the tokens that it saves: arXiv 2606.25091 concludes
the same.
"""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any, Final, Literal

from paceline.config import require, require_between, require_min, require_positive, require_whole
from paceline.split.wire import MAX_IDS, Commit, DraftMessage, encode

Mode = Literal["streaming", "one-shot", "opportunistic", "patient", "synchronous"]

VERIFY_FACTOR: Final = 1.1  # a pass over a draft to a pass over one token, where nobody measured it
NEGLIGIBLE: Final = 1e-12  # probability of a run so long that it is left out
ID_BYTES: Final = 3  # of a token in a prediction
MAX_RTT_MS: Final = 1e6  # a mode that pays at this round trip pays at any


@dataclass(frozen=True, slots=True)
class SplitCosts:
    """The link, the target and the drafter. Times in milliseconds."""

    rtt_ms: (
        float  # from a message of the edge to the answer of the cloud, queues included: its 95th percentile
    )
    target_ms: float
    draft_ms: float  # of each drafted token
    acceptance: float
    verify_ms: float = 0.0  # 0: VERIFY_FACTOR x target_ms
    max_draft: int = 8  # most drafted tokens in a pass
    message: int = 1  # opportunistic: tokens that the edge drafts before it sends them
    window: int = 64  # most tokens that the edge drafts beyond the last commit it knows of

    def __post_init__(self) -> None:
        require_positive(self, "target_ms")
        require_min(self, rtt_ms=0, draft_ms=0, verify_ms=0)
        require(lambda x: 0 <= x < 1, "acceptance", self.acceptance, "0 to less than 1")
        require_whole(self, "max_draft", "message", "window")
        require_between(self, 1, 64, "max_draft", "message")
        require_between(self, max(self.max_draft, self.message), 4096, "window")
        if not self.verify_ms:
            object.__setattr__(self, "verify_ms", VERIFY_FACTOR * self.target_ms)

    def at(self, rtt_ms: float) -> "SplitCosts":
        """The same with another round trip."""
        return SplitCosts(**{**asdict(self), "rtt_ms": rtt_ms})

    def tokens(self, length: int) -> float:
        """E(K)."""
        return float((1 - self.acceptance ** (length + 1)) / (1 - self.acceptance))

    def pays(self, length: int) -> bool:
        """True if verifying so many tokens takes no longer than decoding what they bring one by one."""
        return length > 0 and self.verify_ms <= self.tokens(length) * self.target_ms


@dataclass(frozen=True, slots=True)
class Rates:
    """Expected, per committed token."""

    ms: float
    passes: float
    rows: float  # positions that the target computes
    drafted: float  # tokens that the edge drafts
    bytes_up: float  # of WebSocket frames, without those of TLS, TCP and IP
    bytes_down: float


def streaming(costs: SplitCosts) -> Rates:
    return Rates(costs.target_ms, 1.0, 1.0, 0.0, 0.0, commit_bytes(1))


def one_shot(costs: SplitCosts) -> Rates:
    """The draft of the whole answer comes with the request: no message is waited for, so R plays no part.

    Time v / E(K) per token, passes 1 / E(K). The acceptance is that of a drafter that finds its way back into
    the predicted text after a difference, as `prediction` does. The edge sends as many tokens as the answer
    has.
    """
    if not costs.pays(costs.max_draft):
        return Rates(costs.target_ms, 1.0, 1.0, 1.0, ID_BYTES, commit_bytes(1))
    tokens, rows = costs.tokens(costs.max_draft), 1 + costs.max_draft
    return Rates(
        costs.verify_ms / tokens, 1 / tokens, rows / tokens, 1.0, ID_BYTES, commit_bytes(rows) / tokens
    )


def synchronous(costs: SplitCosts) -> Rates:
    """Draft, send, verify, answer, one after the other: (K d + R + v) / E(K) per token, R in every round.

    No mode of the server: the textbook's split, for comparison. Break-even R = E(K) p - v - K d.
    """
    length = costs.max_draft
    tokens = costs.tokens(length)
    ms = (length * costs.draft_ms + costs.rtt_ms + costs.verify_ms) / tokens
    up, down = draft_bytes(length) / tokens, commit_bytes(1 + length) / tokens
    return Rates(ms, 1 / tokens, (1 + length) / tokens, length / tokens, up, down)


def opportunistic(costs: SplitCosts) -> Rates:
    """The server never waits: it decodes alone and verifies drafts that are there (see `_passes`).

    Never slower than streaming: a pass over a draft of j tokens is made only if v <= E(j) p, so each pass
    takes at most p for a token that it is expected to give. Drafts overtake the server R / (p - d) tokens
    after a rejection, which a share a^(R / (p - d)) of the runs lives to see.
    """
    return _expected(costs, costs.message, patience_ms=0.0)


def patient(costs: SplitCosts) -> Rates:
    """The server waits for a draft of K tokens before each pass; the edge drafts on while it is verified.

    R is paid once per rejection: E(T) is R (1 - a) per token and a part that R does not change.
    """
    return _expected(costs, costs.max_draft, patience_ms=float("inf"))


@dataclass(frozen=True, slots=True)
class _Pass:
    """A pass of the chain on which every drafted token is accepted."""

    before: int  # tokens of the chain that were committed before it
    ms: float  # with the wait for its draft
    rows: int
    drafted: int  # tokens that the edge sends until it knows of the commit


def _expected(costs: SplitCosts, message: int, patience_ms: float) -> Rates:
    """Renewal-reward theorem, a run being what lies between two rejections.

    After a rejection everything begins anew: the drafter was wrong, and learns the right token. The next l
    drafted tokens are accepted with probability (1 - a) a^l, so a run has 1 / (1 - a) tokens. Up to its end
    it is the chain on which all are accepted, which nothing random changes: pass i of the chain, begun
    after n_i tokens, is made iff those are accepted, with probability a^n_i. So with ms_i for its time,

        E(time of a run) = sum of a^n_i ms_i,    time per token = (1 - a) sum of a^n_i ms_i,

    and likewise for passes (1 each), rows and drafted tokens.
    """
    share = 1 - costs.acceptance
    ms = passes = rows = drafted = down = 0.0
    for one in _passes(costs, message, patience_ms):
        weight = costs.acceptance**one.before
        if weight < NEGLIGIBLE:
            break
        ms += weight * one.ms
        passes += weight
        rows += weight * one.rows
        drafted += weight * one.drafted
        down += weight * commit_bytes(one.rows)
    up = drafted / message * draft_bytes(message)
    return Rates(share * ms, share * passes, share * rows, share * drafted, share * up, share * down)


def _passes(costs: SplitCosts, message: int, patience_ms: float) -> Iterator[_Pass]:
    """The chain from a rejection at time 0, without end.

    The edge knows of it at R / 2, drafts a token every d, and is never more than `window` tokens beyond the
    last commit it knows of. Token j is at the server at a_j = max(a_(j-1), c_(j - window) + R) + d, where
    a_0 = R and c_i is the time of the commit of token i. `message` tokens travel together. The server
    verifies what is there, K tokens at most, and if nothing is there it waits for the next message up to
    patience_ms.
    """
    arrivals, commits, now = [costs.rtt_ms], [0.0], 0.0

    def arrive(until: float) -> int:
        """Tokens that are at the server by then."""
        while arrivals[-1] <= until:
            before = len(arrivals) - costs.window
            if before >= len(commits):
                break  # the window is used up
            known = costs.rtt_ms + (commits[before] if before > 0 else 0.0)
            arrivals.append(max(arrivals[-1], known) + costs.draft_ms)
        return max(0, bisect_right(arrivals, until) - 1)

    sent = 0
    while True:
        committed = len(commits) - 1
        start, wanted = now, (committed // message + 1) * message
        if arrive(now) // message * message <= committed and patience_ms:
            arrive(now + costs.rtt_ms + (message + 1) * costs.draft_ms)
            now = min(now + patience_ms, max(now, arrivals[wanted]))
        usable = min(arrive(now) // message * message - committed, costs.max_draft)
        verified = usable if costs.pays(usable) else 0
        now += costs.verify_ms if verified else costs.target_ms
        total = arrive(now + costs.rtt_ms)
        yield _Pass(committed, now - start, 1 + verified, total - sent)
        sent = total
        commits += [now] * (verified + 1)


@cache
def draft_bytes(tokens: int) -> int:
    """The WebSocket frame of a draft."""
    return _frame(len(encode(DraftMessage(1, 0, 0, (0,) * tokens))), masked=True)


@cache
def commit_bytes(tokens: int) -> int:
    """The WebSocket frame of a commit."""
    return _frame(len(encode(Commit(0, (0,) * min(tokens, MAX_IDS), 0))), masked=False)


def _frame(payload: int, masked: bool) -> int:
    """RFC 6455: two bytes, two more from 126 on, and the mask of a client."""
    return payload + (2 if payload < 126 else 4) + (4 if masked else 0)


def overtakes_after(costs: SplitCosts) -> int | None:
    """Tokens after a rejection before a server that never waits uses a draft; None: it never does."""
    for one in _passes(costs, costs.message, 0.0):
        if one.rows > 1:
            return one.before
        if costs.acceptance**one.before < NEGLIGIBLE:
            return None
    return None


MODES: Final = {
    "streaming": streaming,
    "one-shot": one_shot,
    "opportunistic": opportunistic,
    "patient": patient,
    "synchronous": synchronous,
}


def break_even(mode: Mode, costs: SplitCosts) -> float | None:
    """The longest round trip in ms at which the mode is not slower than streaming; None: any; 0: none.

    Bisection: a longer round trip never makes a mode faster.
    """

    def fits(rtt_ms: float) -> bool:
        return MODES[mode](costs.at(rtt_ms)).ms <= costs.target_ms * (1 + 1e-9)

    if fits(MAX_RTT_MS):
        return None
    low, high = 0.0, 1.0
    while fits(high):
        low, high = high, 2 * high
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


@dataclass(frozen=True, slots=True)
class ModePlan:
    mode: Mode
    ms_per_token: float
    speedup: float  # against plain streaming
    passes_per_token: float
    passes_saved: float  # share of those of plain streaming
    rows_per_token: float
    break_even_rtt_ms: float | None  # None: any round trip
    drafted_per_token: float
    bytes_up: float  # per token, of WebSocket frames
    bytes_down: float


@dataclass(frozen=True, slots=True)
class SplitPlan:
    costs: SplitCosts
    modes: tuple[ModePlan, ...]
    overtakes_after: int | None  # opportunistic: tokens after a rejection

    def mode(self, name: Mode) -> ModePlan:
        return next(one for one in self.modes if one.mode == name)

    @property
    def fastest(self) -> ModePlan:
        """Of the server's modes; one-shot is for an edge that has the text already."""
        return min((self.mode("opportunistic"), self.mode("patient")), key=lambda one: one.ms_per_token)

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "fastest": self.fastest.mode}


def plan(costs: SplitCosts) -> SplitPlan:
    names: tuple[Mode, ...] = ("streaming", "one-shot", "opportunistic", "patient", "synchronous")
    return SplitPlan(costs, tuple(_mode_plan(name, costs) for name in names), overtakes_after(costs))


def _mode_plan(mode: Mode, costs: SplitCosts) -> ModePlan:
    rates = MODES[mode](costs)
    return ModePlan(
        mode,
        rates.ms,
        costs.target_ms / rates.ms,
        rates.passes,
        1 - rates.passes,
        rates.rows,
        break_even(mode, costs),
        rates.drafted,
        rates.bytes_up,
        rates.bytes_down,
    )
