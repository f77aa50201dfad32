"""An attack: finds the secret in a stranger's prompt token by token, by what a server tells of its caches."""

from collections.abc import Callable, Sequence
from typing import Any

import httpx

Observe = Callable[[list[int], int], int]  # (known prompt, guessed next token) -> a number


class Probe:
    """A client without a key. names: `user` and the like, which it claims for itself."""

    def __init__(self, url: str, model: str, **names: str) -> None:
        self._url, self._body = f"{url}/v1/completions", {"model": model, "temperature": 0, **names}
        self.requests = 0

    def ask(self, prompt: Sequence[int], **body: Any) -> dict[str, Any]:
        self.requests += 1
        sent = {**self._body, "prompt": list(prompt), "max_tokens": 1, "ignore_eos": True, **body}
        with httpx.Client(trust_env=False, timeout=60) as client:
            found: dict[str, Any] = client.post(self._url, json=sent).raise_for_status().json()
        return found

    def cached(self, known: list[int], guess: int) -> int:
        """More where the guess is right: it was cached too."""
        found = self.ask([*known, guess, 0, 0], remember=False)
        return int(found["usage"]["prompt_tokens_details"]["cached_tokens"])

    def cached_again(self, known: list[int], guess: int) -> int:
        """Sent twice: less where the guess is right, if its end was not kept beside the stranger's."""
        self.ask([*known, guess], remember=False)
        return -self.cached(known, guess)

    def drafted(self, known: list[int], guess: int) -> int:
        """By the suffix memory."""
        return self._accepted(known, guess, "suffix")

    def recycled(self, known: list[int], guess: int) -> int:
        """By the recycle memory."""
        return self._accepted(known, guess, "recycle")

    def _accepted(self, known: list[int], guess: int, drafter: str) -> int:
        """The model is made to write the guess: more where it was drafted from a memory of the prompt."""
        answer = self.ask(
            known,
            max_tokens=2,
            remember=False,
            metrics=True,
            logit_bias={str(guess): 100},
            speculative_config={"drafters": [drafter], "adaptive": False},
        )
        return int(answer["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"])


def observations(
    observe: Observe, known: Sequence[int], path: Sequence[int], alphabet: Sequence[int]
) -> list[list[int]]:
    """All that can be seen at each position of a path after `known`: a number for each guess."""
    return [[observe([*known, *path[:i]], guess) for guess in alphabet] for i in range(len(path))]


def search(observe: Observe, known: Sequence[int], alphabet: Sequence[int], length: int) -> list[int]:
    """The most likely secret after `known`."""
    found = list(known)
    for _ in range(length):
        seen = {guess: observe(found, guess) for guess in alphabet}
        found.append(max(seen, key=lambda guess: seen[guess]))
    return found[len(known) :]
