"""Predicts the next tool calls of a chat from earlier chats of one tenant.

As in PASTE (arXiv 2603.18897), two things repeat in an agent's runs: which call follows which, and where its
arguments come from. Here both are logistic regressions that learn from every answer (logistic_regression.py):

1. names: is this tool called in the answer? From the last events, the user's words, the calls so far.
2. values: is this value the tool's argument? Candidates come from sources that were right before
   (conversation.py), from the argument's earlier values, and from the schema.
3. calls: is this whole call in the answer? Corrects the product of the first two. `given_name` does the
   same for an answer whose text has come as far as the tool's name.

Everything is bounded: a tenant's predictor takes about a megabyte, a prediction a few milliseconds.
"""

import heapq
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Final

from paceline.server.tool_prediction.conversation import Conversation, ObjectId, canonical
from paceline.server.tool_prediction.logistic_regression import LogisticRegression, crossed, feature, logit

Function = Mapping[str, Any]  # of a tool: name, parameters
Calls = Sequence[tuple[str, Mapping[str, Any]]]  # names and arguments

MAX_KNOWN_TOOLS: Final = 128
MAX_ARGUMENTS: Final = 12  # a tool with more is not predicted
MAX_TOOLS: Final = 6  # whose arguments are predicted in one request
MAX_CALLS: Final = 4  # of one tool in one request
MAX_SOURCES: Final = 24  # of one argument
MAX_NAMED: Final = 8  # further ones with the argument's name
MAX_VALUES: Final = 16  # of one argument that are remembered
MAX_VALUE: Final = 120  # characters of a value that is remembered
MAX_CANDIDATES: Final = 24  # values of one argument in one request
MAX_WORDS: Final = 60
MIN_NAME: Final = 0.02  # less likely tools are not looked at
_LOWEST: Final = 1e-4  # probability
_VERSION: Final = 3  # of a state: another one where features, values or sizes change their meaning
_NOWHERE: Final[frozenset[ObjectId]] = frozenset()
_OMITTED: Final = "omitted"  # stands for the JSON of an argument that is left out
_NAME_BIAS: Final = -2.0  # before anything is learned
_VALUE_BIAS: Final = -1.0


@dataclass(frozen=True, slots=True)
class PredictedCall:
    name: str
    arguments: Mapping[str, Any]
    probability: float


@dataclass(slots=True)
class _Argument:
    """What an argument of a tool was so far."""

    sources: dict[str, int] = field(default_factory=dict)  # how often each held the value
    values: dict[str, tuple[Any, int]] = field(default_factory=dict)  # by their JSON; how often each came

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> "_Argument":
        sources = {str(name): int(times) for name, times in state["sources"].items()}
        values = {canonical(value): (value, int(times)) for value, times in state["values"]}
        if len(sources) > MAX_SOURCES or len(values) > MAX_VALUES:
            raise ValueError("it holds more than is remembered")
        return cls(sources, values)


@dataclass(frozen=True, slots=True)
class _Name:
    name: str
    probability: float
    features: list[int]


@dataclass(frozen=True, slots=True)
class _Value:
    text: str  # its JSON
    value: Any
    probability: float
    features: list[int]
    objects: frozenset[ObjectId]  # of results, that hold it


@dataclass(frozen=True, slots=True)
class _Arguments:
    """One value for each argument of a tool."""

    probability: float  # that of the values, as if they were independent
    values: tuple[tuple[str, _Value], ...]  # by argument

    @property
    def given(self) -> dict[str, Any]:
        return {name: value.value for name, value in self.values if value.text != _OMITTED}

    @property
    def joined(self) -> int:
        """How many of them one object of a result holds, where it is more than one."""
        together = Counter(chain.from_iterable(value.objects for _, value in self.values))
        most = max(together.values(), default=0)
        return most if most > 1 else 0


@dataclass(frozen=True, slots=True)
class _Candidate:
    name: str
    text: str  # the arguments' JSON
    arguments: Mapping[str, Any]
    probability: float
    features: list[int]
    offset: float  # log-odds of the product of name and values


class ToolCallPredictor:
    """The memory of one tenant. Deterministic; not safe for threads."""

    def __init__(self) -> None:
        self._tools: dict[str, dict[str, _Argument]] = {}  # the tools called so far, the newest last
        self._names = LogisticRegression()
        self._values = LogisticRegression()
        self._calls = LogisticRegression(rate=0.2)

    def state(self) -> dict[str, Any]:
        """All that was learned, as JSON."""
        return {
            "version": _VERSION,
            "models": [model.state() for model in self._models],
            "tools": {
                tool: {
                    name: {"sources": argument.sources, "values": list(argument.values.values())}
                    for name, argument in arguments.items()
                }
                for tool, arguments in self._tools.items()
            },
        }

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> "ToolCallPredictor":
        """Raises a ValueError, TypeError, AttributeError or LookupError where the state cannot be one."""
        if state["version"] != _VERSION:
            raise ValueError("it is of another version")
        made = cls()
        for model, learned in zip(made._models, state["models"], strict=True):
            model.restore(learned)
        for tool, arguments in list(state["tools"].items())[-MAX_KNOWN_TOOLS:]:
            made._tools[tool] = {name: _Argument.of_state(argument) for name, argument in arguments.items()}
        return made

    @property
    def _models(self) -> tuple[LogisticRegression, ...]:
        return self._names, self._values, self._calls

    def predict(self, chat: Conversation, tools: Mapping[str, Function]) -> "Forecast":
        """tools: those whose calls may be predicted, by name."""
        context = _context(chat)
        names = [self._name(name, context, chat) for name in tools if name in self._tools]
        names.sort(key=lambda one: (-one.probability, one.name))
        likely = [one for one in names[:MAX_TOOLS] if one.probability >= MIN_NAME]
        calls = [call for one in likely for call in self._candidates(tools[one.name], one, chat)]
        calls.sort(key=lambda call: (-call.probability, call.name, call.text))
        return Forecast(self, chat, tools, names, calls)

    def given_name(self, chat: Conversation, function: Function) -> list[_Candidate]:
        """The calls of a tool whose name is written, the likeliest first.

        Of one that was never called, too, if others were: arguments have sources by their names.
        """
        if not self._tools:
            return []
        calls = list(self._candidates(function, None, chat))
        return sorted(calls, key=lambda call: (-call.probability, call.text))

    def learn(self, forecast: "Forecast", calls: Calls) -> None:
        """calls: those of the answer. A forecast is learned from once."""
        chat, tools = forecast.chat, forecast.tools
        called = {name for name, _ in calls}
        written = {(name, canonical(arguments)) for name, arguments in calls}
        for one in forecast.names:
            self._names.learn(one.features, _NAME_BIAS, one.name in called)
        for call in forecast.candidates:
            self._calls.learn(call.features, call.offset, (call.name, call.text) in written)
        for name in sorted(called & tools.keys()):
            if name not in self._tools:
                first = self._name(name, _context(chat), chat)
                self._names.learn(first.features, _NAME_BIAS, True)
            for call in self.given_name(chat, tools[name]):
                self._calls.learn(call.features, call.offset, (call.name, call.text) in written)
            self._learn_arguments(tools[name], [given for n, given in calls if n == name], chat)

    def _learn_arguments(
        self, function: Function, given: Sequence[Mapping[str, Any]], chat: Conversation
    ) -> None:
        name = function["name"]
        known = self._tools[name] = self._tools.pop(name, {})
        if len(self._tools) > MAX_KNOWN_TOOLS:
            del self._tools[next(iter(self._tools))]
        for argument, schema, required in _parameters(function):
            slot = known.setdefault(argument, _Argument())
            values = [arguments[argument] for arguments in given if argument in arguments]
            for value in values:
                _note(slot, value, chat)
            right = {canonical(value) for value in values}
            if any(argument not in arguments for arguments in given):
                right.add(_OMITTED)
            for value in self._ranked(name, argument, schema, required, chat):
                self._values.learn(value.features, _VALUE_BIAS, value.text in right)

    def _name(self, name: str, context: Sequence[int], chat: Conversation) -> _Name:
        tool = feature(name)
        parts = set(name.lower().replace("-", "_").split("_"))
        shared = len(parts & chat.words)
        called = sum(call.name == name for call in chat.calls[-6:])
        features = [crossed(one, tool) for one in context]
        features += [
            feature(f"shared {shared}/{len(parts)}"),
            feature(f"shared {shared} {bool(chat.since_user)}"),
            crossed(feature(f"called {called}"), tool),
        ]
        return _Name(name, self._names.probability(features, _NAME_BIAS), features)

    def _candidates(self, function: Function, name: _Name | None, chat: Conversation) -> Iterator[_Candidate]:
        """Whole calls of one tool. name: None: it is written already."""
        tool = feature(function["name"])
        p_name = 1.0 if name is None else name.probability
        for rank, combined in enumerate(self._combined(function, chat)):
            p_values, arguments = combined.probability, combined.given
            text = canonical(arguments)
            again = (function["name"], text) in chat.made
            likely = feature(f"{name is None} values {round(2 * math.log(max(p_values, _LOWEST)))}")
            named = feature(f"{name is None} name {round(2 * math.log(max(p_name, _LOWEST)))}")
            place, repeated = feature(f"{name is None} rank {rank}"), feature(f"{name is None} again {again}")
            bias = feature(f"{name is None} bias")
            both = [crossed(one, tool) for one in (bias, place, repeated, likely)]
            fits = crossed(likely, named)
            known = feature(f"{name is None} known {function['name'] in self._tools} {len(arguments) > 0}")
            features = [bias, place, repeated, likely, named, fits, known, *both]
            if len(combined.values) > 1:
                joined = feature(f"{name is None} joined {min(combined.joined, 3)}")
                features += [joined, crossed(joined, tool), crossed(joined, repeated)]
            offset = logit(min(max(p_name * p_values, _LOWEST), 1 - _LOWEST))
            probability = self._calls.probability(features, offset)
            yield _Candidate(function["name"], text, arguments, probability, features, offset)

    def _combined(self, function: Function, chat: Conversation) -> list[_Arguments]:
        """The likeliest combinations of arguments, and those whose values stand together in a result."""
        parameters = list(_parameters(function))
        if len(parameters) > MAX_ARGUMENTS:
            return []
        ranked = {
            argument: self._ranked(function["name"], argument, schema, required, chat)
            for argument, schema, required in parameters
        }
        found = [_Arguments(1.0, ())]
        for argument, values in ranked.items():
            longer = [
                _Arguments(one.probability * value.probability, (*one.values, (argument, value)))
                for one in found
                for value in values[:MAX_CALLS]
            ]
            found = heapq.nlargest(MAX_CALLS, longer, key=lambda one: one.probability)
        if found and len(ranked) > 1:
            known = {canonical(one.given) for one in found}
            together = [one for one in _together(ranked) if canonical(one.given) not in known]
            found += heapq.nlargest(MAX_CALLS, together, key=lambda one: one.probability)
        return found

    def _ranked(
        self, name: str, argument: str, schema: Mapping[str, Any], required: bool, chat: Conversation
    ) -> list[_Value]:
        """Candidate values of an argument, the likeliest first."""
        slot = self._tools.get(name, {}).get(argument) or _Argument()
        found = _values(slot, argument, schema, required, chat)
        owners = (feature(f"{name} {argument}"), feature(argument), feature("any"))
        number = feature(f"of {min(len(found), 4)}")
        ranked = []
        for text, (value, signs) in found.items():
            features = [crossed(one, owner) for one in (*map(feature, signs), number) for owner in owners]
            p, objects = self._values.probability(features, _VALUE_BIAS), chat.objects.get(text, _NOWHERE)
            ranked.append(_Value(text, value, p, features, objects))
        return sorted(ranked, key=lambda one: -one.probability)


@dataclass(frozen=True, slots=True)
class Forecast:
    """The prediction for one request, and what is needed to learn from its answer."""

    predictor: ToolCallPredictor
    chat: Conversation
    tools: Mapping[str, Function]
    names: Sequence[_Name]
    candidates: Sequence[_Candidate]

    def calls(self, min_probability: float, limit: int) -> tuple[PredictedCall, ...]:
        return _chosen(self.candidates, min_probability, limit)

    def given_name(self, name: str, min_probability: float, limit: int) -> tuple[PredictedCall, ...]:
        """Once the name of a call is written."""
        if name not in self.tools:
            return ()
        return _chosen(self.predictor.given_name(self.chat, self.tools[name]), min_probability, limit)


def _chosen(calls: Iterable[_Candidate], min_probability: float, limit: int) -> tuple[PredictedCall, ...]:
    chosen = [call for call in calls if call.probability >= min_probability][:limit]
    return tuple(PredictedCall(call.name, call.arguments, call.probability) for call in chosen)


def _together(ranked: Mapping[str, Sequence[_Value]]) -> Iterator[_Arguments]:
    """For each object that holds values of two arguments or more: those, and the likeliest of the others."""
    held: dict[ObjectId, dict[str, _Value]] = {}
    for argument, values in ranked.items():
        for value in values:
            for place in value.objects:
                held.setdefault(place, {}).setdefault(argument, value)
    if not all(ranked.values()):
        return
    for own in held.values():
        if len(own) > 1:
            chosen = tuple((name, own.get(name, best[0])) for name, best in ranked.items())
            yield _Arguments(math.prod(value.probability for _, value in chosen), chosen)


def _context(chat: Conversation) -> list[int]:
    """Features of the moment before an answer."""
    events, since = chat.events, chat.since_user
    steps = min(len(since), 3)
    last = events[-1] if events else ""
    texts = [f"{n} {'|'.join(events[-n:])}" for n in range(1, 5)]
    texts += [
        "any",
        f"steps {steps}",
        f"steps {steps} {last}",
        f"chains {chat.chains}",
        f"chains {chat.chains} {last}",
    ]
    texts += [f"run {event}" for event in sorted(set(events[-12:]))]
    texts += [f"turn {event}" for event in sorted(set(since))]
    texts += [f"form {steps > 0} {form}" for form in sorted(chat.forms)]
    words = sorted(chat.words)[:MAX_WORDS]
    texts += [f"word {steps > 0} {word}" for word in words]
    if steps:
        texts += [f"word {last} {word}" for word in words]
    return [feature(text) for text in texts]


def _values(
    slot: _Argument, argument: str, schema: Mapping[str, Any], required: bool, chat: Conversation
) -> dict[str, tuple[Any, list[str]]]:
    """Candidates by their JSON: the value, and the signs that speak for or against it."""
    found: dict[str, tuple[Any, list[str]]] = {}
    used = chat.used.get(argument, set[str]())
    last = chat.events[-1] if chat.events else ""
    floats = any(isinstance(value, float) for value, _ in slot.values.values())
    nearest = dict[str, int]()  # words that the user's last message shares with those beside a value
    for name in _sources(slot, argument, chat):
        if len(found) >= MAX_CANDIDATES:
            break
        source = chat.sources[name]
        number, age, first = min(len(source.values), 4), min(source.age, 2), True
        for key, original in source.values.items():
            if (value := typed(original, schema, floats)) is None:
                continue
            text = canonical(value)
            place = "used" if text in used else "next" if first else "later"
            first = first and place == "used"
            signs = found.setdefault(text, (value, []))[1]
            signs += (name, f"{name} {place} of {number}", f"{name} {place} {age}", f"{name} {place} {last}")
            if near := source.near.get(key):
                nearest[text] = max(nearest.get(text, 0), len(near & chat.words))
                signs.append(f"near before {place} {min(len(near & chat.earlier_words), 2)}")
            if len(found) >= MAX_CANDIDATES:
                break
    best = max(nearest.values(), default=0)
    for text, shared in nearest.items():
        alone = list(nearest.values()).count(shared) == 1
        signs = found[text][1]
        signs += (f"near {min(shared, 3)}", f"nearest {shared == best > 0} {alone} {text in used}")
    recent, before = chat.last_user_text, " ".join(chat.user_texts[-3:-1])
    for text, (value, times) in slot.values.items():
        mentioned = isinstance(value, str) and len(value) > 2 and (value in recent or value in before)
        signs = ["mentioned"] if mentioned else []
        signs += ["constant", f"is {text}", f"is {text} {last}"] if times > 1 else []
        if signs:
            found.setdefault(text, (value, []))[1].extend(signs)
    for value in schema.get("enum") or ():
        if isinstance(value, str) and value.lower() in recent.lower():
            found.setdefault(canonical(value), (value, []))[1].append("enum")
    for text, (value, signs) in found.items():
        signs.append("used" if text in used else "fresh")
        if isinstance(value, str) and len(value) > 2:
            signs += ["said"] if value in recent else ["said before"] if value in before else []
    if not required:
        found[_OMITTED] = (None, ["omitted", f"omitted {last}"])
    return found


def _sources(slot: _Argument, argument: str, chat: Conversation) -> list[str]:
    """Those that were right before, then those whose last name is the argument's."""
    known = [name for name in slot.sources if name in chat.sources]
    named = [name for name in chat.sources if name not in slot.sources and _last_name(name) == argument]
    return [*known, *named[:MAX_NAMED]]


def _last_name(source: str) -> str:
    return source.rpartition(":")[2].removesuffix("[*]").rpartition(".")[2]


def _note(slot: _Argument, value: Any, chat: Conversation) -> None:
    """Remembers where a value could have come from."""
    forms = _forms(value)
    for name, source in chat.sources.items():
        if any(form in source.values for form in forms):
            slot.sources[name] = slot.sources.get(name, 0) + 1
    if len(slot.sources) > MAX_SOURCES:
        best = heapq.nlargest(MAX_SOURCES, slot.sources, key=slot.sources.__getitem__)
        slot.sources = {name: slot.sources[name] for name in best}
    text = canonical(value)
    if len(text) <= MAX_VALUE:
        _, times = slot.values.pop(text, (value, 0))
        slot.values[text] = (value, times + 1)
        if len(slot.values) > MAX_VALUES:
            del slot.values[min(slot.values, key=lambda known: slot.values[known][1])]


def _forms(value: Any) -> set[str]:
    """The JSON of a value, and of the same as text or as number."""
    forms = {canonical(value)}
    if isinstance(value, int | float) and not isinstance(value, bool):
        whole = int(value) if isinstance(value, float) and value.is_integer() else value
        forms |= {canonical(str(value)), canonical(whole), canonical(str(whole))}
    elif isinstance(value, str):
        forms |= {canonical(number) for number in (typed(value, {"type": "number"}),) if number is not None}
    return forms


def typed(value: Any, schema: Mapping[str, Any], floats: bool = False) -> Any:
    """A value as an argument of this schema; None where it cannot be one. floats: 20 is 20.0."""
    kind = schema.get("type")
    if isinstance(kind, list):
        kind = next((one for one in kind if one != "null"), None)
    if isinstance(value, bool):
        return value if kind in ("boolean", None) else None
    if kind == "string":
        return value if isinstance(value, str) else None if value is None else str(value)
    if kind in ("integer", "number"):
        number = _number(value, kind == "integer")
        return float(number) if floats and number is not None and kind == "number" else number
    return None if kind is not None else value


def _number(value: Any, whole: bool) -> int | float | None:
    if isinstance(value, str):
        try:
            value = int(value) if value.removeprefix("-").isdecimal() else float(value)
        except ValueError:
            return None
    if isinstance(value, int):
        return value
    return value if isinstance(value, float) and math.isfinite(value) and not whole else None


def _parameters(function: Function) -> Iterator[tuple[str, Mapping[str, Any], bool]]:
    """Each argument, its schema, and True where it must be given."""
    parameters = function.get("parameters")
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    if not isinstance(properties, Mapping):
        return
    required = parameters.get("required") if isinstance(parameters, Mapping) else None
    needed = (
        set(required) if isinstance(required, list) and all(isinstance(r, str) for r in required) else set()
    )
    for name, schema in properties.items():
        yield name, schema if isinstance(schema, Mapping) else {}, name in needed
