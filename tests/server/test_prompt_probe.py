"""One client's attempt to find another's prompt, token by token."""

from collections.abc import Iterator
from itertools import count

import pytest

from support.prompt_probe import Probe, observations, search
from support.servers import NAME, Running, toy_running

ALPHABET = range(10, 20)
SECRET, OTHER = [13, 10, 19, 14], [17, 12, 11, 15]
BLOCK = 64
WAYS = ["cached", "cached_again", "drafted", "recycled"]
_texts = count()


@pytest.fixture(scope="module")
def server(toy_server: Running) -> Running:
    return toy_server


@pytest.fixture(scope="module")
def single_user(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with toy_running(tmp_path_factory.mktemp("single"), single_user=True) as found:
        yield found


def a_prompt(length: int = 40) -> list[int]:
    """Tokens that no other test sends in this order, none of the alphabet and none twice."""
    number = next(_texts)
    return [30 + (number * 97 + i * (5 + number % 3 * 2)) % 800 for i in range(length)]


def seen(way: str, known: list[int], secret: list[int], victim: Probe, probe: Probe) -> list[list[int]]:
    """What a probe sees on the way to SECRET, after a victim's prompt with this secret."""
    victim.ask([*known, *secret, 5])
    return observations(getattr(probe, way), known, SECRET, ALPHABET)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("way", ["cached", "drafted"])
@pytest.mark.parametrize("names", [{"user": "u"}, {"cache_salt": "s"}])
def test_who_shares_a_name_shares_everything(server: Running, way: str, names: dict[str, str]) -> None:
    known, probe = a_prompt(), Probe(server.url, NAME, **names)
    probe.ask([*known, *SECRET, 5])
    assert search(getattr(probe, way), known, ALPHABET, len(SECRET)) == SECRET
    assert probe.requests == 1 + len(SECRET) * len(ALPHABET)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("length", [20, BLOCK + 5])
@pytest.mark.parametrize("way", WAYS)
def test_without_names_nothing_depends_on_the_secret(server: Running, way: str, length: int) -> None:
    clients = Probe(server.url, NAME), Probe(server.url, NAME)
    first, second = (seen(way, a_prompt(length), secret, *clients) for secret in (SECRET, OTHER))
    assert first == second


@pytest.mark.sampled(5)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("names", [{"user": "v"}, {"cache_salt": "t"}, {"user": "u", "cache_salt": "t"}, {}])
def test_with_other_names_nothing_depends_on_the_secret(
    server: Running, way: str, names: dict[str, str]
) -> None:
    clients = Probe(server.url, NAME, user="u"), Probe(server.url, NAME, **names)
    first, second = (seen(way, a_prompt(), secret, *clients) for secret in (SECRET, OTHER))
    assert first == second


def test_a_whole_block_that_is_known_is_found(server: Running) -> None:
    """The strength that remains: a guess of all that a block has is confirmed."""
    known = a_prompt(BLOCK - len(SECRET))
    Probe(server.url, NAME).ask([*known, *SECRET, 5, 6, 7])
    probe = Probe(server.url, NAME)
    assert probe.cached([*known, *SECRET[:-1]], SECRET[-1]) == BLOCK
    assert probe.cached([*known, *SECRET[:-1]], SECRET[-1] + 1) == 0


def test_a_conversation_without_a_name_goes_on_from_its_last_token(server: Running) -> None:
    first = a_prompt(BLOCK + 30)
    probe = Probe(server.url, NAME)
    probe.ask(first)
    found = probe.ask([*first, 11, 12, 13])
    assert found["usage"]["prompt_tokens_details"]["cached_tokens"] == len(first)


@pytest.mark.parametrize("way", ["cached", "drafted"])
def test_a_server_of_one_user_shares_everything(single_user: Running, way: str) -> None:
    known, probe = a_prompt(), Probe(single_user.url, NAME)
    probe.ask([*known, *SECRET, 5])
    assert search(getattr(probe, way), known, ALPHABET, len(SECRET)) == SECRET
