"""Text to tokens and back, for clients that count."""

from typing import Any

from paceline.llm import LLM
from paceline.server.failures import Failure
from paceline.server.wire import DetokenizeRequest, TokenizeRequest


def tokenized(asked: TokenizeRequest, llm: LLM) -> dict[str, Any]:
    if (asked.prompt is None) == (asked.messages is None):
        raise Failure(400, "give either prompt or messages", param="prompt")
    if asked.prompt is not None:
        tokens = llm.tokenizer.encode(asked.prompt, special=asked.add_special_tokens)
    else:
        tokens = llm.tokenizer.encode_chat(asked.messages or [], asked.tools, asked.add_generation_prompt)
    return {"tokens": tokens, "count": len(tokens), "max_model_len": llm.target.max_context}


def detokenized(asked: DetokenizeRequest, llm: LLM) -> dict[str, Any]:
    size = llm.tokenizer.vocab_size
    if strange := [token for token in asked.tokens if not 0 <= token < size]:
        raise Failure(400, f"tokens: {strange[0]} is not one of {size}", param="tokens")
    return {"prompt": llm.tokenizer.decode(asked.tokens)}
