"""Requests to a vLLM server that runs the target: its answers, and its hidden states."""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

from paceline.errors import DataError, SettingError, one_line

CONCURRENCY: Final = 32  # requests at once: the server batches them
TIMEOUT_S: Final = 600.0

T = TypeVar("T")


def completions(
    url: str,
    setting: str,
    bodies: Sequence[Mapping[str, Any]],
    read: Callable[[int, Mapping[str, Any]], T],
    progress: Callable[[int, int], None] | None = None,
) -> list[T]:
    """What `read` makes of the reply to each body, in order. url: ".../v1", or without.

    setting: the name under which the user gave the URL. read: raises ValueError for a reply that will not do.
    """
    if not url.startswith(("http://", "https://")):
        raise SettingError(setting, url, "http://host:port, with or without /v1")
    endpoint = url.rstrip("/").removesuffix("/v1") + "/v1/completions"
    return asyncio.run(_completions(endpoint, bodies, read, progress))


async def _completions(
    endpoint: str,
    bodies: Sequence[Mapping[str, Any]],
    read: Callable[[int, Mapping[str, Any]], T],
    progress: Callable[[int, int], None] | None,
) -> list[T]:
    import aiohttp

    done = 0

    async def completion(index: int) -> T:
        nonlocal done
        try:
            async with session.post(endpoint, json=bodies[index]) as response:
                response.raise_for_status()
                result = read(index, json.loads(await response.read()))
        except (TimeoutError, aiohttp.ClientError, OSError, LookupError, ValueError, TypeError) as error:
            raise DataError(
                f"{endpoint} gave no answer to train on: {one_line(error)}; "
                "expected a vLLM server that runs the target"
            ) from None
        done += 1
        if progress is not None:
            progress(done, len(bodies))
        return result

    limit = aiohttp.TCPConnector(limit=CONCURRENCY)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=TIMEOUT_S, sock_read=TIMEOUT_S)
    async with aiohttp.ClientSession(connector=limit, timeout=timeout) as session:
        return await asyncio.gather(*map(completion, range(len(bodies))))
