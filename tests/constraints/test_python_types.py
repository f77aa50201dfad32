"""A type's every legal text is one of its values, and what cannot be an output says so."""

import datetime
import decimal
import enum
import functools
import re
import uuid
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import pytest
from pydantic import (
    UUID4,
    AwareDatetime,
    Base64Bytes,
    BaseModel,
    ConfigDict,
    Field,
    HttpUrl,
    NaiveDatetime,
    conint,
    conlist,
    constr,
    field_validator,
)
from pydantic.dataclasses import dataclass
from typing_extensions import TypedDict  # that of typing serves Pydantic from Python 3.12 on

from paceline.constraints import Choice, Compiler, Json, Lark, Output, Regex, output
from paceline.constraints.compiler import check
from paceline.constraints.pydantic_schema import FORMATS
from paceline.constraints.text_matcher import fits
from paceline.errors import ConstraintError
from paceline.text import Tokenizer
from support.legal_walks import CLOSING, all_parse, legal_texts, walked


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int = 9


class Dog(BaseModel):
    kind: Literal["dog"]
    name: str


class Node(BaseModel):
    value: int
    children: list["Node"] = []


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")
    given: int = Field(alias="givenName")
    maybe: Cat | None = None


class Open(BaseModel):
    model_config = ConfigDict(extra="allow")
    one: int


class Even(BaseModel):
    n: int

    @field_validator("n")
    @classmethod
    def is_even(cls, n: int) -> int:
        if n % 2:
            raise ValueError("n is odd")
        return n


@dataclass
class Point:
    x: float
    y: float = 0.0


class Movie(TypedDict):
    title: str
    year: int


class Pair(NamedTuple):
    left: int
    right: str


class Colour(enum.Enum):
    RED = "red"
    DARK_RED = "dark red"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Words(TypedDict):
    format: str  # properties with the names of keywords
    uniqueItems: int


PET = Annotated[Cat | Dog, Field(discriminator="kind")]
TYPES = {
    "int": int,
    "float": float,
    "bool": bool,
    "nothing": type(None),
    "anything": Any,
    "model": Cat,
    "recursive": Node,
    "forbids extras": Strict,
    "allows extras": Open,
    "dataclass": Point,
    "TypedDict": Movie,
    "properties named like keywords": Words,
    "NamedTuple": Pair,
    "tuple": tuple[int, str],
    "list": list[int],
    "some items": conlist(int, min_length=1, max_length=3),
    "set": set[int],
    "sets in a list": list[frozenset[Literal["a", "b"]]],
    "union": Cat | Dog | None,
    "discriminated": PET,
    "list of discriminated": list[PET],
    "number or text": float | str,
    "bounds": conint(ge=-3, lt=200),
    "pattern": constr(pattern=r"^[a-z]{2,4}\d$"),
    "lengths": constr(min_length=2, max_length=5),
    "enum of numbers": Level,
    "mixed literal": Literal[1, "a", None],
    "date": datetime.date,
    "time": datetime.time,
    "datetime": datetime.datetime,
    "datetime with a zone": AwareDatetime,
    "datetime without": NaiveDatetime,
    "timedelta": datetime.timedelta,
    "UUID": uuid.UUID,
    "UUID4": UUID4,
    "Decimal": decimal.Decimal,
    "places": Annotated[decimal.Decimal, Field(max_digits=5, decimal_places=2)],
    "digits": Annotated[decimal.Decimal, Field(max_digits=4)],
    "bytes": bytes,
    "base64": Base64Bytes,
    "Path": Path,
    "URL": HttpUrl,
    "dict": dict[str, int],
    "dict of numbers": dict[int, bool],
    "dict of dates": dict[datetime.date, int],
    "dict of few": dict[Literal["a", "b"], int],
    "dict of enum": dict[Colour, int],
    "dict of a pattern": dict[Annotated[str, Field(pattern="^x+$")], int],
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("of", TYPES.values(), ids=TYPES)
def test_every_legal_text_of_a_type_is_a_value(of: Any) -> None:
    made = output(of)
    assert isinstance(made.constraint, Json)
    all_parse(made.constraint, made.parse, seeds=8, least=6)


@pytest.mark.model
def test_every_legal_walk_of_a_models_tokens_is_a_value(smollm2_path: Path) -> None:
    tokenizer = Tokenizer.load(smollm2_path)
    compiler = Compiler(tokenizer, tokenizer.vocab_size)
    closing = [tokenizer.encode(mark) for mark in CLOSING]
    complete = 0
    for of in (Cat, PET, Strict, datetime.datetime, list[int], Colour, dict[int, bool], decimal.Decimal):
        made = output(of)
        for seed in range(4):
            cursor = compiler.cursor(made.constraint)
            tokens = walked(cursor, tokenizer.eos_ids, seed, 60, closing, tokenizer.vocab_size)
            if tokens is not None:
                made.parse(tokenizer.decode(tokens))
                complete += 1
    assert complete >= 20


def test_a_value_comes_back_from_its_json() -> None:
    assert output(Cat).parse('{"kind": "cat", "lives": 3}') == Cat(kind="cat", lives=3)
    assert output(Point).parse('{"x": 1.5}') == Point(1.5)
    assert output(set[int]).parse("[1, 1, 2]") == {1, 2}
    assert output(datetime.date).parse('"2024-02-29"') == datetime.date(2024, 2, 29)
    assert output({"type": "object"}).parse('{"a": [1]}') == {"a": [1]}
    assert output(True).parse("null") is None
    assert output(Level).parse("2") is Level.HIGH


def test_only_what_a_value_can_be_is_allowed() -> None:
    def allowed(of: Any, text: str) -> bool:
        return fits(output(of).constraint, text)

    assert allowed(datetime.date, '"2024-02-29"')
    assert allowed(datetime.date, '"2000-02-29"')
    assert not allowed(datetime.date, '"1900-02-29"')
    assert not allowed(datetime.date, '"2023-02-29"')
    assert not allowed(datetime.date, '"0000-01-01"')
    assert not allowed(datetime.datetime, '"2024-01-01T00:00:60Z"')
    assert not allowed(AwareDatetime, '"2024-01-01T00:00:00"')
    assert not allowed(NaiveDatetime, '"2024-01-01T00:00:00Z"')
    assert allowed(Annotated[decimal.Decimal, Field(max_digits=4)], "12.34")
    assert allowed(Annotated[decimal.Decimal, Field(max_digits=4)], "1234")
    assert not allowed(Annotated[decimal.Decimal, Field(max_digits=4)], "123.45")
    assert not allowed(Cat, '{"kind": "cat", "lives": 3, "junk": 1}')
    assert allowed(Open, '{"one": 1, "junk": 1}')
    assert allowed(dict[int, int], '{"12": 1}')
    assert not allowed(dict[int, int], '{"x": 1}')
    assert allowed(float | str, '"text"')
    assert not allowed(decimal.Decimal, '"text"')


def test_every_date_of_some_years_is_allowed_and_no_other() -> None:
    pattern = re.compile(str(FORMATS["date"]))
    for year in (1, 1900, 2000, 2023, 2024, 9999):
        days = [f"{year:04}-{month:02}-{day:02}" for month in range(14) for day in range(33)]
        for day in days:
            try:
                datetime.date.fromisoformat(day)
            except ValueError:
                assert not pattern.fullmatch(day)
            else:
                assert pattern.fullmatch(day)


def test_texts_are_bare() -> None:
    literal = output(Literal["yes", "no"])
    assert literal.constraint == Choice(("yes", "no"))
    assert literal.parse("yes") == "yes"
    colour = output(Colour)
    assert colour.constraint == Choice(("red", "dark red"))
    assert colour.parse("dark red") is Colour.DARK_RED
    with pytest.raises(ConstraintError, match="none of red, dark red: dark"):
        colour.parse("dark")


def test_a_pattern_is_matched_whole() -> None:
    made = output(re.compile(r"^[A-Z]-\d{4}$"))
    assert made.parse("A-1234") == "A-1234"
    with pytest.raises(ConstraintError, match="does not match"):
        made.parse("A-123")
    values = all_parse(made.constraint, made.parse, seeds=5, least=5)
    assert all(isinstance(value, str) and len(value) == 6 for value in values)


def test_flags_that_can_be_enforced_are() -> None:
    assert fits(output(re.compile("^abc$", re.IGNORECASE)).constraint, "aBC")
    assert fits(output(re.compile("(?i)abc")).constraint, "aBC")
    assert fits(output(re.compile("a.c", re.DOTALL)).constraint, "a\nc")
    assert not fits(output(re.compile("a.c")).constraint, "a\nc")
    for flag in ("MULTILINE", "VERBOSE", "ASCII"):
        with pytest.raises(ConstraintError, match=f"{flag} cannot be enforced"):
            output(re.compile("a", re.RegexFlag[flag]))
    with pytest.raises(ConstraintError, match="pattern of bytes"):
        output(re.compile(b"a"))


def test_a_constraint_is_its_own() -> None:
    for constraint in (Json("{}"), Regex("[0-9]+"), Choice(("1", "2")), Lark('start: "1"')):
        made = output(constraint)
        assert made.constraint == constraint
        assert made.parse("1") == (1 if isinstance(constraint, Json) else "1")


@pytest.mark.parametrize(
    "of",
    [None, 3, 1.5, "int", [int], len, lambda: 1, functools.partial(int), object(), Cat(kind="cat"), b"x"],
)
def test_what_is_no_type_is_refused(of: Any) -> None:
    with pytest.raises(ConstraintError, match="expected a Pydantic model"):
        output(of)


def test_text_needs_no_constraint() -> None:
    with pytest.raises(ConstraintError, match="leave the output's type out"):
        output(str)


def test_reasons_of_a_validator_are_one_line() -> None:
    with pytest.raises(ConstraintError, match=r"^the output is refused: n: Value error, n is odd$"):
        output(Even).parse('{"n": 3}')
    with pytest.raises(ConstraintError, match=r"^the output is refused: .*Invalid JSON"):
        output(Even).parse('{"n": ')
    with pytest.raises(ConstraintError, match=r"and 2 more$"):
        output(list[int]).parse('["a", "b", "c", "d", "e", "f"]')
    with pytest.raises(ConstraintError, match="not JSON"):
        output({}).parse('{"a"')


def test_what_a_set_promises_is_still_refused_of_a_list() -> None:
    unique = Annotated[list[int], Field(json_schema_extra={"uniqueItems": True})]
    with pytest.raises(ConstraintError, match="uniqueItems is not supported"):
        check(output(unique).constraint)


def test_equal_types_give_the_same_output() -> None:
    assert output(list[int]) is output(list[int])
    assert output({"type": "null"}) == output({"type": "null"})
    assert output(True) != output(False)
    with pytest.raises(ConstraintError):
        output(1)  # equal to True, but no schema
    assert output(list[int], "compact") != output(list[int])
    unhashable = Annotated[int, Field(ge=1), ["a note"]]
    assert output(unhashable).parse("3") == 3
    assert hash(output(Cat)) == hash(Output(output(Cat).constraint, output(Cat).parse))


def test_whitespace_is_as_set() -> None:
    assert set(legal_texts(output(tuple[Literal["a"], Literal["b"]], "compact").constraint, 1)) == {
        '["a","b"]'
    }
    assert set(legal_texts(output(tuple[Literal["a"], Literal["b"]]).constraint, 1)) == {'["a", "b"]'}
