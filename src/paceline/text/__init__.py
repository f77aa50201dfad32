"""The only place where text exists: tokenizer, chat template, streaming, tool calls."""

from paceline.text.stream import Detokenizer, StopStrings, TextStream
from paceline.text.template import Message, Tool
from paceline.text.tokenizer import Tokenizer
from paceline.text.tool_formats import FORMATS, ToolCall, ToolFormat, render_calls, tool_format
from paceline.text.tool_stream import CallDelta, ContentDelta, Delta, ToolStream, call_id
from paceline.text.tools import parse_tool_calls

__all__ = [
    "FORMATS",
    "CallDelta",
    "ContentDelta",
    "Delta",
    "Detokenizer",
    "Message",
    "StopStrings",
    "TextStream",
    "Tokenizer",
    "Tool",
    "ToolCall",
    "ToolFormat",
    "ToolStream",
    "call_id",
    "parse_tool_calls",
    "render_calls",
    "tool_format",
]
