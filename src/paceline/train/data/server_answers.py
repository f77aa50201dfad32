"""The target's answers written by a server that runs it elsewhere: vLLM, which takes and returns token ids.

The prompts are paceline's own token ids, so that both sides mean the same text. No answer is forced to be a
tool call: the server's grammars are its own.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from paceline.text import Tokenizer
from paceline.train.data.rollout import Job, Rollout
from paceline.train.data.vllm_requests import completions


def server_answers(
    url: str,
    tokenizer: Tokenizer,
    jobs: Sequence[Job],
    rollout: Rollout,
    progress: Callable[[int, int], None] | None = None,
) -> list[list[int]]:
    """The answers in order. url: ".../v1", or without."""

    def read(index: int, reply: Mapping[str, Any]) -> list[int]:
        return _token_ids(reply["choices"][0], jobs[index], tokenizer)

    bodies = [_body(job, rollout) for job in jobs]
    return completions(url, "answers_from", bodies, read, progress)


def _body(job: Job, rollout: Rollout) -> dict[str, Any]:
    return {
        "prompt": list(job.prompt.tokens),
        "max_tokens": rollout.max_new,
        "temperature": rollout.temperature if job.sampled else 0.0,
        "top_p": rollout.top_p if job.sampled else 1.0,
        "seed": job.seed,
        "return_token_ids": True,
        "skip_special_tokens": False,
    }


def _token_ids(choice: Mapping[str, Any], job: Job, tokenizer: Tokenizer) -> list[int]:
    ids, read = choice.get("token_ids"), choice.get("prompt_token_ids")
    if not isinstance(ids, list) or not ids:
        raise ValueError("the response has no `token_ids`")
    if read is not None and read != list(job.prompt.tokens):
        raise ValueError("the server read another prompt than was sent")
    if max(ids) >= tokenizer.vocab_size or not _same_text(choice.get("text"), tokenizer.decode(ids)):
        raise ValueError("its tokens mean another text here: the server runs a model with another tokenizer")
    return ids


def _same_text(theirs: object, ours: str) -> bool:
    """The end token's text is left out by the server; an answer may end within a character."""
    if not isinstance(theirs, str):
        return False
    begin = theirs.rstrip("\ufffd")
    return ours.startswith(begin) and len(ours) - len(begin) < 32
