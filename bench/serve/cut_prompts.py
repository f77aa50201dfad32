"""Prompts of an exact length: the ends of recorded turns, where the conversation is."""

from typing import Final

from bench import workload
from bench.workload import FREE_TEXT, Prompt
from paceline.errors import TextError
from paceline.text import Tokenizer

MAX_TURN_TOKENS: Final = 6000  # tokens of the turns that are cut
BUILT_IN_REPEATS: Final = 64  # how often the project's own short prompts may follow one another
GO_ON: Final = "Go on with the next step, and say what you have found so far."


def cut(tokenizer: Tokenizer, length: int, count: int, seed: int = 0) -> list[list[int]]:
    """So many prompts of so many tokens, each of another conversation."""
    found: list[Prompt] = []
    for name, path in workload.known().items():
        if name not in FREE_TEXT:
            found += workload.choose(name, path, tokenizer, count, MAX_TURN_TOKENS, seed)
    long = [prompt for prompt in workload.alternating(found, seed) if len(prompt.tokens) >= length]
    prompts = [list(prompt.tokens[-length:]) for prompt in long[:count]]
    if len(prompts) < count:
        prompts += _joined(found, length, count - len(prompts))
    return prompts


def _joined(found: list[Prompt], length: int, count: int) -> list[list[int]]:
    """Where conversations are too short: several, one after another, each time in another order."""
    made = []
    for start in range(count):
        order = found[start % len(found) :] + found[: start % len(found)]
        tokens = [token for prompt in order for token in prompt.tokens] * BUILT_IN_REPEATS
        made.append(tokens[start : start + length])
    return made


def after(tokenizer: Tokenizer, prompt: list[int], answer: str) -> list[int]:
    """The next turn of a conversation: what was asked, the answer, and what is asked then."""
    return [*prompt, *tokenizer.encode(answer, special=False, bos=False), *_turn(tokenizer)]


def _turn(tokenizer: Tokenizer) -> list[int]:
    """The text between an answer and the next, as the model's template has it."""
    try:
        said = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "@@"}]
        text = tokenizer.render([*said, {"role": "user", "content": GO_ON}])
    except TextError:
        return tokenizer.encode(f"\n{GO_ON}\n", bos=False)
    return tokenizer.encode(text.partition("@@")[2], bos=False)
