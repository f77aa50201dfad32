"""A template's every legal text is read back, its fixed text is certain, and its holes are what they say."""

import datetime
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field

from paceline.constraints import Choice, Compiler, Json, Lark, Regex, StructuralTag, Template, output
from paceline.constraints.compiler import check
from paceline.constraints.text_matcher import fits
from paceline.errors import ConstraintError
from paceline.text import Tokenizer
from support.legal_walks import CLOSING, byte_cursor, legal_texts, walked

ORDER = Template(
    "Dear {name},\nyour order {id} of {n} items is {state}.",
    name=Regex("[A-Z][a-z]+"),
    id=re.compile(r"[A-Z]-\d{4}"),
    n=int,
    state=Literal["shipped", "late"],
)
FILLED = "Dear Bob,\nyour order A-1234 of 12 items is late."


class Item(BaseModel):
    name: str
    price: float


@dataclass(frozen=True)
class Case:
    template: Template
    text: str
    values: dict[str, Any]


CASES = {
    "order": Case(ORDER, FILLED, {"name": "Bob", "id": "A-1234", "n": 12, "state": "late"}),
    "only a hole": Case(Template("{n}", n=int), "-7", {"n": -7}),
    "free text": Case(
        Template("Name: {name}; age: {age}\n{rest}", name=str, age=int, rest=str),
        "Name: Ann \u00e9 {}\"'; age: 3\nso: it; is",
        {"name": "Ann \u00e9 {}\"'", "age": 3, "rest": "so: it; is"},
    ),
    "odd characters follow free text": Case(
        Template("{a}]{b}^{c}\\{d}-{e}/{f}\u00e9", a=str, b=str, c=str, d=str, e=str, f=str),
        "a^]b]^c-\\d/-e\u00e9/f\u00e8\u00e9",
        {"a": "a^", "b": "b]", "c": "c-", "d": "d/", "e": "e\u00e9", "f": "f\u00e8"},
    ),
    "braces": Case(Template("{{{n}}} {{}}", n=int), "{3} {}", {"n": 3}),
    "a hole that may hold what follows": Case(Template("{w}abc", w=Regex("[a-z]*")), "abcabc", {"w": "abc"}),
    "two ways to read it": Case(
        Template("{a}, {b}", a=Regex("[a-z, ]+"), b=Regex("[a-z, ]+")), "x, y, z", {"a": "x", "b": "y, z"}
    ),
    "numbers before any text": Case(
        Template("{x}em {y}. {z}0 {w}e5", x=float, y=float, z=int, w=float),
        "1.5em 2. 120 7e5",
        {"x": 1.5, "y": 2.0, "z": 12, "w": 7.0},
    ),
    "JSON": Case(
        Template('items: {items} and {day}, "{ok}"', items=list[Item], day=datetime.date, ok=bool),
        'items: [{"name": "a] and \\"b", "price": 2}] and "2024-01-02", "true"',
        {"items": [Item(name='a] and "b', price=2)], "day": datetime.date(2024, 1, 2), "ok": True},
    ),
    "numbers as JSON": Case(
        Template("{a}.5 {b}. {c}", a=Json('{"type": "integer"}'), b={"type": "number"}, c=Json("{}")),
        '12.5 1.5. "x"',
        {"a": 12, "b": 1.5, "c": "x"},
    ),
    "any text before JSON": Case(
        Template("{why} so: {n}!", why=Regex(".*"), n=Annotated[int, Field(ge=0, le=100)]),
        "because so: 42!",
        {"why": "because", "n": 42},
    ),
    "a grammar": Case(
        Template("<{sum}>", sum=Lark('start: N ("+" N)*\nN: /[0-9]+/')), "<1+22+3>", {"sum": "1+22+3"}
    ),
    "choices that begin alike": Case(
        Template("{a}bc{b}", a=Choice(("a", "ab")), b=Choice(("x", "xy"))), "abbcxy", {"a": "ab", "b": "xy"}
    ),
    "a template in it": Case(
        Template("[{head}] {n}", head=Template("{who}@{where}", who=str, where=str), n=int),
        "[ann@home] 3",
        {"head": {"who": "ann", "where": "home"}, "n": 3},
    ),
}


def phrases(template: Template) -> list[str]:
    return [piece for piece in template.pieces if isinstance(piece, str)] + list(CLOSING)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_filled_template_is_allowed_and_read_back(case: Case) -> None:
    cursor = byte_cursor(case.template)
    assert all(cursor.advance(byte) for byte in case.text.encode())
    assert fits(case.template, case.text)
    assert case.template.parse(case.text) == case.values


@pytest.mark.sampled(4)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_every_legal_text_is_read_back(case: Case) -> None:
    texts = list(legal_texts(case.template, 15, 200, phrases(case.template)))
    assert len(texts) >= 8
    for text in texts:
        case.template.parse(text)


@pytest.mark.parametrize("text", ["", "Dear bob", FILLED[:-1], FILLED + " ", FILLED.replace("A-", "a-")])
def test_what_does_not_fit_is_neither_allowed_nor_read(text: str) -> None:
    assert not fits(ORDER, text)
    with pytest.raises(ConstraintError, match="does not fit the template"):
        ORDER.parse(text)


def test_the_error_says_from_where_on() -> None:
    with pytest.raises(ConstraintError, match=r"from here on: 'twelve items"):
        ORDER.parse(FILLED.replace("12 ", "twelve "))
    past = Template("{day}!", day=Annotated[datetime.date, Field(gt=datetime.date(2024, 1, 1))])
    with pytest.raises(ConstraintError, match=r"^day: the output is refused: Input should be greater"):
        past.parse('"1999-01-01"!')


def test_a_hole_never_runs_over_the_text_after_it() -> None:
    """Whatever is written, the fixed text can come next, and then only the next hole."""
    for text in ("", "abcx", "a so, so;", " so"):
        cursor = byte_cursor(Template("{why} so: {n}", why=Regex(".*"), n=list[int]))
        assert all(cursor.advance(byte) for byte in (text + " so: [1]").encode())
        assert cursor.finished


def test_reading_takes_no_time_that_doubles_with_each_hole() -> None:
    holes = {f"h{i}": Regex("[a, ]*") for i in range(12)}
    template = Template(", ".join(f"{{{name}}}" for name in holes) + "!", **holes)
    with pytest.raises(ConstraintError):
        template.parse("a, " * 40 + "?")


@pytest.mark.parametrize(
    ("text", "holes", "reason"),
    [
        ("{}", {}, r"\{\} is not usable"),
        ("{0}", {"0": int}, r"\{0\} is not usable"),
        ("{n:d}", {"n": int}, r"\{n:d\} is not usable"),
        ("{n!r}", {"n": int}, r"\{n!r\} is not usable"),
        ("{n.x}", {"n": int}, r"\{n.x\} is not usable"),
        ("{n", {"n": int}, "cannot be read"),
        ("n}", {"n": int}, "cannot be read"),
        ("{n}", {}, "the hole n has no constraint"),
        ("{n}", {"n": int, "m": int, "k": int}, "no hole in the template is named k, m"),
        ("{n} {n}", {"n": int}, "the hole n is there twice"),
        ("{n}{m}", {"n": int, "m": int}, "the holes n and m touch"),
        ("{n}{m}", {"n": int, "m": Template("{k}!", k=int)}, r"the holes n and m\.k touch"),
        ("{n}0", {"n": {"type": "integer"}}, "a digit follows the hole n"),
        ("{n}", {"n": 3}, "the hole n: 3 cannot be an output"),
        ("text", {}, "no holes"),
        ("", {}, "no holes"),
    ],
)
def test_what_is_no_template_is_refused(text: str, holes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConstraintError, match=reason):
        Template(text, **holes)


def test_a_hole_may_have_any_name() -> None:
    assert Template("{self} {text}", self=int, text=int).parse("1 2") == {"self": 1, "text": 2}


def test_a_template_is_a_key() -> None:
    def made() -> Template:
        return Template("{a} {b} {c}", a=Item, b=str, c={"type": "integer"})

    assert made() == made()
    assert hash(made()) == hash(made())
    assert made() != Template("{a} {b} {c}", a=Item, b=str, c={"type": "number"})
    assert len({StructuralTag("x", made()), StructuralTag("x", made())}) == 1
    with pytest.raises(AttributeError):
        made().text = ""  # type: ignore[misc]


def test_a_template_is_an_output() -> None:
    made = output(ORDER)
    assert made.constraint is ORDER
    assert made.parse(FILLED)["n"] == 12


def test_an_unenforceable_hole_is_reported() -> None:
    with pytest.raises(ConstraintError, match="propertyNames is not supported"):
        check(Template("{a}", a={"type": "object", "propertyNames": {"maxLength": 3}}))


@pytest.fixture(scope="module")
def tokenizer(smollm2_path: Path) -> Tokenizer:
    return Tokenizer.load(smollm2_path)


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> Compiler:
    return Compiler(tokenizer, tokenizer.vocab_size)


@pytest.mark.model
def test_fixed_text_is_certain(compiler: Compiler, tokenizer: Tokenizer) -> None:
    """As soon as it has begun, or where the hole before it can only end."""
    cursor = compiler.cursor(ORDER)
    certain = {"": tokenizer.decode(cursor.canonical())}
    text = ""
    for token in tokenizer.encode(FILLED, special=False):
        assert cursor.advance(token)
        text += tokenizer.decode([token])
        certain[text] = tokenizer.decode(cursor.canonical())
        assert certain[text].startswith(tokenizer.decode(cursor.forced()))
    assert cursor.finished
    assert certain[""] == "Dear "
    assert certain["Dear Bob"] == ""
    assert certain["Dear Bob,"] == "\nyour order "
    assert certain["Dear Bob,\nyour order A"] == "-"
    assert certain["Dear Bob,\nyour order A-1234"] == " of "
    assert certain["Dear Bob,\nyour order A-1234 of 12 items"] == " is "
    assert certain[FILLED[:-1]] == "."


@pytest.mark.model
def test_what_reads_like_a_mark_of_the_model_is_text(compiler: Compiler, tokenizer: Tokenizer) -> None:
    template = Template("<filename>{q}<|im_end|> {n}", q=str, n=int)
    text = "<filename>why?<|im_end|> 3"
    cursor = compiler.cursor(template)
    for token in tokenizer.encode(text, special=False):
        assert token not in tokenizer.added
        assert cursor.advance(token)
    assert template.parse(text) == {"q": "why?", "n": 3}


@pytest.mark.model
@pytest.mark.parametrize("name", ["order", "free text", "JSON", "any text before JSON", "a template in it"])
def test_every_legal_walk_is_read_back(compiler: Compiler, tokenizer: Tokenizer, name: str) -> None:
    template = CASES[name].template
    complete = 0
    spelled = [tokenizer.encode(phrase) for phrase in phrases(template)]
    for seed in range(8):
        cursor = compiler.cursor(template)
        tokens = walked(cursor, tokenizer.eos_ids, seed, 100, spelled, tokenizer.vocab_size)
        if tokens is not None:
            template.parse(tokenizer.decode(tokens))
            complete += 1
    assert complete >= 4
