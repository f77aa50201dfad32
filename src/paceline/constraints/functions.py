"""Python functions as tools: a JSON Schema from the signature and the docstring, arguments from a call."""

import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial, update_wrapper
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Final,
    Generic,
    NotRequired,
    ParamSpec,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
)

from paceline.constraints.json_schema import mapped
from paceline.constraints.pydantic_schema import FORMATS, schema_of
from paceline.constraints.python_types import reasons
from paceline.errors import ConstraintError, short

if TYPE_CHECKING:
    from pydantic import TypeAdapter

P = ParamSpec("P")
R = TypeVar("R")

AnyTool = Mapping[str, Any] | Callable[..., Any]  # OpenAI's object, a function, or a Tool

_FIRST: Final = ("type", "description", "properties", "required")  # in the order of OpenAI's examples
# A date that fits the engine's own pattern and does not exist is refused when the call is read.
_FORMATS: Final = {f"^{FORMATS[name]}$": name for name in ("date", "time", "date-time", "duration")}
_EXPECTED: Final = "a text, number, list or dict, a Literal or Enum, a dataclass or a Pydantic model"
_NAME: Final = re.compile("[A-Za-z0-9_-]+")
_UNNAMED: Final = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class Tool(Generic[P, R]):
    """A function that a model may call. Calling a Tool calls the function.

    Wherever tools are taken, a plain function may stand for `Tool(function)`. Every parameter needs a type
    that JSON can hold: str, int, lists, Optional, Literal, an Enum, a dataclass, a Pydantic model. The model
    may leave out those with a default. Descriptions come from `Annotated[str, "the city"]`, or from the
    docstring (Google's, NumPy's or reST's form). Coroutine functions and bound methods are functions, too.

    name, description: instead of the function's own.

    Attributes: `function`, `name`, `description`; `parameters`, the JSON Schema of the arguments.
    """

    def __init__(
        self, function: Callable[P, R], *, name: str | None = None, description: str | None = None
    ) -> None:
        if not callable(function) or isinstance(function, type):
            raise ConstraintError(f"{short(function)} is no tool: expected a function", "tools")
        found = str(name or getattr(function, "__name__", ""))
        if not _NAME.fullmatch(found):  # of a lambda, a partial or another object
            hint = 'give it one: Tool(function, name="...")'
            raise ConstraintError(f"{short(function)} has no name that a model could use: {hint}", "tools")
        update_wrapper(self, function)
        self.function = function
        self.name: str = found
        text, described = _docstring(function)
        self.description = text if description is None else description
        self._arguments = _adapter(found, function, described)
        self.parameters: dict[str, Any] = _schema(self._arguments)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.function(*args, **kwargs)

    def __repr__(self) -> str:
        return f"Tool({self.name})"

    @property
    def schema(self) -> dict[str, Any]:
        """The object that OpenAI's `tools` lists."""
        described = {"description": self.description} if self.description else {}
        function = {"name": self.name, **described, "parameters": self.parameters}
        return {"type": "function", "function": function}

    def arguments(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """A call's arguments, of the types that the function expects; an error says which do not fit."""
        from pydantic import ValidationError

        try:
            values: dict[str, Any] = self._arguments.validate_json(json.dumps(given))
        except ValidationError as problem:
            raise ConstraintError(f"the arguments of {self.name} do not fit: {reasons(problem)}") from None
        return values


def as_tools(tools: Sequence[AnyTool]) -> list[Mapping[str, Any] | Tool[..., Any]]:
    """Functions become Tools; OpenAI's objects stay as they are."""
    if isinstance(tools, Mapping | str) or not isinstance(tools, Sequence):
        raise ConstraintError(f"{short(tools)} is not usable: expected a list of tools", "tools")
    return [tool if isinstance(tool, Mapping | Tool) else Tool(tool) for tool in tools]


def tool_schemas(tools: Sequence[AnyTool] | None) -> tuple[Mapping[str, Any], ...]:
    """OpenAI's objects of tools that may be functions."""
    return tuple(tool.schema if isinstance(tool, Tool) else tool for tool in as_tools(tools or ()))


def _docstring(function: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    """The description of a function, and that of each parameter."""
    from docstring_parser import ParseError, parse

    text = inspect.getdoc(_underlying(function)) or ""
    try:
        read = parse(text)
    except ParseError:
        return text.strip(), {}
    return (read.description or "").strip(), {
        param.arg_name: " ".join(param.description.split()) for param in read.params if param.description
    }


def _adapter(name: str, function: Callable[..., Any], described: Mapping[str, str]) -> "TypeAdapter[Any]":
    """Of a TypedDict with a key for each parameter; those with a default may be left out."""
    from pydantic import PydanticUserError, TypeAdapter, with_config
    from typing_extensions import TypedDict

    members: dict[str, Any] = {}
    for parameter in _parameters(name, function):
        inner = _described(parameter, described.get(parameter.name, ""))
        try:
            schema_of(TypeAdapter(inner))
        except (PydanticUserError, NameError, TypeError):
            raise ConstraintError(
                f"parameter {parameter.name} of {name} has a type that JSON cannot hold, "
                f"{short(parameter.annotation)}: expected {_EXPECTED}",
                "tools",
            ) from None
        required = parameter.default is inspect.Parameter.empty
        members[parameter.name] = inner if required else NotRequired[inner]
    keys: Any = TypedDict(name, members)  # type: ignore[misc]
    return TypeAdapter(with_config({"extra": "forbid"})(keys))


def _parameters(name: str, function: Callable[..., Any]) -> list[inspect.Parameter]:
    """With their types; an error for what a call by names and JSON cannot express."""
    try:
        parameters = inspect.signature(function).parameters.values()
        hints = get_type_hints(_underlying(function), include_extras=True)
    except (NameError, TypeError, ValueError) as problem:
        hint = "types in quotation marks must be names of its module"
        raise ConstraintError(
            f"the signature of {name} cannot be read ({problem}): {hint}", "tools"
        ) from None
    typed = []
    for parameter in parameters:
        if parameter.kind in _UNNAMED:
            hint = "give each argument a name and a type, or take one list or dict"
            raise ConstraintError(f"{name} takes {parameter}, which no schema can describe: {hint}", "tools")
        if parameter.kind is inspect.Parameter.POSITIONAL_ONLY:
            hint = "a model gives arguments by name: take the / out of its signature, or wrap it"
            raise ConstraintError(f"parameter {parameter.name} of {name} is positional-only: {hint}", "tools")
        if parameter.name not in hints:
            hint = f"write {parameter.name}: str, or what it is"
            if parameter.name == "self":
                hint = f"give the method of an object, as in shop.{name}"
            raise ConstraintError(f"parameter {parameter.name} of {name} has no type: {hint}", "tools")
        typed.append(parameter.replace(annotation=hints[parameter.name]))
    return typed


def _underlying(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with the annotations: of a partial, a decorated function, an object with __call__."""
    if isinstance(function, partial):
        return _underlying(function.func)
    function = inspect.unwrap(function)
    return function if inspect.isroutine(function) else type(function).__call__


def _described(parameter: inspect.Parameter, description: str) -> Any:
    """The type with its description and default, as Pydantic reads them: of two Fields, the later counts."""
    from pydantic import Field

    inner, *notes = [parameter.annotation]
    if get_origin(parameter.annotation) is Annotated:
        inner, *notes = get_args(parameter.annotation)
    description = " ".join(note for note in notes if isinstance(note, str)) or description
    field = Field(description=description or None, json_schema_extra=_default(parameter))
    return Annotated[(inner, field, *notes)]


def _default(parameter: inspect.Parameter) -> dict[str, Any]:
    """The default as JSON, where it has a form there."""
    from pydantic import TypeAdapter
    from pydantic_core import PydanticSerializationError

    if parameter.default is inspect.Parameter.empty or parameter.default is None:
        return {}
    try:
        adapter: TypeAdapter[Any] = TypeAdapter(parameter.annotation)
        return {"default": adapter.dump_python(parameter.default, mode="json", warnings="error")}
    except (PydanticSerializationError, TypeError, ValueError):
        return {}


def _schema(arguments: "TypeAdapter[Any]") -> dict[str, Any]:
    schema: dict[str, Any] = mapped(schema_of(arguments), _short)
    return schema


def _short(schema: dict[str, Any]) -> dict[str, Any]:
    """As people write it, since the model reads it: without titles, formats by name instead of patterns."""
    order = sorted(schema, key=lambda key: _FIRST.index(key) if key in _FIRST else len(_FIRST))
    written = {key: schema[key] for key in order if key != "title"}
    format = _FORMATS.get(str(schema.get("pattern")))
    return {"type": "string", "format": format, **_without(written, "pattern")} if format else written


def _without(schema: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in schema.items() if key not in keys}
