"""The target's answers as a draft model reads them while it serves: in its own tokens, by the same code."""

from paceline.drafters.draft_model.vocab_mapping import Retokenizer, SameVocab, TextRetokenizer, TokenizerPair
from paceline.errors import UsageError
from paceline.text import Tokenizer
from paceline.train.data.dataset import Answers
from paceline.types import common_prefix


def same_words(draft: Tokenizer, target: Tokenizer) -> bool:
    """Whether the draft model is served the target's tokens as they are."""
    return draft.fingerprint == target.fingerprint


def telling(draft: Tokenizer, target: Tokenizer, draft_size: int, target_size: int) -> Retokenizer:
    """How the drafter `model` tells this draft model what the target said."""
    if same_words(draft, target):
        return SameVocab(draft_size, target_size)
    return TextRetokenizer(TokenizerPair(draft, target))


def retold(answers: Answers, words: Retokenizer, draft_size: int, tokenizer: str) -> Answers:
    """In the draft model's tokens; an answer with a token that it does not have is left out.

    tokenizer: the draft model's fingerprint.
    """
    pairs = [_one(answers, i, words) for i in range(len(answers))]
    kept = [i for i, (prompt, said) in enumerate(pairs) if prompt and said and _fit(prompt, said, draft_size)]
    if not kept:
        raise UsageError("the draft model can read none of the answers: use another draft model")
    return Answers.of(
        [pairs[i][0] for i in kept],
        [pairs[i][1] for i in kept],
        sampled=answers.sampled[kept].tolist(),
        held_out=answers.held_out[kept].tolist(),
        constrained=answers.constrained[kept].tolist(),
        always=(),
        vocab_size=draft_size,
        target=answers.target,
        tokenizer=tokenizer,
    )


def _one(answers: Answers, i: int, words: Retokenizer) -> tuple[list[int], list[int]]:
    """What is read before the answer, and the answer: told token by token, as it grows while it is served."""
    text, seq = answers.prompt(i).tolist(), f"answer {i}"
    prompt = told = words.retokenize(seq, text)
    for token in answers.answer(i).tolist():
        text.append(token)
        told = words.retokenize(seq, text)
    words.forget(seq)
    same = common_prefix(prompt, told)
    start = same if same == len(prompt) else same + 1  # no guess begins inside a token that spans both
    return told[:start], told[start:]


def _fit(prompt: list[int], said: list[int], size: int) -> bool:
    return max(max(prompt), max(said)) < size
