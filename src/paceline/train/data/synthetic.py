"""Synthetic requests by the target itself: more prompts of the recorded kind (Magpie, arXiv 2406.08464).

Recorded traffic has few requests for each set of tools, and little plain chat. The target is given a
conversation up to some point in the user's last message, and continues it.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import numpy as np

from paceline.errors import TextError
from paceline.text import Tokenizer, message_text
from paceline.train.data.prompts import Prompt
from paceline.train.data.rollout import Job, Progress, Rollout, roll_out

if TYPE_CHECKING:
    from paceline.llm import LLM

MARK: Final = "\u241f"  # where the target continues
LONGEST: Final = 256  # tokens of a continuation


def synthesize(
    llm: "LLM",
    prompts: Sequence[Prompt],
    times: Callable[[Prompt], int],
    how: Rollout,
    max_prompt: int,
    seed: int = 0,
    progress: Progress | None = None,
) -> list[Prompt]:
    """Up to `times` new prompts for each that ends with a user's request and is not held out.

    Every second one keeps the beginning of the recorded request; the others are new from the first word.
    """
    tokenizer = llm.tokenizer
    plan = [(prompt, nth) for prompt in prompts if _is_usable(prompt) for nth in range(times(prompt))]
    requests = [
        one for prompt, nth in plan if (one := _open_request(tokenizer, prompt, nth, seed)) is not None
    ]
    sampling = replace(how, max_new=LONGEST, temperature=1.0, top_p=0.95)
    continuations = roll_out(llm, [one.job for one in requests], sampling, progress)
    known = {prompt.tokens for prompt in prompts}
    made = []
    for one, answer in zip(requests, continuations, strict=True):
        prompt = _prompt(tokenizer, one, answer)
        if prompt is not None and len(prompt.tokens) <= max_prompt and prompt.tokens not in known:
            known.add(prompt.tokens)
            made.append(prompt)
    return made


@dataclass(frozen=True, slots=True)
class _OpenRequest:
    """A conversation up to where the target continues."""

    origin: Prompt
    opening: str  # the part of the recorded request that is kept
    job: Job


def _is_usable(prompt: Prompt) -> bool:
    """True if its last message is a user's and it is not held out."""
    return not prompt.held_out and bool(prompt.messages) and prompt.messages[-1].get("role") == "user"


def _open_request(tokenizer: Tokenizer, origin: Prompt, nth: int, seed: int) -> _OpenRequest | None:
    """None if the template does not render the user's last message."""
    opening = ""
    if nth % 2:
        words = message_text(origin.messages[-1]).split(" ")
        opening = " ".join(words[: _number(origin, seed, -nth) % len(words)])
    messages = [*origin.messages[:-1], {"role": "user", "content": opening + MARK}]
    text = tokenizer.render(messages, list(origin.tools) or None)
    if MARK not in text:
        return None
    start = Prompt(tuple(tokenizer.encode(text[: text.rfind(MARK)], bos=False)), held_out=False)
    return _OpenRequest(origin, opening, Job(start, True, _number(origin, seed, nth)))


def _prompt(tokenizer: Tokenizer, request: _OpenRequest, continuation: Sequence[int]) -> Prompt | None:
    """None if the request is unfinished or empty."""
    if not continuation or continuation[-1] not in tokenizer.eos_ids:
        return None
    origin, words = (
        request.origin,
        (request.opening + tokenizer.decode(continuation[:-1], skip_special=True)).strip(),
    )
    if not words:
        return None
    messages = (*origin.messages[:-1], {"role": "user", "content": words})
    try:
        tokens = tokenizer.encode_chat(messages, list(origin.tools) or None)
    except TextError:
        return None
    return Prompt(tuple(tokens), False, messages, origin.tools, origin.called)


def _number(prompt: Prompt, seed: int, nth: int) -> int:
    text = np.asarray((seed, nth, *prompt.tokens), "<i8").tobytes()
    return int.from_bytes(hashlib.sha256(text).digest()[:7])
