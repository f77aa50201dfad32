"""Requests that the target makes up itself where users made theirs: more prompts, of the same kind.

Recorded traffic asks few things of each set of tools, and is short of plain talk. What else might be asked,
the target can say: it is shown a conversation up to some place in the user's last words, and goes on.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from paceline.errors import TextError
from paceline.text import Tokenizer
from paceline.train.data.conversations import words_of
from paceline.train.data.prompts import Prompt
from paceline.train.data.rollout import Job, Progress, Rollout, roll_out
from paceline.train.train_decoder import TrainDecoder

MARK: Final = "\u241f"  # where the target is to go on
LONGEST: Final = 256  # tokens it may add to a request


def synthesize(
    model: TrainDecoder,
    tokenizer: Tokenizer,
    prompts: Sequence[Prompt],
    times: Callable[[Prompt], int],
    how: Rollout,
    max_prompt: int,
    seed: int = 0,
    progress: Progress | None = None,
) -> list[Prompt]:
    """Up to `times` new prompts in the place of each that ends with a user's request and is not held out.

    The first of them, the third, and so on are the target's from the first word on; the others begin as the
    recorded one does.
    """
    wanted = [(prompt, nth) for prompt in prompts if _asks(prompt) for nth in range(times(prompt))]
    begun = [one for prompt, nth in wanted if (one := _begun(tokenizer, prompt, nth, seed)) is not None]
    freely = replace(how, max_new=LONGEST, temperature=1.0, top_p=0.95)
    said = roll_out(model, [one.job for one in begun], sorted(tokenizer.eos_ids), freely, progress)
    known = {prompt.tokens for prompt in prompts}
    made = []
    for one, answer in zip(begun, said, strict=True):
        prompt = _prompt(tokenizer, one, answer)
        if prompt is not None and len(prompt.tokens) <= max_prompt and prompt.tokens not in known:
            known.add(prompt.tokens)
            made.append(prompt)
    return made


@dataclass(frozen=True, slots=True)
class _Begun:
    """A conversation up to where the target goes on."""

    origin: Prompt
    kept: str  # how the recorded request begins, as far as the new one begins so
    job: Job


def _asks(prompt: Prompt) -> bool:
    """Whether its last words are a user's, and training may have them."""
    return not prompt.held_out and bool(prompt.messages) and prompt.messages[-1].get("role") == "user"


def _begun(tokenizer: Tokenizer, origin: Prompt, nth: int, seed: int) -> _Begun | None:
    """None where the template does not show the user's last words."""
    kept = ""
    if nth % 2:
        words = words_of(origin.messages[-1]).split(" ")
        kept = " ".join(words[: _number(origin, seed, -nth) % len(words)])
    messages = [*origin.messages[:-1], {"role": "user", "content": kept + MARK}]
    text = tokenizer.render(messages, list(origin.tools) or None)
    if MARK not in text:
        return None
    start = tokenizer.encode(text[: text.rfind(MARK)], bos=False)
    return _Begun(origin, kept, Job(start, True, _number(origin, seed, nth)))


def _prompt(tokenizer: Tokenizer, begun: _Begun, said: Sequence[int]) -> Prompt | None:
    """None where the request did not come to its end, or is none."""
    if not said or said[-1] not in tokenizer.eos_ids:
        return None
    origin, words = begun.origin, (begun.kept + tokenizer.decode(said[:-1], skip_special=True)).strip()
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
