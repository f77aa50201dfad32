"""The served OpenAPI document, and the server held against it by schemathesis."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
import yaml
from hypothesis import HealthCheck, settings
from running import Running, running
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

pytestmark = pytest.mark.model

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
def brief(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server whose answers are short, whatever is asked."""
    routes = tmp_path_factory.mktemp("routes") / "routes.yaml"
    short = {"name": "short", "match": {"path": "*"}, "max_tokens": LONGEST_ANSWER}
    routes.write_text(yaml.safe_dump({"routes": [short]}))
    with running("smollm2-135m", routes=str(routes)) as found:
        yield found


@pytest.fixture(scope="module")
def described(brief: Running) -> Any:
    return schemathesis.openapi.from_url(f"{brief.url}/openapi.json")


schema = schemathesis.pytest.from_fixture("described")


@schema.parametrize()
@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
def test_every_answer_is_as_the_document_says(case: Case) -> None:
    case.call_and_validate(checks=CHECKS, timeout=60)
