"""A pair: one request that baseline and candidate both answered. Checks and verdicts read nothing else.

Times are seconds of one monotonic clock, from the start of their leg. Raw chunk times are stored, so that the
figures of any client (vLLM's TPOT, AIPerf's ITL, ...) can be computed later.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Final, Literal, TypeVar

from paceline.errors import DataError, unknown_name

Order = Literal["baseline_first", "candidate_first", "concurrent"]
Arm = Literal["baseline", "candidate"]
ARMS: Final[tuple[Arm, Arm]] = ("baseline", "candidate")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call as the model wrote it. The gate compares calls and never executes one."""

    name: str
    arguments: str  # JSON, if the model wrote JSON


@dataclass(frozen=True, slots=True, kw_only=True)
class Leg:
    """One upstream's answer. A figure that the upstream does not report is None."""

    upstream: str = ""  # its name in the configuration
    model: str = ""  # as the response names it
    response_id: str = ""
    status: int | None = None  # of HTTP; None: no response came
    error: str | None = None  # a code, never a text: "timeout", "connect", "http_500", ...
    finish_reason: str | None = None
    seconds: float = 0.0  # end to end
    chunk_s: tuple[float, ...] = ()  # arrival of each chunk with content
    chunk_tokens: tuple[int, ...] = ()  # of each chunk: reported, or divided by characters; (): not known
    prompt_tokens: int | None = None
    cached_tokens: int | None = None  # of the prompt
    completion_tokens: int | None = None
    passes: int | None = None  # of the target
    draft_tokens: int | None = None
    accepted_tokens: int | None = None
    acceptance_histogram: tuple[int, ...] = ()  # draft passes by accepted tokens: 0, 1, ...
    gpu_s: float | None = None
    gpu_utilization: float | None = None  # 0 to 1
    retries: int = 0
    fallback: bool = False  # another upstream answered in its place
    scores: Mapping[str, float] = field(default_factory=dict)  # by evaluator
    text: str | None = None  # None: texts are not recorded
    tool_calls: tuple[ToolCall, ...] = ()
    calls: int = 0  # number of tool calls, recorded in any case

    @property
    def ok(self) -> bool:
        return self.error is None and self.status is not None and self.status < 400

    @property
    def ttft_s(self) -> float | None:
        """Time to first token."""
        return self.chunk_s[0] if self.chunk_s else None

    @property
    def first_tokens(self) -> int:
        """Tokens in the first chunk: speculation may bring several at once."""
        return max(1, self.chunk_tokens[0]) if self.chunk_tokens else 1

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first chunk; None: all came at once.

        (last - first) / (tokens - those of the first chunk), AIPerf's inter-token latency. Divided by
        (tokens - 1), as vLLM's TPOT is, a first chunk of many tokens would pass for speed.
        """
        later = (self.completion_tokens or 0) - self.first_tokens
        if len(self.chunk_s) < 2 or later < 1:
            return None
        return (self.chunk_s[-1] - self.chunk_s[0]) / later

    @property
    def draft_passes(self) -> int:
        """Passes that verified a draft."""
        return sum(self.acceptance_histogram)

    @property
    def accepted_by_position(self) -> tuple[int, ...]:
        """How many drafts were accepted at least up to each position; vLLM's `per_pos` counters."""
        histogram = self.acceptance_histogram
        return tuple(sum(histogram[position:]) for position in range(1, len(histogram)))

    @property
    def output(self) -> str | None:
        """Text and tool calls as one string that two legs can be compared by."""
        if self.text is None:
            return None
        calls = "".join(f"\n{call.name}({call.arguments})" for call in self.tool_calls)
        return self.text + calls

    def without_text(self) -> "Leg":
        return replace(self, text=None, tool_calls=())


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first difference of two outputs."""

    character: int  # of the shorter common prefix
    token: int | None = None  # index in the output, where log-probabilities were requested
    margin: float | None = None  # baseline's log-probability lead of its token over the candidate's


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    id: str
    created: float  # unix seconds
    baseline: Leg
    candidate: Leg
    route: str = ""
    cohort: str = ""
    conversation: str = ""  # the pairs of an agent run share it
    endpoint: str = "/v1/chat/completions"
    order: Order = "concurrent"
    experiment: str = ""
    prompt_hash: str = ""  # equal for requests with the same prompt and parameters, whatever the seed
    temperature: float | None = None  # None: not in the request
    seed: int | None = None
    same: bool | None = None  # outputs are identical; None: a leg failed or has no text
    divergence: Divergence | None = None  # None: identical, or not comparable
    request: Mapping[str, Any] | None = None  # the body; None: texts are not recorded

    @property
    def segment(self) -> tuple[str, str]:
        return self.route, self.cohort

    @property
    def ok(self) -> bool:
        return self.baseline.ok and self.candidate.ok

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def legs(self) -> tuple[Leg, Leg]:
        """Baseline, candidate."""
        return self.baseline, self.candidate

    def compared(self) -> "Pair":
        """With `same` and `divergence` of its texts. Before `without_text`: they outlive the texts."""
        baseline, candidate = self.baseline.output, self.candidate.output
        if not self.ok or baseline is None or candidate is None:
            return self
        if baseline == candidate:
            return replace(self, same=True, divergence=None)
        return replace(self, same=False, divergence=Divergence(common_prefix(baseline, candidate)))

    def without_text(self) -> "Pair":
        return replace(
            self, baseline=self.baseline.without_text(), candidate=self.candidate.without_text(), request=None
        )

    def to_json(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"), allow_nan=False)

    @classmethod
    def from_json(cls, line: str | bytes) -> "Pair":
        return pair_from_dict(json.loads(line))


@dataclass(frozen=True, slots=True, kw_only=True)
class Feedback:
    """A user's word on one response. Users see one leg of a pair, so that feedback is not paired."""

    request: str  # id of the response
    arm: Arm  # that answered
    created: float  # unix seconds
    thumbs: Literal["up", "down"] | None = None
    escalation: bool = False  # to a human
    route: str = ""
    cohort: str = ""


def common_prefix(a: str, b: str) -> int:
    """Length of the common prefix, in characters."""
    shorter = min(len(a), len(b))
    return next((i for i in range(shorter) if a[i] != b[i]), shorter)


def pair_from_dict(values: Mapping[str, Any]) -> Pair:
    given = dict(values)
    for arm in ARMS:
        given[arm] = _leg(_mapping(given.get(arm), arm))
    if given.get("divergence") is not None:
        given["divergence"] = _made(Divergence, _mapping(given["divergence"], "divergence"))
    return _made(Pair, given)


def _leg(values: Mapping[str, Any]) -> Leg:
    given = dict(values)
    given["tool_calls"] = tuple(_made(ToolCall, call) for call in given.get("tool_calls", ()))
    for name in ("chunk_s", "chunk_tokens", "acceptance_histogram"):
        given[name] = tuple(given.get(name, ()))
    return _made(Leg, given)


def _mapping(value: object, name: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise DataError(f"a pair's {name} must be an object")
    return value


def _made(cls: type[T], values: Mapping[str, Any]) -> T:
    known = [f.name for f in fields(cls)]  # type: ignore[arg-type]
    if unknown := [name for name in values if name not in known]:
        raise DataError(unknown_name(f"field of a {cls.__name__.lower()}", unknown[0], known))
    try:
        return cls(**values)
    except TypeError as error:
        raise DataError(f"a {cls.__name__.lower()} is incomplete: {error}") from None
