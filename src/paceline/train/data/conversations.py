"""Recorded conversations: from files of one JSON object a line, or from a trace store."""

import gzip
import json
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import DataError, StoreError, TextError
from paceline.text import opening_text

Message = Mapping[str, Any]
Source = str | Path  # a .jsonl or .jsonl.gz file; else a trace store: a path or a URL
RejectionCounts = Counter[str]  # by reason

ANSWERED = ("user", "tool")  # roles that an answer follows


@dataclass(frozen=True, slots=True)
class Conversation:
    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    group: str = ""  # held out together; "": the opening decides
    last_only: bool = False  # only its last turn counts: earlier turns are requests of their own
    called: bool = False  # its answer had to call a tool

    @property
    def opening(self) -> str:
        """All turns of a conversation share it."""
        return opening_text(self.messages)

    def histories(self) -> Iterator[tuple[tuple[Message, ...], bool]]:
        """The messages before each answer, all of them if one is due; and whether it called a tool."""
        if not self.last_only:
            for i, message in enumerate(self.messages):
                if i and message.get("role") == "assistant":
                    yield self.messages[:i], bool(message.get("tool_calls"))
        if self.messages[-1].get("role") in ANSWERED:
            yield self.messages, self.called


def read(sources: Sequence[Source], rejected: RejectionCounts) -> Iterator[Conversation]:
    """Every usable conversation; the others are counted by reason."""
    for source in sources:
        if str(source).endswith((".jsonl", ".jsonl.gz")):
            yield from _from_file(Path(source), rejected)
        else:
            yield from _from_store(str(source), rejected)


def _from_file(path: Path, rejected: RejectionCounts) -> Iterator[Conversation]:
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as lines:
            for line in lines:
                if line.strip() and (made := _of_line(line, rejected)) is not None:
                    yield made
    except FileNotFoundError as error:
        raise DataError(f"{path} does not exist: give a .jsonl or .jsonl.gz file or a trace store") from error
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read: {error}; expected one JSON object a line") from error


def _of_line(line: bytes, rejected: RejectionCounts) -> Conversation | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        rejected["not JSON"] += 1
        return None
    if not isinstance(record, dict):
        rejected["not a JSON object"] += 1
        return None
    if "baseline" in record and "candidate" in record:  # a pair of the gate
        body = record.get("request")
        request = {**body, "params": body} if isinstance(body, dict) else {}
        return _conversation({"messages": None, **request}, rejected, last_only=True)
    exported = "output_ids" in record  # by `paceline trace export`: each request is an object of its own
    return _conversation(record, rejected, last_only=exported)


def _from_store(url: str, rejected: RejectionCounts) -> Iterator[Conversation]:
    from paceline.trace.store import Store

    some = texts = 0
    with closing(Store.open(url, create=False)) as store:
        for record in store.export():
            some += 1
            texts += record["messages"] is not None or record["prompt"] is not None
            if (made := _conversation(record, rejected, last_only=True)) is not None:
                yield made
    if some and not texts:
        raise StoreError(
            f"the store at {url} holds {some} requests and the text of none: "
            "run `paceline serve --trace-text`, and train on what it records from then on"
        )


def _conversation(
    record: Mapping[str, Any], rejected: RejectionCounts, last_only: bool
) -> Conversation | None:
    messages, tools, group = record.get("messages"), record.get("tools") or [], record.get("group") or ""
    problem = ""
    if messages is None:
        traced = "messages" in record or "output_ids" in record
        unknown = "no text was recorded" if traced else "`messages` is missing"
        problem = "a prompt without messages" if record.get("prompt") else unknown
    elif not _are_objects(messages) or not messages:
        problem = "messages are not a list of objects"
    elif not _are_objects(tools):
        problem = "tools are not a list of objects"
    if problem:
        rejected[problem] += 1
        return None
    made = Conversation(tuple(messages or ()), tuple(tools), str(group), last_only, _had_to_call(record))
    try:
        answers = any(True for _ in made.histories())
        if answers and (made.opening or group):
            return made
    except TextError:
        rejected["content that is not text"] += 1
        return None
    rejected["no user message" if answers else "nothing to answer"] += 1
    return None


def _had_to_call(record: Mapping[str, Any]) -> bool:
    """True if the recorded request required a call: otherwise the model is left free again."""
    params = record.get("params")
    choice = params.get("tool_choice") if isinstance(params, Mapping) else None
    return choice not in (None, "auto", "none")


def _are_objects(values: object) -> bool:
    return isinstance(values, Iterable) and all(isinstance(value, Mapping) for value in values)
