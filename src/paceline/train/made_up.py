"""Requests that the target makes up itself where users made theirs: more prompts, of the same kind.

Recorded traffic asks few things of each set of tools. What else might be asked, the target can say: it is
shown a conversation up to the place where the user's words begin, and goes on.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from paceline.errors import TextError
from paceline.text import Tokenizer
from paceline.train.dense import DenseModel
from paceline.train.prompts import Prompt
from paceline.train.rollout import Job, Progress, Rollout, roll_out

MARK: Final = "\u241f"  # where the user's words would stand
LONGEST: Final = 160  # tokens of a request


def make_up(
    model: DenseModel,
    tokenizer: Tokenizer,
    prompts: Sequence[Prompt],
    times: int,
    how: Rollout,
    seed: int = 0,
    progress: Progress | None = None,
) -> list[Prompt]:
    """Up to `times` new prompts in the place of each that ends with a user's request and is not held out."""
    begun = [(p, start) for p in prompts if not p.held_out and (start := _begun(tokenizer, p))]
    jobs = [Job(start, True, _seed(start, seed, nth)) for _, start in begun for nth in range(times)]
    freely = replace(how, max_new=LONGEST, temperature=1.0, top_p=0.95)
    said = roll_out(model, jobs, sorted(tokenizer.eos_ids), freely, progress)
    known = {p.tokens for p in prompts}
    made = []
    for i, answer in enumerate(said):
        prompt = _prompt(tokenizer, begun[i // times][0], answer)
        if prompt is not None and prompt.tokens not in known:
            known.add(prompt.tokens)
            made.append(prompt)
    return made


def _begun(tokenizer: Tokenizer, prompt: Prompt) -> list[int]:
    """The prompt up to where its last words, a user's, begin; empty if they are not a user's."""
    if not prompt.messages or prompt.messages[-1].get("role") != "user":
        return []
    messages = [*prompt.messages[:-1], {"role": "user", "content": MARK}]
    text = tokenizer.render(messages, list(prompt.tools) or None)
    return tokenizer.encode(text[: text.rfind(MARK)], bos=False) if MARK in text else []


def _prompt(tokenizer: Tokenizer, origin: Prompt, said: Sequence[int]) -> Prompt | None:
    """None where the request did not come to its end, or is none."""
    if not said or said[-1] not in tokenizer.eos_ids:
        return None
    words = tokenizer.decode(said[:-1], skip_special=True).strip()
    if not words:
        return None
    messages = (*origin.messages[:-1], {"role": "user", "content": words})
    try:
        tokens = tokenizer.encode_chat(messages, list(origin.tools) or None)
    except TextError:
        return None
    return Prompt(tuple(tokens), False, messages, origin.tools, origin.called)


def _seed(start: Sequence[int], seed: int, nth: int) -> int:
    text = np.asarray((seed, nth, *start), "<i8").tobytes()
    return int.from_bytes(hashlib.sha256(text).digest()[:7])
