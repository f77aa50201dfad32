"""Tenants, by API key, cache key and user, share neither the prefix cache nor what drafters learned."""

from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from paceline.web import api_keys
from support.servers import Running, running

pytestmark = pytest.mark.model

MODEL = "smollm2-135m"
WORDS = "one two three four five six seven eight nine ten"
_numbers = count()


class Server(NamedTuple):
    running: Running
    anna: str
    bert: str


@pytest.fixture(scope="module")
def shared(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    file = tmp_path_factory.mktemp("keys") / "keys.json"
    anna, bert = api_keys.add(file, "anna"), api_keys.add(file, "bert")
    with running(MODEL, keys=str(file)) as found:
        yield Server(found, anna, bert)


class Told(NamedTuple):
    cached: int  # prompt tokens
    accepted: int  # guesses


def ask(server: Server, key: str, text: str, **asked: Any) -> Told:
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": 24,
        "temperature": 0,
        "metrics": True,
        "speculative_config": {"drafters": ["suffix"], "adaptive": False},
        **asked,
    }
    headers = {"authorization": f"Bearer {key}"}
    with httpx.Client(trust_env=False, timeout=60) as client:
        url = f"{server.running.url}/v1/chat/completions"
        answer = client.post(url, json=body, headers=headers).raise_for_status().json()
    spec = answer["metrics"]["speculative_decoding"]
    return Told(answer["usage"]["prompt_tokens_details"]["cached_tokens"], spec["num_accepted_draft_tokens"])


def a_text() -> str:
    """One that no other test asks."""
    return f"Story number {next(_numbers)}: {WORDS}."


def only_here(text: str, asked: dict[str, str]) -> dict[str, str]:
    """Names that no other test has."""
    return {name: f"{value} {text}" for name, value in asked.items()}


SAME: list[tuple[dict[str, str], dict[str, str]]] = [
    ({"user": "u"}, {"user": "u"}),
    ({"user": "u"}, {"safety_identifier": "u"}),
    ({"user": "u"}, {"user": "u", "safety_identifier": "other"}),
    ({"prompt_cache_key": "c"}, {"prompt_cache_key": "c"}),
    ({"prompt_cache_key": "c", "user": "u"}, {"prompt_cache_key": "c", "user": "v"}),
]
APART: list[tuple[dict[str, str], dict[str, str]]] = [
    ({"user": "u"}, {"user": "v"}),
    ({"safety_identifier": "u"}, {"safety_identifier": "v"}),
    ({"prompt_cache_key": "c"}, {"prompt_cache_key": "d"}),
    ({"prompt_cache_key": "c", "user": "u"}, {"prompt_cache_key": "d", "user": "u"}),
    ({"prompt_cache_key": "x"}, {"user": "x"}),
]


@pytest.mark.parametrize(("first", "second"), SAME)
def test_these_share(shared: Server, first: dict[str, str], second: dict[str, str]) -> None:
    text = a_text()
    cold = ask(shared, shared.anna, text, **only_here(text, first))
    warm = ask(shared, shared.anna, text, **only_here(text, second))
    assert warm.cached > cold.cached
    assert warm.accepted > cold.accepted


@pytest.mark.parametrize(("first", "second"), APART)
def test_these_do_not(shared: Server, first: dict[str, str], second: dict[str, str]) -> None:
    text = a_text()
    cold = ask(shared, shared.anna, text, **only_here(text, first))
    assert ask(shared, shared.anna, text, **only_here(text, second)) == Told(0, cold.accepted)


@pytest.mark.parametrize("asked", [{"user": "u"}, {"prompt_cache_key": "c"}, {"safety_identifier": "u"}])
def test_another_api_key_shares_nothing(shared: Server, asked: dict[str, str]) -> None:
    text = a_text()
    own = only_here(text, asked)
    cold = ask(shared, shared.anna, text, **own)
    assert ask(shared, shared.anna, text, **own).cached > 0
    assert ask(shared, shared.bert, text, **own) == cold == Told(0, cold.accepted)
