"""Text and its tokens. The engine and all below it work on tokens only.

tokenizer.py      one model's tokenizer: text to tokens and back
vocab/            a tokenizer from a model's files: a Hugging Face folder or a GGUF file
chat_template.py  conversations and tools to a prompt, with the model's own template in a sandbox
detokenizer.py    tokens to text as they come: whole characters, nothing from a stop string on
stop_strings.py   stop strings as one automaton
own_turns.py      whether an answer comes back as the tokens that were generated
tool_calls/       tool calls in the formats of several model families: written, parsed, streamed
"""

from paceline.text.chat_template import (
    Message,
    Prompt,
    Tool,
    content_text,
    message_text,
    opening_text,
    read_chat_template,
)
from paceline.text.detokenizer import Detokenizer, IncrementalDecoder, StopChecker, TextReader
from paceline.text.own_turns import OwnTurn, check_own_turns
from paceline.text.tokenizer import Tokenizer
from paceline.text.tool_calls import (
    FORMATS,
    CallDelta,
    ContentDelta,
    Delta,
    OfferedTools,
    ReasoningDelta,
    Rejection,
    ToolCall,
    ToolFormat,
    ToolStream,
    call_id,
    named_format,
    parse_tool_calls,
    render_calls,
    tool_format,
)

__all__ = [
    "FORMATS",
    "CallDelta",
    "ContentDelta",
    "Delta",
    "Detokenizer",
    "IncrementalDecoder",
    "Message",
    "OfferedTools",
    "OwnTurn",
    "Prompt",
    "ReasoningDelta",
    "Rejection",
    "StopChecker",
    "TextReader",
    "Tokenizer",
    "Tool",
    "ToolCall",
    "ToolFormat",
    "ToolStream",
    "call_id",
    "check_own_turns",
    "content_text",
    "message_text",
    "named_format",
    "opening_text",
    "parse_tool_calls",
    "read_chat_template",
    "render_calls",
    "tool_format",
]
