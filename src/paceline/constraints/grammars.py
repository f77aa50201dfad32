"""Constraints a user can give, each as rules of one Lark grammar in llguidance's dialect."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol, get_args

from paceline.constraints.forced_text import NO_FORCING, forced_text_ends
from paceline.errors import ConstraintError, short

Spell = Callable[[str], str]  # fixed text as items of a rule: special tokens are single tokens

# White space in JSON is enforced too. fixed: that of json.dumps, which models have seen most often;
# compact: none; flexible: up to eight characters wherever JSON allows it.
Whitespace = Literal["fixed", "compact", "flexible"]
WHITESPACE: Final[tuple[Whitespace, ...]] = get_args(Whitespace)
_OPTIONS: Final[Mapping[Whitespace, Mapping[str, Any]]] = {
    "fixed": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "},
    "compact": {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"},
    "flexible": {"whitespace_flexible": True, "whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,8}"},
}
PARAM_COMMENT: Final = "// request parameter: "
LARK_COMMENT: Final = "// may be ambiguous"  # in every grammar with rules of a caller's own
MAX_BYTES: Final = 1 << 20  # of one schema or grammar
MAX_PATTERNS: Final = 100  # patternProperties of a schema: the work grows with their square


class Constraint(Protocol):
    """The form of an output or of a part of it."""

    def rules(self, name: str, spell: Spell) -> str:
        """Lark text that defines the rule `name`. Further rules have names that begin with it."""


@dataclass(frozen=True, slots=True)
class Json:
    """JSON of a JSON Schema; {} allows any JSON."""

    schema: str  # as JSON
    whitespace: Whitespace = "fixed"

    @classmethod
    def of(cls, schema: Any, whitespace: Whitespace = "fixed") -> "Json":
        """From the schema as data."""
        if isinstance(schema, str):
            schema = parsed(schema)
        try:
            return cls(json.dumps(schema, ensure_ascii=False), whitespace)
        except (TypeError, ValueError, RecursionError) as problem:
            raise ConstraintError(f"the schema is not JSON data ({problem})") from None

    def __post_init__(self) -> None:
        if self.whitespace not in WHITESPACE:
            expected = f"expected one of {', '.join(WHITESPACE)}"
            raise ConstraintError(f"{short(self.whitespace)} is not usable: {expected}", "whitespace")

    def rules(self, name: str, spell: Spell) -> str:
        _limited(self.schema, "schema")
        schema = parsed(self.schema)
        if not isinstance(schema, dict | bool):
            raise ConstraintError(f"a schema is an object or true or false, not {short(self.schema)}")
        if (patterns := _patterns(schema)) > MAX_PATTERNS:
            raise ConstraintError(
                f"the schema has {patterns} patternProperties: at most {MAX_PATTERNS} can be enforced in time"
            )
        if schema is not False:
            schema = {**({} if schema is True else schema), "x-guidance": _OPTIONS[self.whitespace]}
        return f"{name}: %json {json.dumps(schema, ensure_ascii=False)}"


@dataclass(frozen=True, slots=True)
class Regex:
    """Text that a regular expression matches as a whole. No look-around, no back-references."""

    pattern: str

    def rules(self, name: str, spell: Spell) -> str:
        _limited(self.pattern, "pattern")
        if not self.pattern:
            raise ConstraintError("the pattern is empty: nothing could be written")
        return f"{name}: /{_slashed(_unanchored(self.pattern))}/"


@dataclass(frozen=True, slots=True)
class Lark:
    """Text of a context-free grammar in Lark's syntax, with a rule `start`."""

    text: str

    def rules(self, name: str, spell: Spell) -> str:
        _limited(self.text, "grammar")
        text = self.text if name == "start" else f"{name}: %lark {{\n{self.text}\n}}"
        return "\n".join([LARK_COMMENT, text, *([] if forced_text_ends(self.text) else [NO_FORCING])])


@dataclass(frozen=True, slots=True)
class Choice:
    """One of several texts."""

    options: tuple[str, ...]

    def __post_init__(self) -> None:
        given = self.options
        if isinstance(given, str) or not given or not all(isinstance(o, str) and o for o in given):
            raise ConstraintError(f"{short(given)} is not a choice: expected one or more texts, none empty")
        object.__setattr__(self, "options", tuple(given))

    def rules(self, name: str, spell: Spell) -> str:
        _limited("".join(self.options), "choice")
        return f"{name}: " + " | ".join(quoted(option) for option in self.options)


@dataclass(frozen=True, slots=True)
class RequestPart:
    """A constraint and the part of a request it came from, which errors name.

    A comment in the grammar carries the name to where the engine reports a line that it cannot compile.
    """

    param: str
    constraint: Constraint

    def rules(self, name: str, spell: Spell) -> str:
        try:
            return f"{PARAM_COMMENT}{self.param}\n{self.constraint.rules(name, spell)}"
        except ConstraintError as error:
            raise error.within(self.param) from None


class UnmarkedCalls(Constraint, Protocol):
    """Calls that begin in free text without a mark: {"name": ..., "arguments": {...}}."""

    @property
    def schemas(self) -> Mapping[str, str]:
        """By tool."""


@dataclass(frozen=True, slots=True)
class StructuralTag:
    """Free text until `trigger` appears, then the grammar `then`, whose text begins with the trigger.

    The structural tags of XGrammar and vLLM.
    """

    trigger: str
    then: Constraint | None  # None: the trigger must not appear
    again: bool = False  # free text and another trigger may follow
    anywhere: bool = True  # False: the trigger counts only at the very start
    must: bool = False  # the text cannot end before the trigger
    unmarked: "UnmarkedCalls | None" = None  # calls in the free text that need no trigger


@dataclass(frozen=True, slots=True)
class _Sequence:
    """Fixed text, then a constraint."""

    text: str
    constraint: Constraint

    def rules(self, name: str, spell: Spell) -> str:
        inner = f"{name}_then"
        return f"{name}: {spell(self.text)} /\\s{{0,4}}/ {inner}\n{self.constraint.rules(inner, spell)}"


def after(mark: str, constraint: Constraint) -> StructuralTag:
    """Free text up to a mark, such as the end of a model's reasoning; then the constraint."""
    return StructuralTag(mark, _Sequence(mark, constraint), must=True)


def response_format(given: Mapping[str, Any], whitespace: Whitespace = "fixed") -> Constraint | None:
    """From OpenAI's parameter of this name; None: plain text."""
    kind = given.get("type") if isinstance(given, Mapping) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return Json('{"type": "object"}', whitespace)
    if kind == "json_schema":
        inner = given.get("json_schema")
        if not isinstance(inner, Mapping) or "schema" not in inner:
            reason = 'expected "json_schema": {"name": ..., "schema": {...}}'
            raise ConstraintError(reason, "response_format")
        param = "response_format.json_schema.schema"
        try:
            return RequestPart(param, Json.of(inner["schema"], whitespace))
        except ConstraintError as error:
            raise error.within(param) from None
    raise ConstraintError(
        f"{short(kind)} is unknown: expected the type text, json_object or json_schema", "response_format"
    )


def parsed(text: str) -> Any:
    """A schema's text as data."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ConstraintError("the schema is nested too deeply") from None
    except ValueError as problem:
        raise ConstraintError(f"the schema is not JSON ({problem}): {short(text)}") from None


def quoted(text: str) -> str:
    """A string of a Lark grammar, which may not hold the character DEL."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _patterns(schema: Any) -> int:
    if isinstance(schema, list):
        return sum(map(_patterns, schema))
    if not isinstance(schema, dict):
        return 0
    own = schema.get("patternProperties")
    return (len(own) if isinstance(own, dict) else 0) + sum(map(_patterns, schema.values()))


def _slashed(pattern: str) -> str:
    """Escapes slashes and line breaks, which would end a regular expression of a Lark grammar."""
    changed = {"/": "\\/", "\n": "\\n", "\\\n": "\\n"}
    return re.sub(r"\\.|/|\n", lambda m: changed.get(m[0], m[0]), pattern, flags=re.DOTALL)


def _unanchored(pattern: str) -> str:
    """Without anchors at its ends: the whole text is matched anyway, and the engine knows none."""
    body = pattern.removeprefix("^").removeprefix("\\A")
    if body.endswith("$") and not re.search(r"(?<!\\)(\\\\)*\\\$$", body):
        body = body[:-1]
    return re.sub(r"(?<!\\)((\\\\)*)\\[Zz]\Z", r"\1", body) or pattern


def _limited(text: str, what: str) -> None:
    if not isinstance(text, str):
        raise ConstraintError(f"the {what} is no text: {short(text)}")
    if (size := len(text.encode("utf-8", "replace"))) > MAX_BYTES:
        raise ConstraintError(f"the {what} has {size:,} bytes: at most {MAX_BYTES:,} are taken")
