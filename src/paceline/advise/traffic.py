"""Recorded traffic: requests of a trace store or of files of conversations, by route, and their figures."""

import gzip
import json
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any, Final

from paceline.errors import DataError, StoreError, TextError, UsageError
from paceline.text import message_text, opening_text
from paceline.trace.record import RoundRecord
from paceline.types import common_prefix

Message = Mapping[str, Any]
Classify = Callable[[Mapping[str, Any]], str]  # the body of a request to the class of its prompt

MAX_TURNS: Final = 2  # of one conversation in a sample; they resemble each other, so more tell little
NGRAM: Final = 4  # tokens in a row that count as repeated if they came before
COMPLETIONS: Final = "/v1/completions"
CHAT: Final = "/v1/chat/completions"


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """One output that was written for a client, by this model or by another."""

    id: str
    route: str
    conversation: str  # turns of one conversation share it
    body: Mapping[str, Any]  # messages or prompt, tools, parameters, as in a request
    endpoint: str = CHAT
    model: str = ""
    tenant: str = ""
    anonymous: bool = False  # strangers share its tenant: nothing of it is remembered
    answer: str = ""  # text, calls as JSON
    prompt_ids: tuple[int, ...] = ()
    output_ids: tuple[int, ...] = ()  # (): not recorded
    created: float = 0.0  # unix seconds; 0: not known
    seconds: float = 0.0
    prefill_s: float | None = None
    rounds: tuple[RoundRecord, ...] = ()

    @property
    def temperature(self) -> float:
        """OpenAI's default is 1, paceline's 0, files of conversations have none: 0."""
        return float(self.body.get("temperature") or 0.0)

    @property
    def opening(self) -> str:
        """All turns of a conversation share it; a prompt is its own."""
        return _opening(self.body)

    @property
    def tools(self) -> tuple[str, ...]:
        """The names of the offered tools."""
        offered = (tool.get("function", tool) for tool in self.body.get("tools") or ())
        return tuple(str(tool.get("name")) for tool in offered)


@dataclass(frozen=True, slots=True)
class Traffic:
    requests: tuple[TracedRequest, ...]
    rejected: Mapping[str, int] = field(default_factory=dict)  # unusable records, by reason

    def routes(self) -> dict[str, list[TracedRequest]]:
        """Requests by route, routes by name, requests in the order they came."""
        found: defaultdict[str, list[TracedRequest]] = defaultdict(list)
        for request in self.requests:
            found[request.route].append(request)
        return dict(sorted(found.items()))

    def with_strangers(self, tenant: str) -> "Traffic":
        """tenant: of requests that name nobody, so that they share no drafters' memory."""
        marked = (replace(one, anonymous=True) if one.tenant == tenant else one for one in self.requests)
        return replace(self, requests=tuple(marked))

    def require_requests(self, source: str = "this traffic") -> None:
        """Called before a long run."""
        if not self.requests:
            reasons = ", ".join(f"{reason}: {count}" for reason, count in self.rejected.items())
            raise UsageError(f"there is no request in {source} ({reasons or 'it is empty'})")


def conversations(requests: Iterable[TracedRequest]) -> list[list[TracedRequest]]:
    """In the order of their first requests."""
    found: dict[str, list[TracedRequest]] = {}
    for request in requests:
        found.setdefault(request.conversation, []).append(request)
    return list(found.values())


def sample(requests: Sequence[TracedRequest], limit: int, random: Random) -> list[TracedRequest]:
    """At most `limit` requests: a few turns in a row of each conversation, conversations in random order."""
    shuffled = conversations(requests)
    random.shuffle(shuffled)
    chosen: list[TracedRequest] = []
    for turns in shuffled:
        start = random.randrange(max(1, len(turns) - MAX_TURNS + 1))
        chosen += turns[start : start + MAX_TURNS]
        if len(chosen) >= limit:
            break
    return chosen[:limit]


def turns_before(requests: Iterable[TracedRequest]) -> dict[str, TracedRequest]:
    """For each request but the first of a conversation, by its id: the one before it."""
    pairs = (pair for turns in conversations(requests) for pair in pairwise(turns))
    return {after.id: before for before, after in pairs}


def from_files(paths: Sequence[Path], classify: Classify) -> Traffic:
    """Conversations, or lines of `paceline trace export`.

    A request without a recorded route gets one: of several files, that of its file; else of its class.
    """
    rejected: Counter[str] = Counter()
    requests: list[TracedRequest] = []
    for path in paths:
        route = path.name.split(".")[0] if len(paths) > 1 else ""
        for number, record in enumerate(_lines(path, rejected)):
            requests += _requests(record, f"{path.name}:{number}", route, classify, rejected)
    return Traffic(tuple(requests), dict(rejected))


def from_store(url: str, classify: Classify) -> Traffic:
    from paceline.trace.store import Store

    rejected: Counter[str] = Counter()
    requests: list[TracedRequest] = []
    with closing(Store.open(url, create=False)) as store:
        for number, record in enumerate(store.export()):
            requests += _requests(record, f"{number}", "", classify, rejected)
    if not requests and rejected["no text was recorded"]:
        raise StoreError(
            f"the store at {url} holds {rejected['no text was recorded']} requests and the text of none: "
            "run `paceline serve --trace-text`, and ask for advice on what it records from then on"
        )
    return Traffic(tuple(requests), dict(rejected))


def _lines(path: Path, rejected: Counter[str]) -> Iterator[dict[str, Any]]:
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as lines:
            for line in lines:
                if not line.strip():
                    continue
                try:
                    record = json.loads(line)
                except (ValueError, RecursionError):
                    rejected["not JSON"] += 1
                    continue
                if isinstance(record, dict):
                    yield record
                else:
                    rejected["not a JSON object"] += 1
    except FileNotFoundError:
        raise DataError(f"{path} does not exist: give a .jsonl or .jsonl.gz file, or --store") from None
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"{path} cannot be read: {reason}; expected one JSON object a line") from None


def _requests(
    record: Mapping[str, Any], name: str, route: str, classify: Classify, rejected: Counter[str]
) -> list[TracedRequest]:
    try:
        if "output_ids" in record:
            return [_traced(record, route, classify)] if _has_text(record, rejected) else []
        return list(_turns(record, name, route, classify, rejected))
    except (TextError, AttributeError, TypeError, ValueError):
        rejected["not a conversation"] += 1
        return []


def _has_text(record: Mapping[str, Any], rejected: Counter[str]) -> bool:
    known = record.get("messages") is not None or record.get("prompt") is not None
    if not known:
        rejected["no text was recorded"] += 1
    elif not record.get("output_ids"):
        rejected["no output"] += 1
    return known and bool(record.get("output_ids"))


def _traced(record: Mapping[str, Any], route: str, classify: Classify) -> TracedRequest:
    """A record of `paceline serve`."""
    body = {**(record.get("params") or {}), "messages": record.get("messages")}
    if record.get("messages") is None:
        body = {**(record.get("params") or {}), "prompt": record["prompt"]}
    if record.get("tools"):
        body["tools"] = record["tools"]
    first, rounds = record.get("first_token_s"), record.get("rounds") or ()
    recorded = str(record.get("route") or "")
    return TracedRequest(
        id=str(record["id"]),
        route=recorded or route or classify(body),
        conversation=_opening(body) or json.dumps(body.get("messages"), default=str),
        body=body,
        endpoint=str(record.get("endpoint") or CHAT),
        model=str(record.get("model") or ""),
        tenant=str(record.get("tenant") or ""),
        answer=str(record.get("output") or ""),
        prompt_ids=tuple(record.get("prompt_ids") or ()),
        output_ids=tuple(record["output_ids"]),
        created=float(record.get("created") or 0.0),
        seconds=float(record.get("seconds") or 0.0),
        prefill_s=None if first is None else max(0.0, first - float(record.get("queue_s") or 0.0)),
        rounds=tuple(_round(r, str(record["id"])) for r in rounds),
    )


def _round(r: Mapping[str, Any], request: str) -> RoundRecord:
    known = {name: r[name] for name in RoundRecord.__dataclass_fields__ if name in r}
    return RoundRecord(**{**known, "request": request})


def _opening(body: Mapping[str, Any]) -> str:
    messages = body.get("messages")
    return str(body.get("prompt")) if messages is None else opening_text(messages)


def _turns(
    record: Mapping[str, Any], name: str, route: str, classify: Classify, rejected: Counter[str]
) -> Iterator[TracedRequest]:
    """Each answer of a recorded conversation, as the request that it answered."""
    messages = record.get("messages")
    if messages is None and isinstance(record.get("turns"), list) and record["turns"]:  # as in Spec-Bench
        messages = [{"role": "user", "content": str(record["turns"][0])}, {"role": "assistant"}]
    if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
        rejected["`messages` is missing"] += 1
        return
    tools = {"tools": record["tools"]} if record.get("tools") else {}
    conversation = str(record.get("id") or record.get("question_id") or name)
    for i, message in enumerate(messages):
        if i and message.get("role") == "assistant":
            body = {"messages": messages[:i], **tools}
            yield TracedRequest(
                id=f"{conversation}#{i}",
                route=route or classify(body),
                conversation=conversation,
                body=body,
                answer=_answer(message),
            )


def _answer(message: Message) -> str:
    calls = [json.dumps(call.get("function"), ensure_ascii=False) for call in message.get("tool_calls") or ()]
    return "\n".join([*([text] if (text := message_text(message)) else []), *calls])


@dataclass(frozen=True, slots=True)
class Spread:
    """Of a count over requests."""

    median: float
    p95: float
    mean: float

    @staticmethod
    def of(values: Sequence[float]) -> "Spread":
        if not values:
            return Spread(0.0, 0.0, 0.0)
        ordered = sorted(values)
        return Spread(_quantile(ordered, 0.5), _quantile(ordered, 0.95), fmean(ordered))


def _quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


@dataclass(frozen=True, slots=True)
class Workload:
    """The traffic of one route."""

    requests: int
    conversations: int
    turns: float  # requests of a conversation, mean
    prompt_tokens: Spread
    output_tokens: Spread
    json_share: float  # of the outputs' characters: tool calls and JSON
    repetition: float  # share of output tokens that continue NGRAM tokens which occurred before, as there
    prefix_overlap: float  # share of prompt tokens that began an earlier request as well
    temperature: float  # mean
    concurrency: float  # outputs at once, mean while there are any; 0: no times were recorded


@dataclass(frozen=True, slots=True)
class TokenizedRequest:
    """The tokens of one output and its prompt, as the target reads and writes them."""

    request: TracedRequest
    prompt: tuple[int, ...]
    output: tuple[int, ...]
    text: str  # of the output


def workload(requests: Sequence[TracedRequest], sampled: Sequence[TokenizedRequest]) -> Workload:
    """requests: all of a route; sampled: those that were tokenized."""
    groups = conversations(requests)
    shared, prompt_tokens = _overlap(sampled)
    repeated = sum(_repeated(one.prompt, one.output) for one in sampled)
    written = sum(len(one.output) for one in sampled)
    json_chars = sum(json_characters(one.text) for one in sampled)
    return Workload(
        requests=len(requests),
        conversations=len(groups),
        turns=len(requests) / max(1, len(groups)),
        prompt_tokens=Spread.of([len(one.prompt) for one in sampled]),
        output_tokens=Spread.of([len(one.output) for one in sampled]),
        json_share=json_chars / max(1, sum(len(one.text) for one in sampled)),
        repetition=repeated / max(1, written),
        prefix_overlap=shared / max(1, prompt_tokens),
        temperature=fmean(r.temperature for r in requests) if requests else 0.0,
        concurrency=concurrency(requests),
    )


def concurrency(requests: Iterable[TracedRequest]) -> float:
    """Outputs in flight at once, mean over the time in which there were any (Little's law)."""
    spans = sorted((r.created, r.created + r.seconds) for r in requests if r.created and r.seconds)
    busy = end = total = 0.0
    for start, stop in spans:
        total += stop - start
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total / busy if busy else 0.0


def json_characters(text: str) -> int:
    """Characters inside of the outermost objects and lists that parse as JSON."""
    decoder, at, count = json.JSONDecoder(), 0, 0
    while (start := min((i for i in (text.find("{", at), text.find("[", at)) if i >= 0), default=-1)) >= 0:
        try:
            _, stop = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            at = start + 1
            continue
        count, at = count + stop - start, stop
    return count


def _repeated(prompt: Sequence[int], output: Sequence[int]) -> int:
    text, count = [*prompt, *output], 0
    followers: dict[tuple[int, ...], int] = {}  # NGRAM tokens -> the token after their latest occurrence
    for i in range(NGRAM, len(text)):
        key = tuple(text[i - NGRAM : i])
        count += i >= len(prompt) and followers.get(key) == text[i]
        followers[key] = text[i]
    return count


def _overlap(sampled: Sequence[TokenizedRequest]) -> tuple[int, int]:
    """Prompt tokens that the prefix cache of a tenant would hold, and all of them.

    Compared with the latest request of the same conversation and the latest of any other.
    """
    latest: dict[str, tuple[int, ...]] = {}
    shared = total = 0
    for one in sampled:
        known = [*[*latest.values()][-8:], latest.get(one.request.conversation, ())]
        shared += max((common_prefix(one.prompt, text) for text in known), default=0)
        total += len(one.prompt)
        latest.pop(one.request.conversation, None)
        latest[one.request.conversation] = (*one.prompt, *one.output)
    return shared, total
