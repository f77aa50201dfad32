"""Every answer has the header x-request-id, as clients and proxies expect."""

from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from paceline.trace.store import Store
from support.servers import Running, toy_running

ASKED: list[Any] = [{"role": "user", "content": "hi"}]


def test_errors_have_one(toy_server: Running) -> None:
    client = toy_server.client()
    asked: dict[str, Any] = {"model": toy_server.model, "messages": ASKED, "max_tokens": 2}
    wrong: list[dict[str, Any]] = [{"top_p": 7}, {"model": "gpt-9"}, {"stop": [""]}, {"extra_body": {"a": 1}}]
    seen = set()
    for stream in (False, True):
        for each in wrong:
            with pytest.raises(openai.APIStatusError) as caught:
                client.chat.completions.create(**{**asked, **each}, stream=stream)
            seen.add(caught.value.request_id)
    assert None not in seen
    assert len(seen) == 2 * len(wrong)


@pytest.mark.parametrize(
    "path", ["/health", "/ready", "/metrics", "/version", "/v1/models", "/nothing", "/tokenize"]
)
def test_everything_else_has_one(toy_server: Running, path: str) -> None:
    found = httpx.get(f"{toy_server.url}{path}", trust_env=False, headers={"X-Request-Id": "abc"})
    assert found.headers["x-request-id"].endswith("-abc")


@pytest.mark.parametrize(
    ("given", "used"),
    [("my-id.7", True), ("x" * 64, True), ("x" * 65, False), ("a b", False), ("\u00e9", False)],
)
def test_a_clients_own_is_kept_if_it_is_fit_for_that(toy_server: Running, given: str, used: bool) -> None:
    headers = {b"X-Request-Id": given.encode("latin-1")}
    found = httpx.get(f"{toy_server.url}/version", trust_env=False, headers=headers).headers["x-request-id"]
    assert found.endswith(f"-{given}") is used


def test_the_answer_and_its_trace_have_the_same(tmp_path: Path) -> None:
    with toy_running(tmp_path, store=str(tmp_path / "t.db")) as server:
        headers = {"X-Request-Id": "mine"}
        client = server.client()
        raw = client.completions.with_raw_response.create(
            model=server.model, prompt="x", max_tokens=2, extra_headers=headers
        )
        again = client.completions.with_raw_response.create(
            model=server.model, prompt="x", max_tokens=2, extra_headers=headers
        )
        names = [each.headers["x-request-id"] for each in (raw, again)]
        assert names == [raw.parse().id, again.parse().id]
        assert len(set(names)) == 2
        assert all(name.startswith("cmpl-") and name.endswith("-mine") for name in names)
    with closing(Store.open(str(tmp_path / "t.db"))) as store:
        assert {record["id"] for record in store.export()} == set(names)
