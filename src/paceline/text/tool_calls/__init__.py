"""Tool calls in a model's text.

formats.py       ToolFormat: how each family writes calls (Hermes and Qwen, SmolLM2, Llama 3, Mistral)
parser.py        ToolCallParser: events from text in pieces
json_scanner.py  JSON one character at a time
parse.py         the calls of a whole text
stream.py        text in pieces to OpenAI's deltas
"""

from paceline.text.tool_calls.formats import FORMATS, ToolCall, ToolFormat, render_calls, tool_format
from paceline.text.tool_calls.parse import parse_tool_calls
from paceline.text.tool_calls.stream import CallDelta, ContentDelta, Delta, ToolStream, call_id

__all__ = [
    "FORMATS",
    "CallDelta",
    "ContentDelta",
    "Delta",
    "ToolCall",
    "ToolFormat",
    "ToolStream",
    "call_id",
    "parse_tool_calls",
    "render_calls",
    "tool_format",
]
