"""Chat templates: the model's own jinja2 template, rendered in a sandbox as transformers renders it."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from paceline.errors import SettingError, TextError, one_line
from paceline.text.tool_calls.formats import SMOLLM2, ToolCall, render_calls

if TYPE_CHECKING:
    from jinja2 import Environment, Template

Message = Mapping[str, Any]
Prompt = str | Sequence[int] | Sequence[Message]  # plain text, its tokens, or chat messages
Tool = Mapping[str, Any]

_ASKS_FOR_NONE: Final = re.compile(r"""\bcontent['"\]]*\s+is\s+(?:not\s+)?none\b""", re.IGNORECASE)
MAX_GENERATION_PROMPTS: Final = 256  # cached for one template
_OPEN_END: Final = "\ue000the text goes on here\ue000"  # stands at the end of a message that is continued,
_BLANK: Final = " "  # before this, which only a template that trims messages takes away
MAX_CACHED_VARIABLES: Final = 1024  # characters of JSON: longer ones, which a client may send, are not cached
_PROBE_TOOL: Final = {
    "type": "function",
    "function": {"name": "f", "description": "f", "parameters": {"type": "object", "properties": {}}},
}
_USER: Final = {"role": "user", "content": "x"}
_CALL: Final = {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": "{}"}}
_PROBES: Final[Mapping[str, Sequence[Message]]] = {  # by the role of the last message
    "user": [_USER],
    "system": [{"role": "system", "content": "x"}],
    "developer": [{"role": "developer", "content": "x"}],
    "assistant": [_USER, {"role": "assistant", "content": "x"}],
    "tool": [
        _USER,
        {"role": "assistant", "content": "", "tool_calls": [_CALL]},
        {"role": "tool", "tool_call_id": "call00000", "name": "f", "content": "x"},
    ],
}
_MARKUP: Final = re.compile(r"\{[{%]")
_TEMPLATE_EXPECTED: Final = "a Jinja template, or the name of a file that holds one"
TOOL_TEMPLATE: Final = "tool_use"  # the name some models give to a second template, for tools

# The SmolLM2 family's own tool prompt, shortened. The templates of its smaller models know no tools.
_TOOL_PROMPT: Final = """\
You are an expert in composing functions. You are given a question and a set of possible functions.
Based on the question, you will need to make one or more function/tool calls to achieve the purpose.
If none of the functions can be used, point it out.

You have access to the following tools:
<tools>%s</tools>

The output MUST strictly adhere to the following format, and NO other text MUST be included.
Please make sure the parameter type is correct. If no function call is needed, use an empty list '[]'.
<tool_call>[
{"name": "func_name1", "arguments": {"argument1": "value1", "argument2": "value2"}}
]</tool_call>"""


class ChatTemplate:
    """Renders conversations with a model's templates."""

    def __init__(self, templates: Mapping[str, str], names: Mapping[str, str]) -> None:
        self._templates = templates
        self._names = names  # bos_token, eos_token ...
        self._generation_prompts: dict[tuple[str, bool, str], str] = {}

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
            raise TextError(f"the chat template refused these messages: {one_line(problem)}") from problem

    def render_open(
        self, messages: Sequence[Message], tools: Sequence[Tool] | None, variables: Mapping[str, Any]
    ) -> str:
        """The conversation up to the last character of its final message, which the model continues.

        As `continue_final_message` of transformers: the message is rendered with a mark at its end, and all
        that the template writes from the mark on is cut off. Where the template trims messages, so is this.
        """
        *earlier, final = messages
        content = final.get("content")
        text = content_text(content) if isinstance(content, list) else content
        if final.get("tool_calls") or not isinstance(text, str):
            raise TextError("the final message cannot be continued: expected one with text and without calls")
        chat = [*earlier, {**final, "content": text + _OPEN_END + _BLANK}]
        begin, *rest = self.render(chat, tools, False, variables).split(_OPEN_END)
        if len(rest) != 1:
            raise TextError("the final message cannot be continued: the chat template changes its text")
        return begin if rest[0].startswith(_BLANK) else begin.rstrip()

    def continuations(
        self, messages: Sequence[Message], tools: Sequence[Tool] | None, variables: Mapping[str, Any]
    ) -> list[str]:
        """The conversation with each kind of message that may come next, each with two contents.

        Their common beginning holds whatever comes next: templates close a turn, merge results of tools, or
        drop reasoning, depending on the message that follows. A kind that the template refuses is left out.
        """
        rendered: dict[str, None] = {}  # in order
        refusal: TextError | None = None
        for more in _continuations(messages):
            try:
                rendered[self.render([*messages, *more], tools, not more, variables)] = None
            except TextError as error:
                refusal = refusal or error
        if not rendered and refusal is not None:
            raise refusal
        return list(rendered)

    def generation_prompt(
        self,
        rendered: str,
        messages: Sequence[Message],
        tools: Sequence[Tool] | None,
        variables: Mapping[str, Any],
    ) -> str:
        """The text that `add_generation_prompt` adds to this conversation.

        It is measured once on a fixed conversation that ends with the same role, and cached: it depends on
        the template and its variables, never on a user's text. A rendered text that ends differently is
        rendered a second time, without the flag.
        """
        last = messages[-1].get("role") if messages and isinstance(messages[-1], Mapping) else None
        usual = self._usual_prompt(
            last if isinstance(last, str) and last in _PROBES else "user", tools, variables
        )
        if usual and rendered.endswith(usual):
            return usual
        return _added(self.render(messages, tools, False, variables), rendered)

    def _usual_prompt(self, role: str, tools: Sequence[Tool] | None, variables: Mapping[str, Any]) -> str:
        """The cached prompt after a message of this role; empty where only the conversation can tell."""
        read = _variables(self._choose(tools))
        written = json.dumps(_plain({k: v for k, v in variables.items() if k in read}), sort_keys=True)
        if len(written) > MAX_CACHED_VARIABLES:
            return ""
        key = role, bool(tools), written
        usual = self._generation_prompts.get(key)
        if usual is None:  # a local, since another thread may clear the cache
            usual = self._probe(role, bool(tools), variables)
            if len(self._generation_prompts) >= MAX_GENERATION_PROMPTS:
                self._generation_prompts.clear()
            self._generation_prompts[key] = usual
        return usual

    def _probe(self, role: str, with_tools: bool, variables: Mapping[str, Any]) -> str:
        """Empty: the template refuses the probe, or adds nothing to it."""
        tools = [_PROBE_TOOL] if with_tools else None
        try:
            return _added(*(self.render(_PROBES[role], tools, add, variables) for add in (False, True)))
        except TextError:
            return ""

    def reads(self, variable: str) -> bool:
        """True if one of the templates reads this variable."""
        return any(variable in _variables(source) for source in self._templates.values())

    def _choose(self, tools: Sequence[Tool] | None) -> str:
        if tools and TOOL_TEMPLATE in self._templates:
            return self._templates[TOOL_TEMPLATE]
        if "default" not in self._templates:
            raise TextError("the model has no chat template: use a plain prompt, or a model tuned for chat")
        return self._templates["default"]


def _continuations(messages: Sequence[Message]) -> Iterator[list[Message]]:
    """A user's message; an answer to a user or a result, written or still to write; a result of a call."""
    last: Message = messages[-1] if messages and isinstance(messages[-1], Mapping) else {}
    answered = last.get("role") in ("user", "tool")
    calls = last.get("tool_calls")
    result = {"tool_call_id": last.get("tool_call_id") or _last_id(calls) or "call00000", "name": "f"}
    for content in ("a", "b"):
        yield [{"role": "user", "content": content}]
        if answered:
            yield [{"role": "assistant", "content": content}]
        if calls or last.get("role") == "tool":
            yield [{"role": "tool", "content": content, **result}]
    if answered:
        yield []


def _last_id(calls: Any) -> Any:
    return calls[-1].get("id") if isinstance(calls, list) and calls and isinstance(calls[-1], dict) else None


def read_chat_template(given: str) -> str:
    """A template's source, from a file's name or from the source itself, checked."""
    source = given
    if not _MARKUP.search(given):
        try:
            source = Path(given).expanduser().read_text(encoding="utf-8")
        except (OSError, ValueError):
            raise SettingError(
                "chat_template", given, _TEMPLATE_EXPECTED, "no such file can be read"
            ) from None
    try:
        compiled(source)
    except TextError as error:
        raise SettingError("chat_template", given, _TEMPLATE_EXPECTED, str(error)) from None
    if not _MARKUP.search(source):
        raise SettingError("chat_template", given, _TEMPLATE_EXPECTED, "it reads no messages")
    return source


def _added(without: str, rendered: str) -> str:
    return rendered[len(without) :] if rendered.startswith(without) else ""


def mentions_tools(source: str) -> bool:
    return "tools" in _variables(source)


@lru_cache(maxsize=32)
def _variables(source: str) -> frozenset[str]:
    """Variables that a template reads and does not set itself."""
    from jinja2 import meta

    return frozenset(meta.find_undeclared_variables(_environment().parse(source)))


@lru_cache(maxsize=32)
def compiled(source: str) -> "Template":
    from jinja2 import TemplateSyntaxError

    try:
        return _environment().from_string(source)
    except TemplateSyntaxError as problem:
        raise TextError(f"the chat template cannot be read: {one_line(problem)}") from problem


@lru_cache(maxsize=1)
def _environment() -> "Environment":
    """With the names and filters of transformers' environment."""
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
        message = {**message, "role": "system"}  # the newer name of the role, which few templates know
    content = message.get("content")
    if isinstance(content, list):
        content = content_text(content)
    if message["role"] == "assistant" and content is None:  # a refusal is what the assistant said
        content = message.get("refusal") or (None if message.get("tool_calls") else "")
    # Clients send back their own objects, with null for every field that is not set: a template may ask
    # whether a message has calls by the mere name.
    given = {name: value for name, value in message.items() if value is not None and name != "refusal"}
    return _with_thinking({**given, "content": content}, source)


def _with_thinking(message: dict[str, Any], source: str) -> dict[str, Any]:
    """The reasoning of an earlier answer by the name that gpt-oss's template has for it.

    Beside calls, that template takes one text, which it writes as reasoning.
    """
    thought = message.get("reasoning_content")
    if not thought or "thinking" in message or "message.thinking" not in source:
        return message
    if message.get("tool_calls") and message["content"]:
        return {**message, "thinking": f"{thought}\n\n{message['content']}", "content": None}
    return {**message, "thinking": thought}


def _with_calls_as_data(message: dict[str, Any], source: str) -> dict[str, Any]:
    """A message with tool calls as templates expect it, not as clients send it.

    Arguments become objects: a template would encode JSON text a second time. Missing content becomes empty
    text, since a template would write None, unless the template itself checks for None.
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
    """A copy of JSON types only: a template must not reach live objects."""
    try:
        return _copy(value)
    except (TypeError, ValueError, RecursionError) as problem:
        raise TextError(f"messages and tools must be plain JSON data: {one_line(problem)}") from None


def _copy(value: Any) -> Any:
    """Texts are not copied, which may be long."""
    if type(value) in (str, int, float, bool, type(None)):
        return value
    if type(value) is list:
        return [_copy(part) for part in value]
    if type(value) is dict and all(type(key) is str for key in value):
        return {key: _copy(part) for key, part in value.items()}
    return json.loads(json.dumps(value))


def tool_prompt(tools: Sequence[dict[str, Any]]) -> str:
    """System text that offers tools to a model whose template knows no tools."""
    return _TOOL_PROMPT % json.dumps([t.get("function", t) for t in tools], ensure_ascii=False)


def without_tool_roles(messages: Sequence[dict[str, Any]], system: str) -> list[dict[str, Any]]:
    """The conversation in the roles that every template has: system, user, assistant.

    `system` is appended to the conversation's own system text. Calls become text of the assistant, results
    text of the user.
    """
    chat = [_plain_role(m) for m in messages]
    if not system:
        return chat
    if chat and chat[0].get("role") == "system":
        first = {**chat[0], "content": f"{chat[0].get('content') or ''}\n\n{system}".strip()}
        return [first, *chat[1:]]
    return [{"role": "system", "content": system}, *chat]


def content_text(parts: list[Any]) -> str:
    """The text of a message's content that comes in parts."""
    if not all(isinstance(part, dict) and part.get("type") in ("text", "refusal") for part in parts):
        raise TextError("a message's content holds parts that are not text: only text can be read")
    texts = [part.get(part["type"]) for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise TextError("a message's content holds a part without its text: expected type and text")
    return "".join(texts)


def message_text(message: Mapping[str, Any]) -> str:
    """The text of a message's content, in parts or not."""
    content = message.get("content")
    return content_text(content) if isinstance(content, list) else str(content or "")


def opening_text(messages: Iterable[Mapping[str, Any]]) -> str:
    """The user's first message, "" without one: all turns of a conversation share it.

    Training holds conversations out by it, and advice leaves out by it what a drafter was fitted on.
    """
    return next((message_text(m) for m in messages if m.get("role") == "user"), "")


def _plain_role(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content") or ""
    if message.get("role") == "tool":
        return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
    calls = _calls(message.get("tool_calls") or [])
    if not calls:
        return {**message, "content": content}
    written = render_calls(
        [ToolCall(c.get("name") or "", _loaded(c.get("arguments"))) for c in calls], SMOLLM2
    )
    return {"role": message.get("role"), "content": f"{content}\n{written}".lstrip()}


def _calls(value: Any) -> list[dict[str, Any]]:
    listed = value if isinstance(value, list) else [value]
    calls = [c.get("function", c) if isinstance(c, dict) else c for c in listed]
    if not all(isinstance(call, dict) for call in calls):
        raise TextError('tool_calls cannot be read: expected a list of {"function": {"name": ..., ...}}')
    return calls


def _loaded(arguments: Any) -> Any:
    """Arguments may be JSON inside a string."""
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments, strict=False)
    except (ValueError, RecursionError):
        return arguments
