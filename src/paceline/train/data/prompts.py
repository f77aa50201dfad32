"""Prompts from recorded conversations, in the target's own chat template."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from paceline.errors import TextError, UsageError
from paceline.text import Tokenizer
from paceline.train.data.conversations import Message, RejectionCounts, Source, read
from paceline.train.data.held_out import SHARE, held_out

Tokens = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Prompt:
    tokens: Tokens
    held_out: bool
    messages: tuple[Message, ...] = ()  # rendered as `tokens`
    tools: tuple[Mapping[str, Any], ...] = ()
    called: bool = False  # the recorded answer called a tool, or had to


@dataclass(frozen=True, slots=True)
class Prompts:
    prompts: tuple[Prompt, ...]
    rejected: Mapping[str, int]  # unusable records, by reason
    cut: int  # prompts that lost their oldest messages
    synthetic: int = 0  # prompts whose request the target wrote


def collect(
    tokenizer: Tokenizer, sources: Sequence[Source], max_tokens: int, share: float = SHARE
) -> Prompts:
    """A prompt for every answer in the sources. All differ; one that occurs on both sides is held out."""
    rejected: RejectionCounts = Counter()
    conversations = list(read(sources, rejected))
    requests = [
        (conversation.tools, out, *turn)
        for conversation, out in zip(conversations, held_out(conversations, share), strict=True)
        for turn in conversation.histories()
    ]
    with ThreadPoolExecutor() as pool:  # the tokenizer releases the GIL
        all_fitted = pool.map(lambda one: _fitted(tokenizer, one[2], one[0], max_tokens), requests)
    prompts: dict[Tokens, Prompt] = {}
    cut = 0
    for (tools, out, history, called), fitted in zip(requests, all_fitted, strict=True):
        if isinstance(fitted, str):
            rejected[fitted] += 1
            continue
        messages, tokens = fitted
        before = prompts.get(tokens)
        if before is not None:
            rejected["the same prompt again"] += 1
        if before is None or (out and not before.held_out):
            prompts[tokens] = Prompt(tokens, out, messages, tools, called)
            cut += len(messages) < len(history)
    if not prompts:
        why = ", ".join(f"{reason}: {count}" for reason, count in rejected.items()) or "they are empty"
        raise UsageError(f"no prompt could be made of {', '.join(map(str, sources))} ({why})")
    return Prompts(tuple(prompts.values()), dict(rejected), cut)


def _fitted(
    tokenizer: Tokenizer, history: tuple[Message, ...], tools: Sequence[Mapping[str, Any]], max_tokens: int
) -> tuple[tuple[Message, ...], Tokens] | str:
    """The system message and as many of the latest messages as fit; or the reason why none do."""
    encode: Callable[[Sequence[Message]], list[int]] = partial(
        tokenizer.encode_chat, tools=list(tools) or None
    )
    try:
        tokens = encode(history)
        if len(tokens) <= max_tokens:
            return history, tuple(tokens)
        shorter = list(_shortened(history))
        tried: dict[int, list[int]] = {}

        def fits(n: int) -> bool:
            tried[n] = encode(shorter[n])
            return len(tried[n]) <= max_tokens

        first = bisect_left(range(len(shorter)), True, key=fits)
        if first < len(shorter):
            return shorter[first], tuple(tried[first])
    except TextError:
        return "the chat template refuses it"
    return f"longer than {max_tokens} tokens, whatever is left out"


def _shortened(history: tuple[Message, ...]) -> Iterator[tuple[Message, ...]]:
    """Ever shorter histories: the oldest user turns go first, then the oldest steps of the last turn.

    A step is an answer with the tool results that follow it; the last user message stays.
    """
    start = next((i for i, m in enumerate(history) if m.get("role") not in ("system", "developer")), 0)
    head = history[:start]
    turns = [i for i in range(start, len(history)) if history[i].get("role") == "user"]
    for turn in turns:
        if turn > start:
            yield head + history[turn:]
    if not turns:
        return
    last = turns[-1]
    for step in range(last + 2, len(history)):
        if history[step].get("role") == "assistant":
            yield head + history[last : last + 1] + history[step:]
