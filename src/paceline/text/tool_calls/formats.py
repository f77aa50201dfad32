"""Tool call formats of model families."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, Literal

from paceline.errors import SettingError

# Forms in which calls are recognised beside the declared one (detector.py), each bare or in a code fence.
# json: {"name": ..., "arguments": {...}}, or a list of these; python: [f(a=1)];
# xml: <function=f>...</function>, or JSON between tags.
Form = Literal["json", "python", "xml"]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call of a tool in an answer."""

    name: str
    arguments: dict[str, Any]
    text: str = field(default="", compare=False)  # the arguments' JSON as the model wrote it

    def __post_init__(self) -> None:
        if not self.text:
            object.__setattr__(self, "text", json.dumps(self.arguments, ensure_ascii=False))


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """The syntax of tool calls of one model family."""

    name: str
    trigger: str  # from this text on a message is tool calls
    begin: str  # stands before the first call, or before each; starts with the trigger
    end: str  # stands after the last call, or after each
    between: str  # between two calls, outside `end` and `begin` where these stand around each
    wraps_each: bool  # begin and end stand around each call, not around all of them
    call: tuple[str, str, str]  # around the name and the arguments' JSON
    anywhere: bool = True  # False: the trigger counts only at the very start of a message
    other_triggers: tuple[str, ...] = ()  # read, never written
    other_marks: tuple[str, ...] = ()  # further special tokens of the syntax
    bare_names: bool = False  # a call may be its name, bare, before its arguments
    alternatives: tuple[Form, ...] = ("json",)  # forms that its models fall back to
    channels: bool = False  # the whole answer is messages of OpenAI's harmony format (harmony.py)
    short_ids: bool = False  # its templates take no ids of calls but those of nine letters and digits


_CALL: Final = ('{"name": "', '", "arguments": ', "}")

HERMES: Final = ToolFormat(  # Hermes 2 Pro, Qwen 2.5, Qwen 3
    "hermes",
    "<tool_call>",
    "<tool_call>\n",
    "\n</tool_call>",
    "\n",
    wraps_each=True,
    call=_CALL,
    alternatives=("json", "xml"),
)
SMOLLM2: Final = ToolFormat(
    "smollm2",
    "<tool_call>",
    "<tool_call>[",
    "]</tool_call>",
    ", ",
    wraps_each=False,
    call=_CALL,
    alternatives=("json", "python", "xml"),
)
LLAMA3: Final = ToolFormat(  # Llama 3.1 and later
    "llama3",
    '{"name": "',
    "",
    "",
    "; ",
    wraps_each=False,
    call=('{"name": "', '", "parameters": ', "}"),
    anywhere=False,
    other_triggers=("<|python_tag|>", '{"type": "function", "name": "'),
    alternatives=("json", "python", "xml"),
)
MISTRAL: Final = ToolFormat(
    "mistral",
    "[TOOL_CALLS]",
    "[TOOL_CALLS][",
    "]",
    ", ",
    wraps_each=False,
    call=_CALL,
    other_marks=("[CALL_ID]", "[ARGS]"),
    bare_names=True,  # newer models: [TOOL_CALLS]name[ARGS]{...}
    short_ids=True,
)
HARMONY: Final = ToolFormat(  # gpt-oss
    "harmony",
    "<|channel|>commentary to=functions.",
    "<|channel|>commentary to=functions.",
    "<|call|>",
    "<|start|>assistant",
    wraps_each=True,
    call=("", " <|constrain|>json<|message|>", ""),
    other_marks=(
        "<|start|>",
        "<|end|>",
        "<|message|>",
        "<|channel|>",
        "<|constrain|>",
        "<|call|>",
        "<|return|>",
    ),
    alternatives=(),
    channels=True,
)
FORMATS: Final[Mapping[str, ToolFormat]] = MappingProxyType(
    {f.name: f for f in (HERMES, SMOLLM2, LLAMA3, MISTRAL, HARMONY)}
)


def tool_format(template: str | None) -> ToolFormat:
    """The family a chat template belongs to; SmolLM2's, whose tool prompt is added, if it knows no tools."""
    source = template or ""
    if "<|channel|>" in source and "<|message|>" in source:
        return HARMONY
    if MISTRAL.trigger in source:
        return MISTRAL
    if "<|python_tag|>" in source:
        return LLAMA3
    if SMOLLM2.begin in source:
        return SMOLLM2
    if HERMES.trigger in source:
        return HERMES
    # Hermes' own template also says "parameters", where it describes the tools.
    return LLAMA3 if '"parameters": ' in source and "tools" in source else SMOLLM2


def named_format(name: str) -> ToolFormat:
    """The format of this name, for those who know better than the template."""
    if name not in FORMATS:
        raise SettingError("tool_format", name, f"one of {', '.join(sorted(FORMATS))}")
    return FORMATS[name]


def render_calls(calls: Sequence[ToolCall], format: ToolFormat) -> str:
    written = [_render_call(call, format) for call in calls]
    if format.wraps_each:
        return format.between.join(f"{format.begin}{call}{format.end}" for call in written)
    return f"{format.begin}{format.between.join(written)}{format.end}"


def _render_call(call: ToolCall, format: ToolFormat) -> str:
    before, middle, after = format.call
    name = json.dumps(call.name, ensure_ascii=False)[1:-1]
    return f"{before}{name}{middle}{json.dumps(call.arguments, ensure_ascii=False)}{after}"
