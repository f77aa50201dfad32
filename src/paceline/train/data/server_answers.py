"""The target's answers written by a server that runs it elsewhere: vLLM, which takes and returns token ids.

The prompts are paceline's own token ids, so that both sides mean the same text. No answer is forced to be a
tool call: the server's grammars are its own.
"""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from paceline.errors import DataError, SettingError, one_line
from paceline.text import Tokenizer
from paceline.train.data.rollout import Job, Rollout

if TYPE_CHECKING:
    import aiohttp

CONCURRENCY: Final = 32  # requests at once: the server batches them
TIMEOUT_S: Final = 600.0


def server_answers(
    url: str,
    tokenizer: Tokenizer,
    jobs: Sequence[Job],
    rollout: Rollout,
    progress: Callable[[int, int], None] | None = None,
) -> list[list[int]]:
    """The answers in order. url: ".../v1", or without."""
    if not url.startswith(("http://", "https://")):
        raise SettingError("answers_from", url, "http://host:port, with or without /v1")
    endpoint = url.rstrip("/").removesuffix("/v1") + "/v1/completions"
    return asyncio.run(_answers(endpoint, tokenizer, jobs, rollout, progress))


async def _answers(
    endpoint: str,
    tokenizer: Tokenizer,
    jobs: Sequence[Job],
    rollout: Rollout,
    progress: Callable[[int, int], None] | None,
) -> list[list[int]]:
    import aiohttp

    done = 0

    async def answer(job: Job) -> list[int]:
        nonlocal done
        ids = await _answer(session, endpoint, tokenizer, job, rollout)
        done += 1
        if progress is not None:
            progress(done, len(jobs))
        return ids

    limit = aiohttp.TCPConnector(limit=CONCURRENCY)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=TIMEOUT_S, sock_read=TIMEOUT_S)
    async with aiohttp.ClientSession(connector=limit, timeout=timeout) as session:
        return await asyncio.gather(*map(answer, jobs))


async def _answer(
    session: "aiohttp.ClientSession",
    endpoint: str,
    tokenizer: Tokenizer,
    job: Job,
    rollout: Rollout,
) -> list[int]:
    import aiohttp

    body: dict[str, Any] = {
        "prompt": list(job.prompt.tokens),
        "max_tokens": rollout.max_new,
        "temperature": rollout.temperature if job.sampled else 0.0,
        "top_p": rollout.top_p if job.sampled else 1.0,
        "seed": job.seed,
        "return_token_ids": True,
        "skip_special_tokens": False,
    }
    try:
        async with session.post(endpoint, json=body) as response:
            response.raise_for_status()
            return _token_ids(json.loads(await response.read())["choices"][0], job, tokenizer)
    except (TimeoutError, aiohttp.ClientError, OSError, LookupError, ValueError, TypeError) as error:
        raise DataError(
            f"{endpoint} gave no answer to train on: {one_line(error)}; "
            "expected a vLLM server that runs the target"
        ) from None


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
