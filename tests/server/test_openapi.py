"""The served OpenAPI document, and the server held against it by schemathesis."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
import yaml
from hypothesis import HealthCheck, settings
from schemathesis import Case
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

from paceline.server.openai.openapi import document
from support import examples
from support.servers import NAME, Running, toy_running

pytestmark = pytest.mark.slow

CHECKS: list[Any] = [
    not_a_server_error,
    status_code_conformance,
    unsupported_method,
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
]
LONGEST_ANSWER = 4  # tokens


@pytest.fixture(scope="module")
def brief(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server whose answers are short, whatever is asked."""
    folder = tmp_path_factory.mktemp("brief")
    routes = folder / "routes.yaml"
    short = {"name": "short", "match": {"path": "*"}, "max_tokens": LONGEST_ANSWER}
    routes.write_text(yaml.safe_dump({"routes": [short]}))
    with toy_running(folder, routes=str(routes)) as found:
        yield found


@pytest.fixture(scope="module")
def server(toy_server: Running) -> Running:
    return toy_server


DESCRIBED = schemathesis.openapi.from_dict(document([NAME]))


@DESCRIBED.parametrize()
@settings(max_examples=examples(15), suppress_health_check=list(HealthCheck))
def test_every_answer_is_as_the_document_says(case: "Case[Any]", brief: Running) -> None:
    case.call_and_validate(base_url=brief.url, checks=CHECKS, timeout=60)


def test_the_document_is_served(server: Running) -> None:
    assert httpx.get(f"{server.url}/openapi.json", trust_env=False).json() == document([server.model])


def test_every_path_is_described(server: Running) -> None:
    routes = server.app.asgi().routes
    served = {route.path.replace(":path", ""): route.methods for route in routes}  # type: ignore[attr-defined]
    of_page = {path for path in served if path == "/" or path.startswith(("/page/", "/assets/"))}
    served = {path: methods for path, methods in served.items() if path not in of_page}
    described = document([server.model])["paths"]
    assert served.keys() == described.keys()
    for path, methods in served.items():
        assert {method.upper() for method in described[path]} == methods - {"HEAD"}
