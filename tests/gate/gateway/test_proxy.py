"""The gate in front of real servers: streams, failures, retries, keys, limits, reloading."""

import http.client
import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import yaml

from paceline.web import api_keys, config_file
from support.servers import IDLE_S, until
from support.upstreams import WORDS, Gate, Upstream, gate, upstream

TEXT = "".join(WORDS)
Chat = dict[str, Any]
HELLO: Chat = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}


@pytest.fixture(scope="module")
def upstreams() -> Iterator[tuple[Upstream, Upstream]]:
    with upstream("a") as a, upstream("b") as b:
        yield a, b


@pytest.fixture(autouse=True)
def _fresh(upstreams: tuple[Upstream, Upstream]) -> Iterator[None]:
    yield
    for one in upstreams:
        one.behaviour, one.hold, one.cancelled = "answer", None, 0
        one.requests.clear()


def config(both: tuple[Upstream, Upstream], **route: Any) -> dict[str, Any]:
    listed = [{"name": one.name, "url": one.url} for one in both]
    return {"upstreams": listed, "routes": [{"name": "all", "upstreams": {"a": 1}, **route}]}


def streamed(client: openai.OpenAI, **more: Any) -> str:
    chunks = client.chat.completions.create(**{**HELLO, **more}, stream=True)
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def breaker(running: Gate) -> str:
    return str(httpx.get(f"{running.url}/health").json()["upstreams"]["a"])


def test_whole_and_streamed_answers_pass_through_unchanged(
    upstreams: tuple[Upstream, Upstream], tmp_path: Path
) -> None:
    with gate(tmp_path, config(upstreams)) as running:
        whole = running.client().chat.completions.create(**HELLO)
        assert whole.choices[0].message.content == "a " + TEXT
        assert streamed(running.client()) == "a " + TEXT
        with httpx.Client() as client:
            url, body = "/v1/chat/completions", {**HELLO, "stream": True, "odd": [1.0, None]}
            direct = client.post(upstreams[0].url + url, json=body)
            through = client.post(running.url + url, json=body, headers={"connection": "x-hop", "x-hop": "1"})
    assert through.content == direct.content
    assert through.headers["x-own"] == "a"
    assert through.headers["x-paceline-upstream"] == "a"
    sent = upstreams[0].requests[-1]
    assert sent["odd"] == [1.0, None]
    assert "x-hop" not in sent["headers"]
    assert sent["headers"]["x-request-id"] == through.headers["x-request-id"]


def test_an_upstream_that_dies_within_a_stream_ends_it_with_an_error_event(
    upstreams: tuple[Upstream, Upstream], tmp_path: Path
) -> None:
    upstreams[0].behaviour = "cut"
    with gate(tmp_path, config(upstreams, fallback=["b"])) as running:
        with pytest.raises(openai.APIError, match="the upstream a ended its answer before the end"):
            streamed(running.client())
        raw = httpx.post(f"{running.url}/v1/chat/completions", json={**HELLO, "stream": True}).text
    events = [line.removeprefix("data: ") for line in raw.split("\n\n") if line]
    assert events[-1] == "[DONE]"
    contents = [json.loads(one)["choices"][0]["delta"]["content"] for one in events[:-2]]
    assert contents == ["a ", "one "]  # whole events only, and the error after them
    assert json.loads(events[-2])["error"]["code"] == "upstream_disconnect"
    assert not upstreams[1].requests


def test_another_upstream_takes_over_while_nothing_was_sent(
    upstreams: tuple[Upstream, Upstream], tmp_path: Path
) -> None:
    settings = config(upstreams, fallback=["b"], retries={"backoff_s": 0.0, "min_per_s": 100})
    settings["upstreams"][0]["breaker"] = {"failures": 1000}
    with gate(tmp_path, settings) as running:
        client = running.client()
        for behaviour in ("status 503", "drop", "comment, then cut", "status 429"):
            upstreams[0].behaviour = behaviour
            assert streamed(client) == "b " + TEXT
            if "comment" not in behaviour:
                answer = client.chat.completions.create(**HELLO)
                assert answer.choices[0].message.content == "b " + TEXT
    assert len(upstreams[0].requests) == 7


def test_an_upstream_that_is_not_there_or_silent_is_replaced(
    upstreams: tuple[Upstream, Upstream], tmp_path: Path
) -> None:
    settings = config(upstreams, upstreams={"gone": 1}, fallback=["slow", "b"], retries={"backoff_s": 0.0})
    settings["upstreams"] += [
        {"name": "gone", "url": "http://127.0.0.1:9"},
        {"name": "slow", "url": upstreams[0].url, "first_byte_timeout_s": 0.1},
    ]
    upstreams[0].hold = threading.Event()
    with gate(tmp_path, settings) as running:
        assert streamed(running.client()) == "b " + TEXT
        upstreams[0].hold.set()
    text = running.app.metrics.render()[0].decode()
    assert 'paceline_gate_upstream_failures_total{code="connect",route="all",upstream="gone"} 1.0' in text
    assert 'paceline_gate_upstream_failures_total{code="timeout",route="all",upstream="slow"} 1.0' in text


def test_a_stream_without_its_end_and_one_that_stalls_end_with_an_error(
    upstreams: tuple[Upstream, Upstream], tmp_path: Path
) -> None:
    settings = config(upstreams)
    upstreams[0].behaviour = "no done"
    with gate(tmp_path, settings) as running, pytest.raises(openai.APIError, match="before the end"):
        streamed(running.client())
    settings["upstreams"][0]["idle_timeout_s"] = 0.2
    upstreams[0].behaviour = "stall"
    with gate(tmp_path, settings) as running, pytest.raises(openai.APIError, match="in time"):
        streamed(running.client())


def test_errors_of_the_request_itself_are_the_upstreams_own_and_not_retried(
    upstreams: tuple[Upstream, Upstream], tmp_path: Path
) -> None:
    upstreams[0].behaviour = "status 400"
    settings = config(upstreams, fallback=["b"])
    with (
        gate(tmp_path, settings) as running,
        pytest.raises(openai.BadRequestError, match="a says 400"),
    ):
        streamed(running.client())
    assert not upstreams[1].requests


def test_retries_stay_within_their_budget(upstreams: tuple[Upstream, Upstream], tmp_path: Path) -> None:
    upstreams[0].behaviour = "status 503"
    settings = config(upstreams, retries={"budget": 0.1, "min_per_s": 0.0, "backoff_s": 0.0})
    settings["upstreams"][0]["breaker"] = {"failures": 1000}
    with gate(tmp_path, settings) as running:
        for _ in range(40):
            with pytest.raises(openai.InternalServerError, match="a says 503"):
                running.client().chat.completions.create(**HELLO)
    assert len(upstreams[0].requests) in range(42, 46)  # 40 and a tenth more


def test_the_breaker_opens_after_failures_and_one_request_closes_it_again(
    upstreams: tuple[Upstream, Upstream], tmp_path: Path
) -> None:
    settings = config(upstreams, retries={"max_attempts": 1})
    settings["upstreams"][0]["breaker"] = {"failures": 2, "open_s": 3600}
    upstreams[0].behaviour = "status 500"
    with gate(tmp_path, settings) as running:
        client = running.client()
        for _ in range(2):
            with pytest.raises(openai.InternalServerError, match="a says 500"):
                client.chat.completions.create(**HELLO)
        with pytest.raises(openai.InternalServerError, match="no upstream of the route all") as refused:
            client.chat.completions.create(**HELLO)
        assert 3000 < int(refused.value.response.headers["retry-after"]) <= 3600
        assert len(upstreams[0].requests) == 2
        assert breaker(running) == "open"
        upstreams[0].behaviour = "answer"
        running.app.client.states["a"].breaker.open_s = 0.0  # the hour is over
        assert breaker(running) == "half_open"
        assert streamed(client) == "a " + TEXT
        assert breaker(running) == "closed"


def test_a_client_that_leaves_ends_the_request_to_the_upstream(
    upstreams: tuple[Upstream, Upstream], tmp_path: Path
) -> None:
    upstreams[0].behaviour = "endless"
    with gate(tmp_path, config(upstreams)) as running:
        port = int(running.url.rpartition(":")[2])
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=IDLE_S)
        body = json.dumps({**HELLO, "stream": True})
        connection.request("POST", "/v1/chat/completions", body, {"content-type": "application/json"})
        assert connection.getresponse().read(10)
        connection.close()
        assert until(lambda: upstreams[0].cancelled == 1, IDLE_S)
        assert until(lambda: running.app.client.states["a"].in_flight == 0, IDLE_S)
        assert running.app.client.states["a"].breaker.state == "closed"


def test_routes_choose_by_model_header_and_key_and_a_conversation_stays_where_it_is(
    upstreams: tuple[Upstream, Upstream], tmp_path: Path
) -> None:
    settings = config(upstreams)
    settings["routes"] = [
        {"name": "by-model", "match": {"model": "big-*"}, "upstreams": {"b": 1}},
        {"name": "by-header", "match": {"header": {"x-team": "red"}}, "upstreams": {"b": 1}},
        {"name": "named", "match": {"model": "only"}, "upstreams": {"a": 1}},
        {"name": "rest", "match": {"model": "m"}, "upstreams": {"a": 1, "b": 1}},
    ]
    settings["upstreams"][1]["model"] = "its-own"
    with gate(tmp_path, settings) as running:
        client = running.client()
        assert streamed(client, model="big-one").startswith("b ")
        assert upstreams[1].requests[-1]["model"] == "its-own"
        assert streamed(client, extra_headers={"x-team": "red"}).startswith("b ")
        with pytest.raises(openai.NotFoundError, match="no route takes the model"):
            streamed(client, model="unknown")
        firsts = []
        for number in range(16):
            talk = [{"role": "user", "content": f"talk {number}"}]
            whole = [streamed(client, messages=talk)[:1]]
            talk += [{"role": "assistant", "content": "yes"}, {"role": "user", "content": "go on"}]
            whole.append(streamed(client, messages=talk)[:1])
            assert whole[0] == whole[1]
            firsts.append(whole[0])
        assert set(firsts) == {"a", "b"}
        assert {model.id for model in client.models.list()} == {"only", "m"}


def test_keys_open_routes_limits_hold_and_the_gates_key_stays_at_the_gate(
    upstreams: tuple[Upstream, Upstream], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UPSTREAM_KEY", "secret-of-a")
    file = tmp_path / "keys.json"
    alice, bob = (api_keys.add(file, name, {}) for name in ("alice", "bob"))
    limited = api_keys.add(file, "carol", {"tokens_per_minute": 20})
    settings = config(upstreams, keys=["alice", "carol"], limits={"requests_per_minute": 5})
    settings["upstreams"][0]["api_key_env"] = "UPSTREAM_KEY"
    settings["routes"].insert(0, {"name": "b", "match": {"model": "b"}, "upstreams": {"b": 1}})
    with gate(tmp_path, settings, keys=str(file)) as running:
        with pytest.raises(openai.AuthenticationError):
            streamed(running.client("wrong"))
        with pytest.raises(openai.PermissionDeniedError, match="not open to this key"):
            streamed(running.client(bob))
        assert streamed(running.client(alice)) == "a " + TEXT
        assert upstreams[0].requests[-1]["headers"]["authorization"] == "Bearer secret-of-a"
        assert streamed(running.client(bob), model="b") == "b " + TEXT
        assert "authorization" not in upstreams[1].requests[-1]["headers"]
        chunks = list(running.client(limited).chat.completions.create(**HELLO, stream=True))
        assert all(chunk.usage is None and chunk.choices for chunk in chunks)  # asked for by the gate alone
        streamed(running.client(limited))  # into debt
        with pytest.raises(openai.RateLimitError, match="20 tokens a minute"):
            streamed(running.client(limited))
        streamed(running.client(alice))
        streamed(running.client(alice))
        with pytest.raises(openai.RateLimitError, match="5 requests a minute"):
            streamed(running.client(alice))


def test_a_changed_file_is_read_again_and_a_broken_one_changes_nothing(
    upstreams: tuple[Upstream, Upstream], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config_file, "CHECK_EVERY_S", 0.0)
    with gate(tmp_path, config(upstreams)) as running:
        file, client = tmp_path / "gate.yaml", running.client()
        assert streamed(client).startswith("a ")

        def write(settings: dict[str, Any]) -> None:
            file.write_text(yaml.safe_dump(settings))
            os.utime(file, ns=(0, time.monotonic_ns()))

        write(config(upstreams, upstreams={"b": 1}))
        assert streamed(client).startswith("b ")
        write(config(upstreams, upstreams={"nobody": 1}))
        assert streamed(client).startswith("b ")
        file.write_text("routes: [")
        assert streamed(client).startswith("b ")


def test_a_body_that_is_too_large_or_no_json_is_refused(
    upstreams: tuple[Upstream, Upstream], tmp_path: Path
) -> None:
    with gate(tmp_path, config(upstreams), max_body=1000) as running:
        url = f"{running.url}/v1/chat/completions"
        assert httpx.post(url, json={"model": "x" * 2000}).status_code == 413
        json_type = {"content-type": "application/json"}
        assert httpx.post(url, content=b"{", headers=json_type).status_code == 400
        assert httpx.post(url, content=b'{"model":"m","model":"n"}', headers=json_type).status_code == 400
        assert httpx.post(f"{running.url}/v1/load_lora_adapter", json={}).status_code == 404
        foreign = httpx.post(url, json=HELLO, headers={"origin": "http://evil.example"})
        assert foreign.status_code == 403
    assert not upstreams[0].requests


def test_a_stop_ends_streams_with_their_last_event(
    upstreams: tuple[Upstream, Upstream], tmp_path: Path
) -> None:
    upstreams[0].behaviour = "endless"
    with gate(tmp_path, config(upstreams, fallback=["b"])) as running:
        chunks = running.client().chat.completions.create(**HELLO, stream=True)
        next(chunks)
        running.app.stop()
        with pytest.raises(openai.APIError, match="shutting down"):
            for _ in chunks:
                pass
