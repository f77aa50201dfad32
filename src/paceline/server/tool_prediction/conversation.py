"""A chat's messages as the predictor sees them: past calls with their results, and where values come from.

A source is a place that holds values: a path in the results of a tool (`r:get_user:orders[*]`), an
argument of earlier calls (`a:get_order:order_id`), or a form in a text (`u:#A9` is a user's #W9502127).
Paths have their indices and ids taken out, so that a source that was right once is found again in
another run.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice, pairwise
from typing import Any, Final, NamedTuple

from paceline.text import content_text

Scalar = str | int | float | bool | None
ObjectId = tuple[int, int]  # of a JSON object in a result: calls since then, its number there

MAX_MESSAGES: Final = 80  # the last ones are read, and the system's
MAX_RESULTS: Final = 4  # of one tool, the newest
MAX_RESULT: Final = 32 << 10  # characters of a result that is read
MAX_LEAVES: Final = 400  # of one result
MAX_TEXT: Final = 4000  # characters of a message that are searched for values, its end
MAX_VALUE: Final = 120  # characters of a value that can be copied
MAX_DEPTH: Final = 8  # of a result
MAX_BESIDE: Final = 6  # texts of an object that say what its ids are

_WORD: Final = re.compile(r"[a-z]+")
_TOKEN: Final = re.compile(r"[^\s,;!?()\[\]{}<>\"“”`*]+")
_QUOTED: Final = re.compile(
    r"(?<!\w)'([^\n]{1,120}?)'(?!\w)|\"([^\"\n]{1,120})\"|`([^`\n]{1,120})`|“([^”\n]{1,120})”"
)
_NAMES: Final = re.compile(r"[A-Z][a-zA-Z]+(?: [A-Z][a-zA-Z]+)+")
_MONTHS: Final = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_MONTH: Final = rf"(?:{'|'.join(_MONTHS)})[a-z]{{0,6}}\.?"
_DATE: Final = re.compile(
    rf"\b(?:(?P<month>{_MONTH}) (?P<day>\d{{1,2}})(?:st|nd|rd|th)?\b(?:,? (?P<year>\d{{4}})\b)?"
    rf"|(?P<day2>\d{{1,2}})(?:st|nd|rd|th)? (?:of )?(?P<month2>{_MONTH})(?:,? (?P<year2>\d{{4}})\b)?)",
    re.IGNORECASE,
)
_YEAR: Final = re.compile(r"\b(\d{4})-\d{2}-\d{2}\b")
_THOUSANDS: Final = re.compile(r"(?<![\d,])\d{1,3}(?:,\d{3})+(?![\d,])(?:\.\d+)?")
_EMAIL: Final = re.compile(r"[\w.+-]+@[\w-]+\.[\w.]*\w")
_CODE: Final = re.compile(r"[A-Z0-9]{4,}")  # whose letters and digits come in any order
_RUNS: Final = re.compile(r"[A-Z]+|[a-z]+|[0-9]+")
_ERROR: Final = re.compile(r"\s*(?:error|\{\s*\"error\")", re.IGNORECASE)


@dataclass(slots=True)
class PastCall:
    name: str
    arguments: Mapping[str, Any]
    result: str | None = None

    @property
    def failed(self) -> bool:
        return self.result is not None and _ERROR.match(self.result) is not None


@dataclass(slots=True)
class Source:
    """The values of one place, in their order, each once."""

    values: dict[str, Any] = field(default_factory=dict)  # by their JSON
    age: int = 0  # calls since it was written
    near: dict[str, frozenset[str]] = field(default_factory=dict)  # words beside a value, by its JSON
    objects: dict[str, set[ObjectId]] = field(default_factory=dict)  # that hold a value, by its JSON


class Conversation:
    """The messages of one request. Its parts are made when they are first read."""

    def __init__(self, messages: Sequence[Mapping[str, Any]]) -> None:
        self.calls: list[PastCall] = []
        self.events: list[
            str
        ] = []  # oldest first: U user, A text of the assistant, else a tool, ! where it failed
        self.user_texts: list[str] = []
        self.system = ""
        waiting: dict[str, tuple[int, PastCall]] = {}
        for message in messages[-MAX_MESSAGES:]:
            role, text = message.get("role"), text_of(message)
            if role == "user":
                self.events.append("U")
                self.user_texts.append(text[-MAX_TEXT:])
            elif role in ("system", "developer"):
                self.system = text[-MAX_TEXT:]
            elif role == "tool":
                at, call = waiting.pop(str(message.get("tool_call_id")), (0, None))
                if call is not None:
                    call.result = text
                    self.events[at] += "!" if call.failed else ""
            elif role == "assistant":
                self._add_answer(message, waiting)
        if not self.system and messages and messages[0].get("role") in ("system", "developer"):
            self.system = text_of(messages[0])[-MAX_TEXT:]

    def _add_answer(self, message: Mapping[str, Any], waiting: dict[str, tuple[int, PastCall]]) -> None:
        calls = [call for call in message.get("tool_calls") or () if isinstance(call, Mapping)]
        for call in calls:
            function = call.get("function")
            if not isinstance(function, Mapping):
                continue
            past = PastCall(str(function.get("name")), read_arguments(function.get("arguments")) or {})
            self.calls.append(past)
            waiting[str(call.get("id"))] = (len(self.events), past)
            self.events.append(past.name)
        if not calls:
            self.events.append("A")

    @cached_property
    def last_user_text(self) -> str:
        return self.user_texts[-1] if self.user_texts else ""

    @cached_property
    def words(self) -> frozenset[str]:
        """Of the user's last message."""
        return frozenset(_WORD.findall(self.last_user_text.lower()))

    @cached_property
    def earlier_words(self) -> frozenset[str]:
        """Of the user's messages before the last one."""
        return frozenset(_WORD.findall(" ".join(self.user_texts[:-1]).lower()))

    @cached_property
    def forms(self) -> frozenset[str]:
        """Of ids in the user's last message."""
        return frozenset(form for form, _ in text_values(self.last_user_text, ids_only=True))

    @cached_property
    def since_user(self) -> list[str]:
        """The events after the user's last message."""
        for i in range(len(self.events) - 1, -1, -1):
            if self.events[i] == "U":
                return self.events[i + 1 :]
        return self.events

    @cached_property
    def chains(self) -> str:
        """How this run goes on after results: calls directly, answers first, or both."""
        after = {next_event == "A" for event, next_event in pairwise(self.events) if event not in ("U", "A")}
        return "both" if len(after) > 1 else "answers" if after == {True} else "calls" if after else ""

    @cached_property
    def year(self) -> str:
        """Of the first date in the system's text."""
        found = _YEAR.search(self.system)
        return found[1] if found else ""

    @cached_property
    def used(self) -> dict[str, set[str]]:
        """The values of earlier arguments, by the argument's name, as JSON."""
        used: dict[str, set[str]] = {}
        for call in self.calls:
            for name, value in call.arguments.items():
                used.setdefault(name, set()).add(canonical(value))
        return used

    @cached_property
    def made(self) -> set[tuple[str, str]]:
        """Earlier calls: names and the JSON of their arguments."""
        return {(call.name, canonical(call.arguments)) for call in self.calls}

    @cached_property
    def sources(self) -> dict[str, Source]:
        sources: dict[str, Source] = {}

        def add(name: str, value: Any, age: int) -> tuple[Source, str]:
            source, text = sources.setdefault(name, Source(age=age)), canonical(value)
            source.values.setdefault(text, value)
            return source, text

        read: dict[str, int] = {}
        for age, call in enumerate(reversed(self.calls)):
            read[call.name] = read.get(call.name, 0) + 1
            if read[call.name] > MAX_RESULTS:
                continue
            for leaf in leaves(call.arguments):
                add(f"a:{call.name}:{leaf.path}", leaf.value, age)
            for leaf in _result_values(call.result or ""):
                source, text = add(f"r:{call.name}:{leaf.path}", leaf.value, age)
                source.objects.setdefault(text, set()).add((age, leaf.object))
                if leaf.near:
                    source.near.setdefault(text, leaf.near)
        for age, text in enumerate(reversed(self.user_texts)):
            for form, value in (*text_values(text), *dates(text, self.year)):
                add(f"u:{form}" if age == 0 else f"v:{form}", value, age)
        for form, value in text_values(self.system, ids_only=True):
            add(f"s:{form}", value, 0)
        return sources

    @cached_property
    def objects(self) -> dict[str, frozenset[ObjectId]]:
        """The objects of results that hold a value, by its JSON."""
        found: dict[str, set[ObjectId]] = {}
        for source in self.sources.values():
            for text, places in source.objects.items():
                found.setdefault(text, set()).update(places)
        return {text: frozenset(places) for text, places in found.items()}


def canonical(value: Any) -> str:
    """One text for equal JSON values: members sorted, no spaces."""
    return json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))


def text_of(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, list):
        return content_text(content)
    return content if isinstance(content, str) else ""


def read_arguments(arguments: Any) -> dict[str, Any] | None:
    """None: no JSON object."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return None
    return dict(arguments) if isinstance(arguments, Mapping) else None


class Leaf(NamedTuple):
    """A scalar of a JSON value."""

    path: str  # general
    value: Scalar
    near: frozenset[str] = frozenset()  # words beside it
    object: int = 0  # the number of the object that holds it


def leaves(value: Any) -> Iterator[Leaf]:
    """The scalars of a JSON value, at most MAX_LEAVES."""
    left, objects = MAX_LEAVES, 0

    def walk(value: Any, path: str, depth: int, near: str, holder: int) -> Iterator[Leaf]:
        nonlocal left, objects
        if left <= 0 or depth > MAX_DEPTH:
            return
        if isinstance(value, Mapping):
            holder = objects = objects + 1
            table, beside = _is_table(value), _beside(value)
            for key, part in value.items():
                if left <= 0:
                    return
                if any(c.isdigit() for c in key):  # an id, not a name
                    left -= 1
                    inner = _beside(part) if isinstance(part, Mapping) else ""
                    yield Leaf(f"{path}.~".removeprefix("."), key, _words(inner or near), holder)
                    yield from walk(part, f"{path}.*", depth + 1, beside, holder)
                elif table:
                    yield from walk(part, f"{path}.*", depth + 1, key, holder)
                else:
                    yield from walk(part, f"{path}.{key}", depth + 1, beside or near, holder)
        elif isinstance(value, list):
            for part in value:
                yield from walk(part, f"{path}[*]", depth + 1, near, holder)
        elif not isinstance(value, str) or 0 < len(value) <= MAX_VALUE:
            left -= 1
            yield Leaf(path.removeprefix("."), value, _words(near), holder)

    return walk(value, "", 0, "", 0)


def _is_table(value: Mapping[str, Any]) -> bool:
    """Its keys are data: names of some things, each with an id of the same form."""
    parts = list(value.values())
    if len(parts) < 4 or not all(isinstance(part, str) for part in parts):
        return False
    forms = {form_of(part) for part in parts}
    return len(forms) == 1 and "9" in forms.pop()


def _beside(value: Mapping[str, Any]) -> str:
    """The short texts in an object."""
    texts = (part for part in value.values() if isinstance(part, str) and len(part) <= MAX_VALUE)
    return " ".join(islice(texts, MAX_BESIDE))


def _words(text: str) -> frozenset[str]:
    return frozenset(word for word in _WORD.findall(text.lower()) if len(word) > 2)


def _result_values(text: str) -> Iterator[Leaf]:
    if len(text) > MAX_RESULT:
        return
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        if 0 < len(text) <= MAX_VALUE:
            yield Leaf("$", text.strip())
        for form, found in text_values(text[-MAX_TEXT:], ids_only=True):
            yield Leaf(f"~{form}", found)
        return
    if isinstance(value, dict | list):
        yield from leaves(value)
    else:
        yield Leaf("$", value)


def dates(text: str, year: str) -> Iterator[tuple[str, str]]:
    """Dates in words, as 2026-11-15. year: for those that have none."""
    for match in _DATE.finditer(text):
        month, day = match["month"] or match["month2"], match["day"] or match["day2"]
        if found := match["year"] or match["year2"] or year:
            yield "date", f"{found}-{_MONTHS.index(month[:3].lower()) + 1:02}-{int(day):02}"


def text_values(text: str, ids_only: bool = False) -> Iterator[tuple[str, str]]:
    """Parts of a text that may be arguments, with their forms. ids_only: those with digits or an @."""
    for match in _EMAIL.finditer(text):
        yield "email", match[0]
        if not ids_only:
            yield "email name", match[0].partition("@")[0]
    if not ids_only:
        for match in _QUOTED.finditer(text):
            yield "quoted", next(part for part in match.groups() if part is not None)
        for match in _NAMES.finditer(text):
            yield "Names", match[0]
            first, *_, last = match[0].split()
            yield "Names first", first
            yield "Names last", last
    for match in _THOUSANDS.finditer(text):
        yield "9,9", match[0].replace(",", "")
    for match in _TOKEN.finditer(text):
        token = match[0].rstrip(".:'").lstrip("'$")
        if (
            not token
            or "@" in token
            or len(token) > MAX_VALUE
            or (ids_only and not any(c.isdigit() for c in token))
        ):
            continue
        if not ids_only or len(token) > 1:
            yield form_of(token), token
        if not ids_only and _CODE.fullmatch(token):
            yield f"code {len(token)}", token


def form_of(token: str) -> str:
    """Letters by case, digits by number: #W9502127 is #A9{7}, Ava is Aa, ava_kim_71 is a_9{2}."""
    form = _RUNS.sub(lambda run: _class(run[0]), token)
    return re.sub(r"a(?:[_.-]a)+", lambda m: f"a{m[0][1]}a", form)[:40]


def _class(run: str) -> str:
    if run[0].isdigit():
        return f"9{len(run)}"
    return "A" if run[0].isupper() else "a"
