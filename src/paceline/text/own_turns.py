"""Own turns: an answer that comes back as a message should be rendered to the tokens that were generated.

Then the next turn finds the whole answer in the prefix cache. `check_own_turns` tries answers of several
kinds with a model's template and tokenizer, and shows for each where the two first differ. There are these
reasons: the template trims or adds white space; arguments are parsed and written again by its `tojson`
filter, in its spacing and its numbers; it drops reasoning; tokens merge across the border of an answer.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from paceline.errors import TextError
from paceline.text.chat_template import Message
from paceline.text.tokenizer import Tokenizer
from paceline.text.tool_calls import ToolCall, ToolFormat, parse_tool_calls, render_calls

SHOWN: Final = 4  # tokens from the first difference on
_TOOL: Final = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks something up.",
        "parameters": {"type": "object", "properties": {"text": {"type": "string"}, "n": {"type": "number"}}},
    },
}
_CALL: Final = ToolCall("look_up", {"text": "brass lanterns", "n": 12})
_OTHER: Final = ToolCall("look_up", {"text": "a café", "n": 2.5})
_QUESTION: Final = {"role": "user", "content": "What do brass lanterns cost?"}
_TEXT: Final = "They cost 32.25 each, so 12 of them cost 387.00."


@dataclass(frozen=True, slots=True)
class OwnTurn:
    """One kind of answer. The tokens of prompt and answer that its history shares with what was generated."""

    kind: str
    tokens: int  # of prompt and answer, without the token that ends it
    shared: int
    generated: str  # from the first difference on
    rendered: str
    refusal: str = ""  # of the template

    @property
    def reused(self) -> bool:
        return not self.refusal and self.shared == self.tokens

    def __str__(self) -> str:
        if self.refusal:
            return f"refused: {self.refusal}"
        if self.reused:
            return "reused"
        return (
            f"read again from token {self.shared} of {self.tokens} on: {self.generated!r} was generated, "
            f"{self.rendered!r} is rendered"
        )


def check_own_turns(tokenizer: Tokenizer) -> list[OwnTurn]:
    """None for a model without a chat template."""
    if not tokenizer.templates:
        return []
    return [_check(tokenizer, kind, text) for kind, text in answers(tokenizer.tool_format).items()]


def answers(format: ToolFormat) -> Mapping[str, str]:
    """Texts that a model may write, by kind."""
    call = render_calls([_CALL], format)
    spaced, compact = (json.dumps(_CALL.arguments, separators=s) for s in ((", ", ": "), (",", ":")))
    return {
        "text": _TEXT,
        "text after line breaks": f"\n\n{_TEXT}",
        "text before a line break": f"{_TEXT}\n",
        "reasoning": f"<think>\nI multiply 32.25 by 12.\n</think>\n\n{_TEXT}",
        "call": call,
        "two calls": render_calls([_CALL, _OTHER], format),
        "text and call": f"I look that up.\n{call}",
        "call with compact JSON": call.replace(spaced, compact),
        "call with number 12.0": call.replace('"n": 12', '"n": 12.0'),
        "call with number 1.2e1": call.replace('"n": 12', '"n": 1.2e1'),
        "call in a code fence": f"```json\n{_bare(_CALL)}\n```",
        "call with escaped letter": render_calls([_OTHER], format).replace("é", "\\u00e9"),
    }


def _bare(call: ToolCall) -> str:
    return json.dumps({"name": call.name, "arguments": call.arguments})


def _check(tokenizer: Tokenizer, kind: str, text: str) -> OwnTurn:
    message = as_message(text, tokenizer.tool_format)
    try:
        prompt = tokenizer.encode_chat([_QUESTION], [_TOOL])
        history = tokenizer.encode_chat([_QUESTION, message, *_following(message)], [_TOOL])
    except TextError as error:
        return OwnTurn(kind, 0, 0, "", "", str(error))
    generated = [*prompt, *tokenizer.encode(text, bos=False)]
    shared = shared_tokens(generated, history)
    ends = (tokenizer.decode(tokens[shared : shared + SHOWN]) for tokens in (generated, history))
    return OwnTurn(kind, len(generated), shared, *ends)


def as_message(text: str, format: ToolFormat) -> Message:
    """The message that a client gets for this text, and sends back."""
    content, calls, _ = parse_tool_calls(text, format)
    if not calls:  # in a form that models fall back to
        content, calls, _ = parse_tool_calls(text)
    message: dict[str, Any] = {"role": "assistant", "content": content or (None if calls else "")}
    if calls:
        message["tool_calls"] = [
            {
                "id": f"call0000{i}",
                "type": "function",
                "function": {"name": call.name, "arguments": call.text},
            }
            for i, call in enumerate(calls)
        ]
    return message


def _following(message: Message) -> Sequence[Message]:
    """What an agent sends after it."""
    calls = message.get("tool_calls") or []
    results = [
        {"role": "tool", "tool_call_id": call["id"], "name": call["function"]["name"], "content": "{}"}
        for call in calls
    ]
    return results or [{"role": "user", "content": "Thanks. And copper kettles?"}]


def shared_tokens(first: Sequence[object], second: Sequence[object]) -> int:
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))
