"""The only place where text exists: tokenizer, chat template, streaming, tool calls."""

from paceline.text.chat_template import Message, Tool
from paceline.text.detokenizer import Detokenizer, IncrementalDecoder, StopChecker
from paceline.text.tokenizer import Tokenizer
from paceline.text.tool_calls.formats import FORMATS, ToolCall, ToolFormat, render_calls, tool_format
from paceline.text.tool_calls.parse import parse_tool_calls
from paceline.text.tool_calls.stream import CallDelta, ContentDelta, Delta, ToolStream, call_id

__all__ = [
    "FORMATS",
    "CallDelta",
    "ContentDelta",
    "Delta",
    "Detokenizer",
    "IncrementalDecoder",
    "Message",
    "StopChecker",
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
