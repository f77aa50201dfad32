"""/tokenize and /detokenize: work for a thread beside the loop."""

from collections.abc import Mapping
from typing import Any

from paceline.errors import PacelineError
from paceline.server.openai.error_param import placed
from paceline.server.openai.params import check_messages
from paceline.server.openai.protocol import DetokenizeRequest, TokenizeRequest
from paceline.text import Tokenizer
from paceline.web.api_errors import ApiError


def tokens_of(asked: TokenizeRequest, tokenizer: Tokenizer, body: Mapping[str, Any]) -> list[int]:
    """`body`: the request as sent."""
    if (asked.prompt is None) == (asked.messages is None):
        raise ApiError(400, "give either prompt or messages", param="prompt")
    try:
        if asked.prompt is not None:
            return tokenizer.encode(asked.prompt, special=asked.add_special_tokens)
        messages = asked.messages or []
        check_messages(messages)
        return tokenizer.encode_chat(messages, asked.tools, asked.add_generation_prompt)
    except PacelineError as error:
        raise placed(error, body) from error


def text_of(asked: DetokenizeRequest, tokenizer: Tokenizer) -> str:
    if strange := [token for token in asked.tokens if not 0 <= token < tokenizer.vocab_size]:
        raise ApiError(400, f"tokens: {strange[0]} is not one of {tokenizer.vocab_size}", param="tokens")
    return tokenizer.decode(asked.tokens)
