"""Cases: requests to replay on both upstreams, from recorded traces.

A line of a trace file is a request of `paceline trace export`, a pair with its request, a bare request body,
or a whole conversation, of which every turn of the assistant becomes a case.
"""

import gzip
import hashlib
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Final

from paceline.errors import DataError
from paceline.gate.evaluators import Reference
from paceline.gate.pair import ToolCall

CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"
RESPONSES: Final = "/v1/responses"
# Parameters of the recorded server or client that a replay sets itself, or must not repeat.
_NOT_REPLAYED: Final = (
    "stream",
    "stream_options",
    "model",
    "speculative_config",
    "metrics",
    "user",
    "n",
    "store",
)
_BODY_KEYS: Final = ("messages", "prompt", "input")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    id: str
    request: Mapping[str, Any]
    endpoint: str = CHAT
    route: str = ""
    cohort: str = ""
    conversation: str = ""
    reference: Reference | None = None

    @property
    def prompt_hash(self) -> str:
        """Equal for requests that differ in their seed alone."""
        body = {name: value for name, value in self.request.items() if name != "seed"}
        return hashlib.sha256(json.dumps(body, sort_keys=True).encode("utf-8", "replace")).hexdigest()[:16]


def read_cases(path: Path, cohort_key: str = "") -> Iterator[Case]:
    """cohort_key: a field of a record, or of its metadata, whose value is the cohort."""
    for number, record in enumerate(json_lines(path)):
        cases = cases_of(record, f"{number}")
        cohort = _label(record, cohort_key) if cohort_key else ""
        yield from (replace(case, cohort=cohort) if cohort else case for case in cases)


def cases_of(record: Mapping[str, Any], number: str) -> list[Case]:
    if isinstance(record.get("baseline"), Mapping):  # a pair
        return _of_pair(record)
    if "output_ids" in record:  # of `paceline trace export`
        return _of_trace(record)
    messages = record.get("messages")
    spoken = [i for i, m in enumerate(messages or ()) if i and m.get("role") == "assistant"]
    if isinstance(messages, list) and (spoken or "id" in record):
        return _of_conversation(record, number, spoken)
    if any(record.get(key) for key in _BODY_KEYS):
        return [Case(id=number, request=replayed(record), endpoint=_endpoint(record))]
    raise DataError(
        f"record {number} has neither messages, prompt nor input: expected requests or conversations"
    )


def _of_pair(record: Mapping[str, Any]) -> list[Case]:
    request = record.get("request")
    if not request:
        raise DataError(
            f"pair {record.get('id')} has no request: record pairs with their texts to replay them"
        )
    return [
        Case(
            id=str(record["id"]),
            request=replayed(request),
            endpoint=record.get("endpoint") or _endpoint(request),
            route=record.get("route") or "",
            cohort=record.get("cohort") or "",
            conversation=record.get("conversation") or "",
        )
    ]


def _of_trace(record: Mapping[str, Any]) -> list[Case]:
    if record.get("messages") is None and record.get("prompt") is None:
        raise DataError("the traces have no text: record with `paceline serve --trace-text`")
    prompt = {key: record[key] for key in ("messages", "prompt", "tools") if record.get(key)}
    endpoint = record.get("endpoint") or (CHAT if "messages" in prompt else COMPLETIONS)
    return [
        Case(
            id=str(record["id"]),
            request=replayed({**record.get("params", {}), **prompt}),
            endpoint=COMPLETIONS if endpoint == COMPLETIONS else CHAT,
            route=record.get("route") or "",
            cohort=(record.get("metadata") or {}).get("cohort", ""),
            conversation=_opening(record.get("messages") or []),
        )
    ]


def _of_conversation(record: Mapping[str, Any], number: str, spoken: Sequence[int]) -> list[Case]:
    messages, name = record["messages"], str(record.get("id") or number)
    shared = {"tools": record["tools"]} if record.get("tools") else {}
    made = [
        Case(
            id=f"{name}#{i}",
            request={"messages": messages[:i], **shared},
            conversation=name,
            reference=_recorded(messages[i]),
        )
        for i in spoken
    ]
    if not spoken and messages:
        no_call = Reference(calls=()) if record.get("expect") == "no_tool_call" else None
        made = [Case(id=name, request={"messages": messages, **shared}, conversation=name, reference=no_call)]
    return made


def _recorded(message: Mapping[str, Any]) -> Reference | None:
    """The recorded calls; what another model wrote is no measure for a text."""
    calls = message.get("tool_calls") or ()
    functions = [call["function"] for call in calls]
    return Reference(calls=tuple(ToolCall(f["name"], f["arguments"]) for f in functions)) if calls else None


def replayed(request: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in request.items() if name not in _NOT_REPLAYED and value is not None}


def _endpoint(request: Mapping[str, Any]) -> str:
    if "input" in request:
        return RESPONSES
    return CHAT if "messages" in request else COMPLETIONS


def _opening(messages: Sequence[Mapping[str, Any]]) -> str:
    """A name for the conversation: its turns share the messages up to the first of the user."""
    first = next((i for i, m in enumerate(messages) if m.get("role") == "user"), len(messages))
    opening = json.dumps(messages[: first + 1], sort_keys=True)
    return hashlib.sha256(opening.encode("utf-8", "replace")).hexdigest()[:16] if messages else ""


def _label(record: Mapping[str, Any], key: str) -> str:
    value = record.get(key, (record.get("metadata") or {}).get(key, ""))
    return str(value)[:64]


def with_defaults(
    cases: Iterator[Case],
    limit: int,
    *,
    max_tokens: int,
    temperature: float | None,
    seed: int,
    repeats: int = 1,
) -> Iterator[Case]:
    """At most `limit` cases, each with a token limit, a seed, and `repeats` answers under other seeds.

    temperature: for all of them; None: as recorded, and greedy where nothing was.
    """

    def settings(case: Case, turn: int) -> Case:
        request = dict(case.request)
        limit_name = "max_output_tokens" if case.endpoint == RESPONSES else "max_tokens"
        if not any(name in request for name in ("max_tokens", "max_completion_tokens", "max_output_tokens")):
            request[limit_name] = max_tokens
        request["temperature"] = request.get("temperature", 0) if temperature is None else temperature
        if case.endpoint != RESPONSES and ("seed" not in request or repeats > 1):
            digest = hashlib.sha256(f"{seed} {case.id} {turn}".encode("utf-8", "replace")).digest()
            request["seed"] = int.from_bytes(digest[:4], "little") >> 1
        return replace(case, id=f"{case.id}@{turn}" if repeats > 1 else case.id, request=request)

    return islice((settings(case, turn) for case in cases for turn in range(repeats)), limit)


def json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Of a .jsonl or .jsonl.gz file."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                try:
                    record = json.loads(line)
                except (ValueError, RecursionError):
                    raise DataError(f"{path}, line {number}: not JSON; expected one object a line") from None
                if not isinstance(record, dict):
                    raise DataError(f"{path}, line {number}: expected a JSON object")
                yield record
    except FileNotFoundError:
        raise DataError(f"{path} does not exist: give a .jsonl or .jsonl.gz file") from None
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read: {error}") from None
