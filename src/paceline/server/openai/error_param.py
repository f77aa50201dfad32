"""Which parameter of a request an error of the engine or of the grammar is about."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Final

from paceline.constraints import Choice, Constraint, Json, Lark, Regex, check
from paceline.constraints.tool_grammar import read_tools
from paceline.errors import ConstraintError, PacelineError, PromptTooLong, TextError
from paceline.web.api_errors import ApiError, api_error

_PROMPTS: Final = ("messages", "prompt", "input")
_SHAPING: Final = ("tools", "response_format", "text", "structured_outputs")

Body = Mapping[str, Any]  # as sent
Part = Callable[[], Constraint]
_STRUCTURED: Final[Mapping[str, Callable[[Any], Constraint]]] = {
    "json": Json.of,
    "regex": Regex,
    "grammar": Lark,
    "choice": Choice,
}


def request_error(error: PacelineError, body: Body) -> ApiError:
    """May take as long as compiling the request's grammars."""
    if isinstance(error, ConstraintError):
        return misread(error, body, compiling=True)
    about_prompt = isinstance(error, TextError | PromptTooLong)
    return api_error(error, prompt_param(body) if about_prompt else None)


def prompt_param(body: Body) -> str | None:
    """What a request calls its prompt."""
    return next((name for name in _PROMPTS if body.get(name) is not None), None)


def misread(error: ConstraintError, body: Body, compiling: bool = False) -> ApiError:
    """Tries each part of the request by itself, until one fails alike."""
    for param, part in _parts(body):
        try:
            constraint = part()
            if compiling:
                check(constraint)
        except ConstraintError as problem:
            return _at(param, problem)
    known: str | None = api_error(error).param
    given = [name for name in _SHAPING if body.get(name) is not None]
    return _at(known or (given[0] if len(given) == 1 else None), error)


def _at(param: str | None, error: ConstraintError) -> ApiError:
    named = error if param is None else ConstraintError(f"{param}: {error}")
    return api_error(named, param)


def _parts(body: Body) -> Iterator[tuple[str, Part]]:
    """Where each constraint of a body stands, and how to read it."""
    for i, tool in enumerate(_list(body.get("tools"))):
        yield _tool_place(tool, i), partial(_arguments, tool)
    asked = _mapping(_mapping(body.get("response_format")).get("json_schema"))
    if "schema" in asked:
        yield "response_format.json_schema.schema", partial(Json.of, asked["schema"])
    form = _mapping(_mapping(body.get("text")).get("format"))
    if "schema" in form:
        yield "text.format.schema", partial(Json.of, form["schema"])
    for name, value in _mapping(body.get("structured_outputs")).items():
        if value is not None and name in _STRUCTURED:
            yield f"structured_outputs.{name}", partial(_STRUCTURED[name], value)


def _tool_place(tool: Any, i: int) -> str:
    function = tool.get("function", tool) if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
        return f"tools[{i}]"
    return f"tools[{i}].function.parameters" if "function" in tool else f"tools[{i}].parameters"


def _arguments(tool: Any) -> Constraint:
    (arguments,) = read_tools([tool], "fixed").values()
    return arguments


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
