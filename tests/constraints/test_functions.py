"""Functions as tools: their schemas, what cannot be one, and the arguments of calls."""

import datetime
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import partial, wraps
from typing import Annotated, Any, Literal, Optional

import pytest
from pydantic import BaseModel, Field

from paceline.constraints import OutputSpec, Tool, check, tool_schemas
from paceline.errors import ConstraintError
from paceline.text import FORMATS


class Unit(Enum):
    CELSIUS = "celsius"
    FAHRENHEIT = "fahrenheit"


@dataclass
class Place:
    city: str
    country: str = "NO"


class Window(BaseModel):
    days: int = Field(ge=1, le=14)


def forecast(
    place: Place,
    when: datetime.date,
    unit: Unit = Unit.CELSIUS,
    window: Optional[Window] = None,  # noqa: UP045
    kind: Literal["short", "long"] = "short",
    tags: Annotated[set[str], "words to look for"] = frozenset(),  # type: ignore[assignment]
    schema: str = "",
    _private: Annotated[int, "a note", Field(description="more than a note", ge=0)] = 0,
) -> str:
    """The weather of some days.

    It is not reliable.

    Args:
        place: where it is asked for,
            by name
        unit: of the temperature
        tags: hidden by the annotation

    Returns:
        str: a sentence
    """
    return f"{place} {when} {unit} {window} {kind} {tags} {schema} {_private}"


FORECAST = Tool(forecast)


def properties(tool: Tool[..., Any]) -> dict[str, Any]:
    found: dict[str, Any] = tool.parameters["properties"]
    return found


def test_a_signature_and_its_docstring_become_a_schema() -> None:
    function = FORECAST.schema["function"]
    assert FORECAST.schema["type"] == "function"
    assert (function["name"], function["description"]) == (
        "forecast",
        "The weather of some days.\n\nIt is not reliable.",
    )
    parameters = function["parameters"]
    assert parameters["required"] == ["place", "when"]
    assert parameters["additionalProperties"] is False
    found = properties(FORECAST)
    assert list(found) == ["place", "when", "unit", "window", "kind", "tags", "schema", "_private"]
    assert found["place"] == {"description": "where it is asked for, by name", "$ref": "#/$defs/Place"}
    assert found["when"] == {"type": "string", "format": "date"}
    assert found["unit"]["default"] == "celsius"
    assert found["window"] == {"anyOf": [{"$ref": "#/$defs/Window"}, {"type": "null"}]}
    assert found["kind"] == {"type": "string", "default": "short", "enum": ["short", "long"]}
    assert found["tags"] == {  # without its default, which is no set
        "type": "array",
        "description": "words to look for",
        "items": {"type": "string"},
    }
    assert found["_private"] == {
        "type": "integer",
        "description": "more than a note",
        "default": 0,
        "minimum": 0,
    }
    assert '"title"' not in json.dumps(FORECAST.schema)


@pytest.mark.parametrize("form", FORMATS)
def test_the_schema_can_be_enforced(form: str) -> None:
    constraint = OutputSpec((FORECAST.schema,), "required").constraint(FORMATS[form])
    assert constraint is not None
    check(constraint)  # type: ignore[arg-type]


def test_arguments_become_what_the_function_expects() -> None:
    given = {"place": {"city": "Oslo"}, "when": "2024-02-29", "unit": "fahrenheit", "window": {"days": 3}}
    values = FORECAST.arguments({**given, "tags": ["rain", "rain"]})
    assert values == {
        "place": Place("Oslo"),
        "when": datetime.date(2024, 2, 29),
        "unit": Unit.FAHRENHEIT,
        "window": Window(days=3),
        "tags": {"rain"},
    }
    assert "Unit.FAHRENHEIT" in FORECAST(**values)  # the defaults of the others are the function's own


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"when": "2024-01-01"}, "place: Field required"),
        ({"place": {"city": "Oslo"}, "when": "2023-02-29"}, "when: Input should be a valid date"),
        ({"place": {"city": "Oslo"}, "when": "2024-01-01", "window": {"days": 15}}, "window.days: "),
        ({"place": {"city": "Oslo"}, "when": "2024-01-01", "wind": 1}, "wind: Extra inputs"),
    ],
)
def test_arguments_that_do_not_fit_are_named(given: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConstraintError, match=f"the arguments of forecast do not fit: {reason}"):
        FORECAST.arguments(given)


def numpy_style(city: str) -> str:
    """Looks up a city.

    Parameters
    ----------
    city : str
        The city's name.

    Returns
    -------
    str
        Its weather.
    """
    return city


def rest_style(city: str) -> str:
    """Looks up a city.

    :param city: The city's name.
    :returns: Its weather.
    """
    return city


def google_style(city: str) -> str:
    """Looks up a city.

    Args:
        city (str): The city's name.
    """
    return city


@pytest.mark.parametrize("function", [numpy_style, rest_style, google_style])
def test_docstrings_of_three_forms_are_read(function: Callable[..., Any]) -> None:
    tool = Tool(function)
    assert tool.description == "Looks up a city."
    assert properties(tool) == {"city": {"type": "string", "description": "The city's name."}}


class Shop:
    def find(self, order_id: "str", quantity: "list[Place] | None" = None) -> str:
        """Finds an order."""
        return order_id

    async def __call__(self, item: str) -> str:
        """Sells an item."""
        return item

    @staticmethod
    def price(item: str) -> float:
        return len(item)


def logged(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def logging(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return logging


@pytest.mark.parametrize(
    ("tool", "name", "description", "names"),
    [
        (Tool(Shop().find), "find", "Finds an order.", ["order_id", "quantity"]),
        (Tool(Shop.price), "price", "", ["item"]),
        (Tool(Shop(), name="sell"), "sell", "Sells an item.", ["item"]),
        (Tool(partial(forecast, Place("Oslo")), name="oslo", description="Oslo's."), "oslo", "Oslo's.", None),
        (Tool(logged(numpy_style)), "numpy_style", "Looks up a city.", ["city"]),
    ],
)
def test_whatever_can_be_called_is_a_function(
    tool: Tool[..., Any], name: str, description: str, names: list[str] | None
) -> None:
    assert (tool.name, tool.description) == (name, description)
    if names is None:
        assert "place" not in properties(tool)
    else:
        assert list(properties(tool)) == names


def test_a_tool_without_parameters_takes_none() -> None:
    def now() -> str:
        return "now"

    tool = Tool(now)
    assert tool.parameters == {"type": "object", "properties": {}, "additionalProperties": False}
    assert tool.arguments({}) == {}
    assert "description" not in tool.schema["function"]


def several(*cities: str) -> None: ...
def keywords(**options: int) -> None: ...
def untyped(city, days: int) -> None: ...  # type: ignore[no-untyped-def]
def unknown(city: "Nowhere") -> None: ...  # type: ignore[name-defined] # noqa: F821


class Opaque: ...


def opaque(city: Opaque) -> None: ...


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (several, r"several takes \*cities: str, which no schema can describe: give each argument a name"),
        (keywords, r"keywords takes \*\*options: int, which no schema"),
        (untyped, "parameter city of untyped has no type: write city: str"),
        (unknown, "the signature of unknown cannot be read .*'Nowhere' is not defined"),
        (opaque, "parameter city of opaque has a type that JSON cannot hold, .*Opaque.*: expected a text"),
        (Shop.find, r"parameter self of find has no type: give the method of an object, as in shop\.find"),
        (math.sqrt, "parameter x of sqrt is positional-only: .*wrap it"),
        (lambda: 1, r'no name that a model could use: give it one: Tool\(function, name="..."\)'),
        (Shop(), "no name that a model could use"),
        (Shop, "is no tool: expected a function"),
        ("forecast", "is no tool: expected a function"),
    ],
)
def test_what_cannot_be_a_tool_is_refused_with_a_reason(given: Any, reason: str) -> None:
    with pytest.raises(ConstraintError, match=reason) as caught:
        tool_schemas([given])
    assert caught.value.param == "tools"


def test_functions_and_objects_of_openai_may_be_mixed() -> None:
    plain = {"type": "function", "function": {"name": "f"}}
    assert tool_schemas([plain, numpy_style, FORECAST]) == (
        plain,
        Tool(numpy_style).schema,
        FORECAST.schema,
    )
    assert tool_schemas(None) == ()
    with pytest.raises(ConstraintError, match="expected a list of tools"):
        tool_schemas(numpy_style)  # type: ignore[arg-type]
