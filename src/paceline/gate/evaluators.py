"""Evaluators: deterministic scores of one answer, 0 to 1. The gate compares the scores of two legs.

They tell less than a person would. Schema and tool-call scores are exact. `groundedness` counts words and
numbers that the context has: it sees an invented figure or name, not a wrong conclusion from the right words,
and it favours short answers, which a comparison on the same prompt cancels only in part. `task_completion`
knows the tests or the right answer of a suite, and nothing of an open request. A judge model can be added by
URL (`judge`). No evaluator ever executes a tool.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final

from paceline.gate.code_sandbox import passes_tests
from paceline.gate.pair import Leg, Pair, ToolCall


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """What is known about a right answer; None and "": nothing."""

    calls: tuple[ToolCall, ...] | None = None  # (): an answer without a call
    context: str = ""  # that the answer must be grounded in
    answer: str = ""  # that it must contain
    tests: str = ""  # Python: defines check(candidate)
    entry_point: str = ""  # the function that the tests call


Evaluator = Callable[[Mapping[str, Any], Leg, Reference], float | None]  # None: not applicable

_BROKEN_CALL: Final = re.compile(r"<\|?tool_call|<function=|\"arguments\"\s*:|\"parameters\"\s*:\s*\{")
_WORD: Final = re.compile(r"[^\W\d_]{3,}|\d[\d.,]*\d|\d")
_FENCE: Final = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.S)
_BACKTRACKS: Final = 10_000  # of one pattern: a client's pattern may be endless
_COMMON_WORDS: Final = """
about according after all also and any are based been before between both but can could did does each for from
given had has have her his how however into its just may might more most not one only other our out over
passage passages provided same she should since some such than that the their them then there these they this
those through under until use used using very was were what when where which while who will with would yes
you your
"""
_COMMON: Final = frozenset(_COMMON_WORDS.split())


def stops_respected(request: Mapping[str, Any], leg: Leg, reference: Reference) -> float | None:
    """1: no stop sequence is in the text."""
    stop = request.get("stop")
    stops = [stop] if isinstance(stop, str) else stop
    if not stops or leg.text is None:
        return None
    return float(not any(one in leg.text for one in stops))


def schema_valid(request: Mapping[str, Any], leg: Leg, reference: Reference) -> float | None:
    """1: the text is JSON that follows the schema of the request."""
    schema = requested_schema(request)
    if schema is None or leg.text is None or leg.tool_calls:
        return None
    try:
        return float(follows(json.loads(leg.text), schema))
    except (ValueError, RecursionError):
        return 0.0


def tool_calls_valid(request: Mapping[str, Any], leg: Leg, reference: Reference) -> float | None:
    """1: every call names an offered tool and follows its schema, and no broken call is left in the text."""
    offered = offered_tools(request)
    if not offered or leg.text is None:
        return None
    if _BROKEN_CALL.search(leg.text):
        return 0.0
    return float(all(call.name in offered and _fits(call, offered[call.name]) for call in leg.tool_calls))


def tool_call_match(request: Mapping[str, Any], leg: Leg, reference: Reference) -> float | None:
    """1: the calls are the recorded ones, in any order, as in BFCL's AST check."""
    if reference.calls is None or leg.text is None:
        return None
    return float(same_calls(leg.tool_calls, reference.calls))


def groundedness(request: Mapping[str, Any], leg: Leg, reference: Reference) -> float | None:
    """The share of the answer's words and numbers that context or question have."""
    if not reference.context or leg.text is None:
        return None
    known = words(reference.context) | words(_prompt_text(request))
    used = words(leg.text)
    return len(used & known) / len(used) if used else 0.0


def task_completion(request: Mapping[str, Any], leg: Leg, reference: Reference) -> float | None:
    """1: the code passes its tests, or the text contains the right answer."""
    if leg.text is None:
        return None
    if reference.tests:
        program = code_answer(_prompt_text(request), leg.text, reference.entry_point)
        return float(passes_tests(program, reference.tests, reference.entry_point))
    if reference.answer:
        return float(_normalized(reference.answer) in _normalized(leg.text))
    return None


EVALUATORS: Final[tuple[Evaluator, ...]] = (
    stops_respected,
    schema_valid,
    tool_calls_valid,
    tool_call_match,
    groundedness,
    task_completion,
)


def evaluated(pair: Pair, request: Mapping[str, Any], reference: Reference | None = None) -> Pair:
    """The pair with the scores of both legs. Its texts are not needed afterwards."""
    known = reference or Reference()
    return replace(
        pair,
        baseline=_scored(pair.baseline, request, known),
        candidate=_scored(pair.candidate, request, known),
    )


def _scored(leg: Leg, request: Mapping[str, Any], reference: Reference) -> Leg:
    """A request that no evaluator can read, since a client may send anything, gets no score."""
    if not leg.ok:
        return leg
    scores: dict[str, float] = {}
    for evaluator in EVALUATORS:
        with suppress(AttributeError, KeyError, RecursionError, TypeError, ValueError):
            if (value := evaluator(request, leg, reference)) is not None:
                scores[evaluator.__name__] = value
    return replace(leg, scores={**leg.scores, **scores})


def requested_schema(request: Mapping[str, Any]) -> Any:
    """The JSON Schema that the answer must follow; None: there is none."""
    format_ = request.get("response_format") or (request.get("text") or {}).get("format") or {}
    if format_.get("type") == "json_schema":
        return (format_.get("json_schema") or format_).get("schema")
    if format_.get("type") == "json_object":
        return {"type": "object"}
    return (request.get("structured_outputs") or {}).get("json")


def offered_tools(request: Mapping[str, Any]) -> dict[str, Any]:
    """Schemas of the parameters, by name."""
    tools = [tool.get("function") or tool for tool in request.get("tools") or ()]
    return {tool["name"]: tool.get("parameters") or {} for tool in tools if "name" in tool}


def follows(value: Any, schema: Any) -> bool:
    """Fetches no remote reference, and tries no pattern for long: what cannot be checked is not followed."""
    import jsonschema_rs

    patterns = jsonschema_rs.FancyRegexOptions(backtrack_limit=_BACKTRACKS)
    try:
        validator = jsonschema_rs.validator_for(
            schema, pattern_options=patterns, validate_formats=False, offline=True
        )
        return validator.is_valid(value)
    except ValueError:  # a broken schema, an unresolvable reference, an endless pattern
        return False


def _fits(call: ToolCall, schema: Any) -> bool:
    try:
        return follows(json.loads(call.arguments or "{}"), schema)
    except (ValueError, RecursionError):
        return False


def same_calls(calls: Sequence[ToolCall], expected: Sequence[ToolCall]) -> bool:
    """As syntax trees: argument order, spaces, 1 and 1.0, and the case of texts do not matter."""
    return sorted(map(_call_tree, calls)) == sorted(map(_call_tree, expected))


def _call_tree(call: ToolCall) -> str:
    try:
        arguments = json.loads(call.arguments or "{}")
    except (ValueError, RecursionError):
        arguments = call.arguments
    return json.dumps([call.name, _canonical(arguments)], sort_keys=True)


def _canonical(value: Any) -> Any:
    match value:
        case dict():
            return {key: _canonical(item) for key, item in value.items()}
        case list():
            return [_canonical(item) for item in value]
        case bool() | None:
            return value
        case int() | float():
            return float(value)
        case _:
            return re.sub(r"[ ,./\-_*^'\"]", "", str(value)).lower()  # as BFCL compares texts


def words(text: str) -> set[str]:
    """Content words and numbers; a plural counts as its singular."""
    lowered = (word.lower().rstrip(".,") for word in _WORD.findall(text))
    return {word.removesuffix("s") if len(word) > 3 else word for word in lowered if word not in _COMMON}


def code_answer(prompt: str, text: str, entry_point: str) -> str:
    """The program in an answer: its longest code block, or all of it. A body continues the prompt's code."""
    code = max(_FENCE.findall(text), key=len, default=text)
    stub = max(_FENCE.findall(prompt), key=len, default=prompt)
    if re.search(rf"def\s+{re.escape(entry_point)}\b", code):
        imports = [line for line in stub.splitlines() if line.startswith(("import ", "from "))]
        return "\n".join([*imports, code])
    return stub + code


def _prompt_text(request: Mapping[str, Any]) -> str:
    """The text of the last user message."""
    messages = request.get("messages") or ()
    contents = [m.get("content") for m in messages if m.get("role") == "user"]
    last = contents[-1] if contents else request.get("prompt") or ""
    return last if isinstance(last, str) else json.dumps(last)


def _normalized(text: str) -> str:
    return " ".join(re.findall(r"\w+", text.lower()))
