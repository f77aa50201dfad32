"""Python types as constraints, and the values of the texts they allow."""

import inspect
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Final, Literal, get_args, get_origin

from paceline.constraints.grammars import Choice, Constraint, Json, Regex, Whitespace
from paceline.constraints.pydantic_schema import schema_of
from paceline.constraints.text_matcher import fits
from paceline.errors import ConstraintError, short

if TYPE_CHECKING:
    from pydantic import TypeAdapter, ValidationError

EXPECTED: Final = (
    "expected a Pydantic model, a dataclass or another type that JSON can hold, a Literal or Enum of texts, "
    "a compiled regular expression, a JSON Schema, or one of Json, Regex, Lark, Choice and Template"
)
_FLAGS: Final = {re.IGNORECASE: "i", re.DOTALL: "s"}  # in the engine's syntax, which has no others
_MAX_REASONS: Final = 4  # why a value is rejected
MAX_CACHED: Final = 256  # outputs: making one from a type takes milliseconds

Parse = Callable[[str], Any]


@dataclass(frozen=True, slots=True)
class Output:
    """A constraint, and a parser from its text to a value."""

    constraint: Constraint
    parse: Parse  # raises if the text does not fit: it may be cut short


def output(of: Any, whitespace: Whitespace = "fixed") -> Output:
    """From a type, a pattern, a JSON Schema or a constraint.

    A Literal or an Enum of nothing but texts is written as bare text; every other type, as JSON. Equal types
    give the same output.
    """
    if isinstance(of, Mapping):
        of = Json.of(of, whitespace)
    return _cached(of, whitespace) if _hashes(of) else _build(of, whitespace)


def _hashes(of: Any) -> bool:
    try:
        hash(of)
    except TypeError:  # an annotation of the type may have no hash
        return False
    return True


def _build(of: Any, whitespace: Whitespace) -> Output:
    if isinstance(of, re.Pattern):
        return _build(Regex(_pattern(of)), whitespace)
    if isinstance(of, bool):
        return _build(Json.of(of, whitespace), whitespace)
    if hasattr(of, "rules") and not isinstance(of, type):
        return Output(of, _reader(of))
    if of is str:
        raise ConstraintError("str needs no constraint: leave the output's type out, any text will do")
    if of is None or isinstance(of, str | partial) or inspect.isroutine(of):
        raise ConstraintError(f"{of!r} is no type of output: {EXPECTED}")
    values = _texts(of)
    return (
        _typed(of, whitespace) if values is None else Output(Choice(tuple(values)), partial(_chosen, values))
    )


_cached = lru_cache(MAX_CACHED, typed=True)(_build)


def _pattern(pattern: re.Pattern[Any]) -> str:
    """In the engine's syntax. The whole text is matched, so an anchor at the start is redundant."""
    if not isinstance(pattern.pattern, str):
        raise ConstraintError(f"{short(pattern)} is a pattern of bytes: expected one of text")
    flags = re.RegexFlag(pattern.flags) & ~re.UNICODE
    others = [flag.name for flag in re.RegexFlag if flag & flags and flag not in _FLAGS]
    if others:
        raise ConstraintError(
            f"{', '.join(map(str, others))} cannot be enforced: leave it out of {short(pattern)}"
        )
    letters = "".join(letter for flag, letter in _FLAGS.items() if flag & flags)
    if not letters:
        return pattern.pattern
    return f"(?{letters})" + pattern.pattern.removeprefix("^").removeprefix("\\A")


def _texts(of: Any) -> dict[str, Any] | None:
    """The value of each text, for a type that has only texts."""
    if get_origin(of) is Literal:
        pairs = [(value, value) for value in get_args(of)]
    elif isinstance(of, type) and issubclass(of, Enum):
        pairs = [(member.value, member) for member in of]
    else:
        return None
    return dict(pairs) if pairs and all(isinstance(text, str) for text, _ in pairs) else None


def _reader(constraint: Any) -> Parse:
    if isinstance(constraint, Json):
        return _loaded
    if isinstance(constraint, Regex):
        return partial(_matched, constraint)
    if isinstance(constraint, Choice):
        return partial(_chosen, {option: option for option in constraint.options})
    parse: Parse = getattr(constraint, "parse", str)
    return parse


def _loaded(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as problem:
        raise ConstraintError(f"the output is not JSON ({problem}): {_short(text)}") from None


def _matched(pattern: Regex, text: str) -> str:
    if not fits(pattern, text):
        raise ConstraintError(f"the output does not match {_short(pattern.pattern)}: {_short(text)}")
    return text


def _chosen(values: Mapping[str, Any], text: str) -> Any:
    if text not in values:
        raise ConstraintError(f"the output is none of {_short(', '.join(values))}: {_short(text)}")
    return values[text]


def _typed(of: Any, whitespace: Whitespace) -> Output:
    from pydantic import PydanticUserError, TypeAdapter

    try:
        adapter: TypeAdapter[Any] = TypeAdapter(of)
        schema = schema_of(adapter)
    except (PydanticUserError, NameError, TypeError) as problem:
        reason = str(problem).strip().splitlines()[0]
        raise ConstraintError(f"{of!r} cannot be an output ({reason}): {EXPECTED}") from None
    return Output(Json.of(schema, whitespace), partial(_validated, adapter))


def _validated(adapter: "TypeAdapter[Any]", text: str) -> Any:
    from pydantic import ValidationError

    try:
        return adapter.validate_json(text)
    except ValidationError as problem:
        raise ConstraintError(f"the output is refused: {reasons(problem)}") from None


def reasons(problem: "ValidationError") -> str:
    errors = problem.errors(include_url=False, include_context=False)
    reasons = [
        f"{'.'.join(map(str, e['loc']))}: {e['msg']}".removeprefix(": ") for e in errors[:_MAX_REASONS]
    ]
    more = [f"and {len(errors) - _MAX_REASONS} more"] if len(errors) > _MAX_REASONS else []
    return " ".join("; ".join(reasons + more).split())


def _short(text: str, limit: int = 80) -> str:
    return text if len(text) <= limit else text[:limit] + " ..."
