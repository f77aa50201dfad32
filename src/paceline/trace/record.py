"""Records of a request and of its rounds, with their text only where that is switched on."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import groupby
from typing import Any, Final, NamedTuple

from paceline.types import Finish, Round

Runs = tuple[tuple[str, int], ...]  # drafter, and nodes in a row

# Parameters other than numbers that are recorded even without text.
TEXTLESS_PARAMS: Final = ("logit_bias", "speculative_config")


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestStats:
    """Figures of one output; a request with n choices has n of them. Times are seconds from its arrival."""

    model: str = ""
    route: str = ""
    endpoint: str = ""  # "/v1/chat/completions"
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of the prompt, found in the prefix cache
    disk_tokens: int = 0  # of these, read from the disk
    output_tokens: int = 0
    passes: int = 0  # of the target; 0: it ended before its first
    drafted_by_source: Mapping[str, int] = field(default_factory=dict)  # tokens by drafter
    accepted_by_source: Mapping[str, int] = field(default_factory=dict)
    finish: Finish | None = None  # "stop", "length", "cancelled" or "error"; None: not ended
    lossy: bool = False  # under accept="typical", which may change the text
    choice: int = 0  # among the outputs of its prompt
    queue_s: float = 0.0  # until its first pass
    first_token_s: float | None = None  # None: no token came
    decode_s: float = 0.0  # from the first token to the last
    seconds: float = 0.0  # until the end

    @property
    def drafted_tokens(self) -> int:
        """Drafted tokens, all drafters together."""
        return sum(self.drafted_by_source.values())

    @property
    def accepted_tokens(self) -> int:
        """Accepted tokens, all drafters together."""
        return sum(self.accepted_by_source.values())

    @property
    def tokens_per_pass(self) -> float:
        """1 in plain decoding, or less: passes over parts of a long prompt count and yield no token."""
        return self.output_tokens / self.passes if self.passes else 0.0

    @property
    def prefill_s(self) -> float | None:
        """From the queue to the first token."""
        return _prefill_s(self.queue_s, self.first_token_s)

    @property
    def token_s(self) -> float | None:
        """Seconds per output token after the first; None: there was no second."""
        if self.first_token_s is None or self.output_tokens < 2:
            return None
        return self.decode_s / (self.output_tokens - 1)


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One output; a request for several has a record of each."""

    id: str
    created: float  # unix seconds
    model: str
    route: str = ""
    endpoint: str = ""  # "/v1/chat/completions"
    tenant: str = ""  # opaque; never an API key
    client: str = ""  # the name of its API key; it alone may read the record over HTTP
    conversation: str = ""  # a hash that the turns of one conversation share
    drafters: tuple[str, ...] = ()
    accept: str = "match"
    lossy: bool = False
    params: Mapping[str, Any] = field(default_factory=dict)  # as sent; JSON values
    metadata: Mapping[str, str] = field(default_factory=dict)  # the caller's labels, kept in any case
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of the prompt, found in the cache
    disk_tokens: int = 0  # of these, read from the disk
    output_tokens: int = 0
    passes: int = 0  # of the target
    drafted: int = 0
    accepted: int = 0
    drafted_by_source: Mapping[str, int] = field(default_factory=dict)
    accepted_by_source: Mapping[str, int] = field(default_factory=dict)
    predicted_calls: Mapping[str, int] = field(default_factory=dict)  # predicted tool calls by outcome
    finish: str | None = None
    error: str | None = None  # never quotes the prompt
    queue_s: float = 0.0
    first_token_s: float | None = None  # None: no token came
    seconds: float = 0.0
    # The text. All None where it is switched off.
    messages: list[Any] | None = None  # JSON
    prompt: str | None = None
    tools: list[Any] | None = None  # JSON
    output: str | None = None
    prompt_ids: tuple[int, ...] | None = None
    output_ids: tuple[int, ...] | None = None

    @classmethod
    def of(cls, stats: RequestStats, id: str, created: float, **about: Any) -> "RequestRecord":
        """A record with the figures of an output; about: the fields that are no figures."""
        shared = {name: getattr(stats, name) for name in _SHARED if name not in about}
        totals: dict[str, Any] = {"drafted": stats.drafted_tokens, "accepted": stats.accepted_tokens}
        return cls(id, created, **shared, **totals, **about)

    @property
    def tokens_per_pass(self) -> float:
        return self.output_tokens / self.passes if self.passes else 0.0

    @property
    def token_s(self) -> float | None:
        """Seconds per output token after the first, until the end; None: there was no second."""
        if self.first_token_s is None or self.output_tokens < 2:
            return None
        return (self.seconds - self.first_token_s) / (self.output_tokens - 1)

    @property
    def prefill_s(self) -> float | None:
        """From the queue to the first token."""
        return _prefill_s(self.queue_s, self.first_token_s)


def _prefill_s(queue_s: float, first_token_s: float | None) -> float | None:
    return None if first_token_s is None else max(0.0, first_token_s - queue_s)


_SHARED: Final = tuple({f.name for f in fields(RequestStats)} & {f.name for f in fields(RequestRecord)})


@dataclass(frozen=True, slots=True)
class RoundRecord:
    """One pass of one output: a Round without its tokens, unless text is switched on."""

    request: str
    index: int  # 0, 1, ... within the request
    start: int  # tokens before
    budget: int  # drafted tokens the controller allowed
    drafted: int
    accepted: int
    committed: int  # tokens; 0 while prefilling
    batch: int  # sequences in the pass
    rows: int  # rows in the pass, all sequences together
    draft_us: int  # of the pass, all sequences together
    target_us: int  # likewise
    sources: Runs = ()  # drafters, in the order of the draft's nodes
    parents: tuple[int, ...] | None = None  # of the draft's nodes; None: a chain
    path: tuple[int, ...] | None = None  # the nodes kept; None: a chain, the first `accepted`
    finish: str | None = None
    draft_tokens: tuple[int, ...] | None = None  # text
    tokens: tuple[int, ...] | None = None  # text: what was committed


class RoundTiming(NamedTuple):
    """The part of a RoundRecord that time lines need."""

    committed: int
    rows: int
    draft_us: int
    target_us: int


TEXT: Final = ("messages", "prompt", "tools", "output", "prompt_ids", "output_ids")


def round_record(r: Round, index: int) -> RoundRecord:
    """Keeps nothing of the round alive: a draft may hold a tensor."""
    chain = r.draft.parents is None
    return RoundRecord(
        request=r.request,
        index=index,
        start=r.start,
        budget=r.budget,
        drafted=len(r.draft),
        accepted=len(r.path),
        committed=len(r.tokens),
        batch=r.batch,
        rows=r.rows,
        draft_us=r.draft_us,
        target_us=r.target_us,
        sources=runs(r.draft.sources),
        parents=r.draft.parents,
        path=None if chain else tuple(r.path),
        finish=r.finish,
        draft_tokens=tuple(r.draft.tokens),
        tokens=tuple(r.tokens),
    )


def runs(names: Iterable[str]) -> Runs:
    return tuple((name, len(list(group))) for name, group in groupby(names))


def without_text(record: RequestRecord) -> RequestRecord:
    """The same request, without the text of prompt and answer.

    Parameters that are not numbers may quote it (stop strings, predictions, schemas), so they go too.
    """
    params = {k: v for k, v in record.params.items() if _is_number(v) or k in TEXTLESS_PARAMS}
    nothing: dict[str, Any] = dict.fromkeys(TEXT)
    return replace(record, params=params, **nothing)


def without_tokens(r: RoundRecord) -> RoundRecord:
    return replace(r, draft_tokens=None, tokens=None)


def _is_number(value: object) -> bool:
    return value is None or isinstance(value, bool | int | float)


def as_dict(record: RequestRecord, rounds: Sequence[RoundRecord]) -> dict[str, Any]:
    """One JSON object. The rounds do not repeat the request's id."""
    return {**asdict(record), "rounds": [_round_as_dict(r) for r in rounds]}


def _round_as_dict(r: RoundRecord) -> dict[str, Any]:
    return {f.name: getattr(r, f.name) for f in fields(r) if f.name != "request"}


def write_json(value: object) -> str:
    """JSON that can always be stored: a lone surrogate, which UTF-8 has no bytes for, becomes an escape."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return re.sub("[\ud800-\udfff]", lambda match: f"\\u{ord(match[0]):04x}", text)
