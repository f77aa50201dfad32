"""The target's answers in the draft model's tokens, retokenized by the code that serves."""

from paceline.drafters.draft_model.vocab_mapping import Retokenizer, SameVocab, TextRetokenizer, TokenizerPair
from paceline.errors import UsageError
from paceline.text import Tokenizer
from paceline.train.data.dataset import Answers
from paceline.types import common_prefix


def same_tokenizer(draft: Tokenizer, target: Tokenizer) -> bool:
    """True if draft model and target share a tokenizer."""
    return draft.fingerprint == target.fingerprint


def retokenizer_for(draft: Tokenizer, target: Tokenizer, draft_size: int, target_size: int) -> Retokenizer:
    """The retokenizer that the drafter `model` uses for this pair."""
    if same_tokenizer(draft, target):
        return SameVocab(draft_size, target_size)
    return TextRetokenizer(TokenizerPair(draft, target))


def retokenize(answers: Answers, retokenizer: Retokenizer, draft_size: int, tokenizer: str) -> Answers:
    """Retokenized answers; an answer with a token that the draft model lacks is left out.

    tokenizer: the draft model's fingerprint.
    """
    pairs = [_one(answers, i, retokenizer) for i in range(len(answers))]
    readable = [
        i
        for i, (prompt, answer) in enumerate(pairs)
        if prompt and answer and _fit(prompt, answer, draft_size)
    ]
    if not readable:
        raise UsageError("the draft model can read none of the answers: use another draft model")
    return Answers.of(
        [pairs[i][0] for i in readable],
        [pairs[i][1] for i in readable],
        sampled=answers.sampled[readable].tolist(),
        held_out=answers.held_out[readable].tolist(),
        constrained=answers.constrained[readable].tolist(),
        always=(),
        vocab_size=draft_size,
        target=answers.target,
        tokenizer=tokenizer,
    )


def _one(answers: Answers, i: int, retokenizer: Retokenizer) -> tuple[list[int], list[int]]:
    """Prompt and answer, retokenized token by token, as the answer grows while it is served."""
    text, seq = answers.prompt(i).tolist(), f"answer {i}"
    prompt = tokens = retokenizer.retokenize(seq, text)
    for token in answers.answer(i).tolist():
        text.append(token)
        tokens = retokenizer.retokenize(seq, text)
    retokenizer.forget(seq)
    same = common_prefix(prompt, tokens)
    start = same if same == len(prompt) else same + 1  # no draft begins inside a token that spans both
    return tokens[:start], tokens[start:]


def _fit(prompt: list[int], answer: list[int], size: int) -> bool:
    return max(max(prompt), max(answer)) < size
