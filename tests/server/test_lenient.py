"""`--lenient`: unknown parameters are ignored and reported; known ones with bad values are errors."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.metrics import samples
from support.servers import NAME, Running, toy_running

CHAT = {"model": NAME, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "temperature": 0}
PLAIN = {"model": NAME, "prompt": "Hi", "max_tokens": 4, "temperature": 0}
RESPONSE = {"model": NAME, "input": "Hi", "max_output_tokens": 16, "temperature": 0}
HEADER = "x-ignored-parameters"


@pytest.fixture(scope="module")
def easy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with toy_running(tmp_path_factory.mktemp("lenient"), lenient=True) as found:
        yield found


def post(server: Running, path: str, body: Any, **more: Any) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json=body | more, trust_env=False, timeout=600)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/completions", PLAIN),
        ("/v1/responses", RESPONSE),
        ("/v1/prefill", PLAIN),
        ("/v1/embeddings", {"input": "Hi"}),
        ("/tokenize", {"prompt": "Hi"}),
    ],
)
def test_an_unknown_parameter_is_ignored_and_named(easy: Running, path: str, body: dict[str, Any]) -> None:
    answer = post(easy, path, body, colour="red", thinking={"budget": 1})
    assert answer.status_code == 200
    assert answer.headers[HEADER] == "colour, thinking"
    assert HEADER not in post(easy, path, body).headers


def test_the_answer_is_that_without_it(easy: Running) -> None:
    plain = post(easy, "/v1/completions", PLAIN).json()["choices"]
    assert post(easy, "/v1/completions", PLAIN, colour="red").json()["choices"] == plain


def test_parts_of_known_parameters_are_ignored_too(easy: Running) -> None:
    more = {"speculative_config": {"max_draft": 2, "method": "x"}, "stream": True, "stream_options": {"a": 1}}
    answer = post(easy, "/v1/chat/completions", CHAT, **more)
    assert answer.text.endswith("data: [DONE]\n\n")
    assert answer.headers[HEADER] == "stream_options.a, speculative_config.method"
    item = {"type": "message", "role": "user", "content": "Hi", "colour": "red"}
    tool = {"type": "function", "name": "f", "parameters": {"type": "object"}, "colour": "red"}
    answer = post(easy, "/v1/responses", RESPONSE, input=[item], tools=[tool])
    assert answer.status_code == 200
    assert set(answer.headers[HEADER].split(", ")) == {"input[0].colour", "tools[0].colour"}


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"temperature": "hot", "colour": 1}, "temperature"),
        ({"n": 0, "colour": 1}, "n"),
        ({"audio": {"voice": "x"}, "colour": 1}, "audio"),
        ({"speculative_config": {"max_draft": 1, "num_speculative_tokens": 1}}, "num_speculative_tokens"),
        ({"speculative_config": {"max_draft": 65, "colour": 1}}, "max_draft"),
        ({"messages": "Hi", "colour": 1}, "messages"),
    ],
)
def test_a_known_parameter_with_a_bad_value_is_an_error(
    easy: Running, more: dict[str, Any], param: str
) -> None:
    answer = post(easy, "/v1/chat/completions", CHAT, **more)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].endswith(param)


def test_more_than_a_few_unknown_parameters_are_an_error(tmp_path: Path) -> None:
    with toy_running(tmp_path, lenient=True) as easy:
        many = {f"p{i}": i for i in range(64)}
        assert post(easy, "/v1/completions", PLAIN, **many).status_code == 200
        assert post(easy, "/v1/completions", PLAIN, **many, p64=64).status_code == 400
        post(easy, "/v1/completions", PLAIN, another=1)  # beyond the labels there may be
        found = samples(easy.app.log.metrics)
        assert found["paceline_ignored_parameters_total", frozenset({("parameter", "other")})] == 1


def test_metrics_count_it_and_the_log_names_it_once(easy: Running, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        post(easy, "/v1/completions", PLAIN, shape="round", **{"na\nme, \u00e9": 1})
    found = samples(easy.app.log.metrics)
    assert found["paceline_ignored_parameters_total", frozenset({("parameter", "shape")})] == 3
    lines = [line for line in caplog.messages if "shape" in line]
    assert lines == ["the parameter shape is unknown, and ignored"]
    assert all("\n" not in line for line in caplog.messages)


def test_a_server_is_strict_by_default(toy_server: Running) -> None:
    answer = post(toy_server, "/v1/completions", PLAIN, colour="red")
    assert answer.status_code == 400
    assert "colour: unknown key 'colour'" in answer.json()["error"]["message"]
