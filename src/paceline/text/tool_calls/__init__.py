"""Tool calls in a model's text.

formats.py       ToolFormat: how each family writes calls (Hermes and Qwen, SmolLM2, Llama 3, Mistral ...)
parser.py        ToolCallParser: events from text in pieces, in the format that the template declares
harmony.py       HarmonyParser: the channels and calls of gpt-oss
detector.py      CallDetector: calls in the forms that models fall back to, by a strict rule
json_scanner.py  JSON one character at a time
stream.py        both together: text in pieces to OpenAI's deltas, and the calls of a whole text
"""

from paceline.text.tool_calls.detector import OfferedTools, Rejection
from paceline.text.tool_calls.formats import (
    FORMATS,
    ToolCall,
    ToolFormat,
    named_format,
    render_calls,
    tool_format,
)
from paceline.text.tool_calls.stream import (
    CallDelta,
    ContentDelta,
    Delta,
    ReasoningDelta,
    ToolStream,
    call_id,
    parse_tool_calls,
)

__all__ = [
    "FORMATS",
    "CallDelta",
    "ContentDelta",
    "Delta",
    "OfferedTools",
    "ReasoningDelta",
    "Rejection",
    "ToolCall",
    "ToolFormat",
    "ToolStream",
    "call_id",
    "named_format",
    "parse_tool_calls",
    "render_calls",
    "tool_format",
]
