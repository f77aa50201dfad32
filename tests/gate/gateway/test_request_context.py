"""The body that an upstream gets."""

import asyncio
import json
from typing import Any

import pytest

from paceline.gate.gateway.config import Route
from paceline.gate.gateway.request_context import RequestContext
from paceline.gate.upstream import Upstream
from paceline.web.api_keys import Key

KEY = Key(name="acme", hash="0" * 64)


def sent(body: dict[str, Any], key: Key | None, path: str = "/v1/completions", **upstream: Any) -> Any:
    route = Route(name="all", upstreams={"a": 1})
    raw = json.dumps(body).encode()
    context = RequestContext(
        id="1", path=path, route=route, key=key, headers=[], raw=raw, body=body, conversation=""
    )
    return json.loads(asyncio.run(context.body_for(Upstream(name="a", url="http://a", **upstream))))


@pytest.mark.parametrize("given", [{}, {"vllm_xargs": {"tenant": "other"}}, {"vllm_xargs": "wrong"}])
def test_the_tenant_is_the_clients_key(given: dict[str, Any]) -> None:
    assert sent(given, KEY, send_tenant=True)["vllm_xargs"] == {"tenant": "acme"}


def test_a_client_without_a_key_has_no_tenant() -> None:
    given = {"vllm_xargs": {"tenant": "other", "remember": 0}}
    assert sent(given, None, send_tenant=True)["vllm_xargs"] == {"remember": 0}


def test_other_arguments_stay() -> None:
    fixed = {"vllm_xargs": {"remember": 0}}
    assert sent({}, KEY, send_tenant=True, extra_body=fixed)["vllm_xargs"] == {
        "remember": 0,
        "tenant": "acme",
    }


def test_upstreams_that_did_not_ask_for_it_get_no_tenant() -> None:
    assert sent({"prompt": "x"}, KEY) == {"prompt": "x"}
    assert sent({"prompt": "x"}, KEY, path="/tokenize", send_tenant=True) == {"prompt": "x"}
