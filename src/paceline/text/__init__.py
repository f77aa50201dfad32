"""The only place where text exists: tokenizer, chat template, streaming, tool calls."""

from paceline.text.stream import Detokenizer, StopStrings, TextStream
from paceline.text.template import Message, Tool
from paceline.text.tokenizer import Tokenizer
from paceline.text.tool_formats import ToolFormat
from paceline.text.tools import ToolCall, parse_tool_calls

__all__ = [
    "Detokenizer",
    "Message",
    "StopStrings",
    "TextStream",
    "Tokenizer",
    "Tool",
    "ToolCall",
    "ToolFormat",
    "parse_tool_calls",
]
