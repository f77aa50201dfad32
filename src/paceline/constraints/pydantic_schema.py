"""Pydantic's schemas of Python types, changed so that they can be enforced and their texts always parse."""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Final

from paceline.constraints.json_schema import closed, mapped

Schema = dict[str, Any]
Fix = Callable[[Schema, Mapping[str, Any]], Schema]  # a type's schema, and Pydantic's core schema of it

_YEAR: Final = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_LEAP_YEAR: Final = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DAY: Final = (
    "(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    "|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_DATE: Final = f"(?:{_YEAR}-{_DAY}|{_LEAP_YEAR}-02-29)"
_CLOCK: Final = "(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\\.[0-9]{1,6})?"
_ZONE: Final = "(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_SECONDS: Final = "[0-9]{1,6}(?:\\.[0-9]{1,6})?S"
_TIME: Final = f"T(?:[0-9]{{1,6}}H(?:[0-9]{{1,6}}M)?(?:{_SECONDS})?|[0-9]{{1,6}}M(?:{_SECONDS})?|{_SECONDS})"
_HEX: Final = "[0-9a-f]"
_SEXTET: Final = "[A-Za-z0-9{}]"
_BASE64: Final = "(?:{0}{{4}})*(?:{0}{{2}}==|{0}{{3}}=)?"
_WHOLE: Final = "-?(?:0|[1-9][0-9]*)"
_LABEL: Final = "[a-z][a-z0-9]{0,30}(?:-[a-z0-9]{1,30})?"

# The engine's patterns of some formats allow texts without a Python value: February 29 in any year, a second
# 60, durations of any number of days. Other formats it does not know. None: any text.
FORMATS: Final[Mapping[str, str | None]] = {
    "date": _DATE,
    "time": f"{_CLOCK}{_ZONE}?",
    "date-time": f"{_DATE}T{_CLOCK}{_ZONE}?",
    "duration": f"-?P(?:[0-9]{{1,8}}D(?:{_TIME})?|{_TIME})",
    "base64": _BASE64.format(_SEXTET.format("+/")),
    "base64url": _BASE64.format(_SEXTET.format("_-")),
    **{
        f"uuid{v}": f"{_HEX}{{8}}-{_HEX}{{4}}-{v}{_HEX}{{3}}-[89ab]{_HEX}{{3}}-{_HEX}{{12}}"
        for v in range(1, 9)
    },
    "binary": None,
    "password": None,
    "path": None,
}
_ZONED: Final = {"aware": f"{_DATE}T{_CLOCK}{_ZONE}", "naive": f"{_DATE}T{_CLOCK}"}
_KEYS: Final[Mapping[str, str]] = {
    "int": _WHOLE,
    "date": _DATE,
    "uuid": f"{_HEX}{{8}}(?:-{_HEX}{{4}}){{3}}-{_HEX}{{12}}",
}
_PLAIN_DECIMALS: Final = 15  # digits before the point; with a bound, a number has no exponent


def schema_of(adapter: Any) -> Schema:
    """The schema of a Pydantic TypeAdapter. Objects have only the properties they list."""
    made = adapter.json_schema(schema_generator=_generator())
    return closed(mapped(made, _enforceable))  # type: ignore[no-any-return]


@cache
def _generator() -> Any:
    """Pydantic's schema generator, with some of its methods changed."""
    from pydantic.json_schema import GenerateJsonSchema

    methods = {name: _fixed(getattr(GenerateJsonSchema, name), fix) for name, fix in _FIXES.items()}
    return type("Enforceable", (GenerateJsonSchema,), methods)


def _fixed(method: Callable[[Any, Any], Schema], fix: Fix) -> Callable[[Any, Any], Schema]:
    return lambda maker, core: fix(method(maker, core), core)


def _enforceable(schema: Schema) -> Schema:
    if "discriminator" in schema and "oneOf" in schema:
        # At most one alternative fits anyway: they differ in the discriminator's value.
        schema["anyOf"] = schema.pop("oneOf")
        del schema["discriminator"]
    if schema.get("type") == "string" and schema.get("format") in FORMATS:
        pattern = FORMATS[schema.pop("format")]
        if pattern is not None:
            schema["pattern"] = f"^{pattern}$"
    return schema


def _set(schema: Schema, core: Mapping[str, Any]) -> Schema:
    """The engine cannot enforce unique items. Reading a list into a set drops duplicates anyway."""
    schema.pop("uniqueItems", None)
    return schema


def _datetime(schema: Schema, core: Mapping[str, Any]) -> Schema:
    zoned = _ZONED.get(str(core.get("tz_constraint")))
    return schema if zoned is None else {"type": "string", "pattern": f"^{zoned}$"}


def _url(schema: Schema, core: Mapping[str, Any]) -> Schema:
    schemes = core.get("allowed_schemes")
    if not schemes:
        return schema
    rest = "(?::[1-9][0-9]{0,3})?(?:/[A-Za-z0-9._~/-]*)?(?:\\?[A-Za-z0-9._~=&-]*)?(?:#[A-Za-z0-9._~-]*)?"
    return {"type": "string", "pattern": f"^(?:{'|'.join(schemes)})://{_LABEL}(?:\\.{_LABEL}){{0,5}}{rest}$"}


def _decimal(schema: Schema, core: Mapping[str, Any]) -> Schema:
    """A number, never text, with no more digits than allowed."""
    numbers = [part for part in schema.get("anyOf", ()) if part.get("type") == "number"]
    if not numbers:
        return schema
    digits, decimals = core.get("max_digits"), core.get("decimal_places")
    if digits is None or decimals is not None:
        before = (digits or _PLAIN_DECIMALS + (decimals or 0)) - (decimals or 0)
        return _digits(numbers[0], before, decimals)
    return {"anyOf": [_digits(numbers[0], digits - after, after) for after in range(digits + 1)]}


def _digits(number: Schema, before: int, after: int | None) -> Schema:
    limited = dict(number)
    if not {"minimum", "exclusiveMinimum"} & limited.keys():
        limited["exclusiveMinimum"] = -(10**before)
    if not {"maximum", "exclusiveMaximum"} & limited.keys():
        limited["exclusiveMaximum"] = 10**before
    if after is not None:
        limited.setdefault("multipleOf", 10**-after if after else 1)
    return limited


def _dict(schema: Schema, core: Mapping[str, Any]) -> Schema:
    """Keys of other types than str become patterns or properties: the engine knows no propertyNames."""
    keys = core.get("keys_schema", {})
    values = schema.get("additionalProperties", True)
    pattern, names = _KEYS.get(str(keys.get("type"))), _names(keys)
    if pattern is not None:
        schema["patternProperties"] = {f"^{pattern}$": values}
    elif names is not None:
        schema["properties"] = dict.fromkeys(names, values)
    elif "patternProperties" not in schema:
        return schema
    schema.pop("propertyNames", None)
    return {**schema, "additionalProperties": False}


def _names(keys: Mapping[str, Any]) -> list[str] | None:
    """The keys, if the type lists them."""
    listed = keys.get("expected") if keys.get("type") == "literal" else None
    if keys.get("type") == "enum":
        listed = [member.value for member in keys["members"]]
    return listed if listed and all(isinstance(name, str) for name in listed) else None


_FIXES: Final[Mapping[str, Fix]] = {
    "set_schema": _set,
    "frozenset_schema": _set,
    "datetime_schema": _datetime,
    "url_schema": _url,
    "decimal_schema": _decimal,
    "dict_schema": _dict,
}
