"""Chat templates: the model's own jinja2 text, run in a sandbox."""

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from paceline.errors import TextError
from paceline.text.tool_calls.parse import text_of, tool_prompt, without_tool_roles

if TYPE_CHECKING:
    from jinja2 import Environment, Template

Message = Mapping[str, Any]
Tool = Mapping[str, Any]

_ASKS_FOR_NONE: Final = re.compile(r"""\bcontent['"\]]*\s+is\s+(?:not\s+)?none\b""", re.IGNORECASE)
TOOL_TEMPLATE: Final = "tool_use"  # the name some models give to a second template, for tools


class ChatTemplate:
    """Renders conversations with a model's templates."""

    def __init__(self, templates: Mapping[str, str], names: Mapping[str, str]) -> None:
        self._templates = templates
        self._names = names  # bos_token, eos_token ...

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] | None,
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
    ) -> str:
        from jinja2 import TemplateError

        source = self._choose(tools)
        template = compiled(source)
        chat = [_with_calls_as_data(_message(m, source), source) for m in _plain(list(messages))]
        offered = None if tools is None else _plain(list(tools))
        if (offered or _used_tools(chat)) and not mentions_tools(source):
            chat = without_tool_roles(chat, tool_prompt(offered) if offered else "")
        names = {**self._names, **_plain(dict(variables))}
        try:
            return template.render(
                messages=chat,
                tools=offered,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **names,
            )
        except (
            TemplateError,
            TypeError,
            ValueError,
            ArithmeticError,
            LookupError,
            RecursionError,
        ) as problem:
            raise TextError(f"the chat template refused these messages: {_one_line(problem)}") from problem

    def reads(self, variable: str) -> bool:
        """Whether any of the templates asks for this variable."""
        return any(variable in _variables(source) for source in self._templates.values())

    def _choose(self, tools: Sequence[Tool] | None) -> str:
        if tools and TOOL_TEMPLATE in self._templates:
            return self._templates[TOOL_TEMPLATE]
        if "default" not in self._templates:
            raise TextError("the model has no chat template: use a plain prompt, or a model tuned for chat")
        return self._templates["default"]


def mentions_tools(source: str) -> bool:
    return "tools" in _variables(source)


@lru_cache(maxsize=32)
def _variables(source: str) -> frozenset[str]:
    """Those that a template reads and does not set itself."""
    from jinja2 import meta

    return frozenset(meta.find_undeclared_variables(_environment().parse(source)))


@lru_cache(maxsize=32)
def compiled(source: str) -> "Template":
    from jinja2 import TemplateSyntaxError

    try:
        return _environment().from_string(source)
    except TemplateSyntaxError as problem:
        raise TextError(f"the chat template cannot be read: {_one_line(problem)}") from problem


@lru_cache(maxsize=1)
def _environment() -> "Environment":
    """The names and filters that templates written for transformers expect."""
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """{% generation %} marks the assistant's own text for training; here it is only a block."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike jinja2's own filter, does not escape for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _used_tools(chat: Sequence[dict[str, Any]]) -> bool:
    return any(m["role"] == "tool" or m.get("tool_calls") for m in chat)


def _message(message: Any, source: str) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise TextError("not a message: expected a mapping with role and content")
    if message["role"] == "developer" and "developer" not in source:
        message = {**message, "role": "system"}  # its newer name, which few templates know
    content = message.get("content")
    return {**message, "content": text_of(content)} if isinstance(content, list) else message


def _with_calls_as_data(message: dict[str, Any], source: str) -> dict[str, Any]:
    """A message with calls as templates expect it, not as clients send it.

    Arguments are objects: a template would encode JSON text a second time. Missing content is empty text, for
    a template would write None, but for a template that knows messages with calls by it.
    """
    calls = message.get("tool_calls")
    if not isinstance(calls, list) or not calls:
        return message
    message = {**message, "tool_calls": [_with_arguments_as_object(call) for call in calls]}
    if message.get("content") is None:
        message["content"] = None if _ASKS_FOR_NONE.search(source) else ""
    return message


def _with_arguments_as_object(call: Any) -> Any:
    if not isinstance(call, dict):
        return call
    if isinstance(call.get("function"), dict):
        return {**call, "function": _with_arguments_as_object(call["function"])}
    if not isinstance(call.get("arguments"), str):
        return call
    try:
        arguments = json.loads(call["arguments"])
    except (ValueError, RecursionError):
        return call
    return {**call, "arguments": arguments} if isinstance(arguments, dict) else call


def _plain(value: Any) -> Any:
    """A copy made of JSON types only, so that a template can reach no live object."""
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError) as problem:
        raise TextError(f"messages and tools must be plain JSON data: {_one_line(problem)}") from None


def _one_line(problem: Exception, most: int = 160) -> str:
    """A template may put what it was given into its refusal, however long that is."""
    line = " ".join(str(problem)[: 4 * most].split()) or type(problem).__name__
    return line if len(line) <= most else f"{line[:most]}..."
