"""A server with a trained drafter: requests and routes name it, and no word changes."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from support.heads import save_untrained
from support.servers import Running, running

pytestmark = pytest.mark.model

ROUTES = """
routes:
  - name: guessed
    match: {header: {x-team: heads}}
    drafters: [block]
    adaptive: false
"""


@pytest.fixture(scope="module")
def trained(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    home = tmp_path_factory.mktemp("server")
    (home / "routes.yaml").write_text(ROUTES)
    folder = save_untrained(home / "ours", smollm2_path)
    with running("smollm2-135m", trained=(str(folder),), routes=str(home / "routes.yaml")) as found:
        yield found


def answer_of(
    server: Running, temperature: float = 0.0, headers: Any = None, **config: Any
) -> tuple[str, Any]:
    """The text, and the report on its guesses."""
    found = server.client().completions.create(
        model=server.model,
        prompt="The capital of France is",
        temperature=temperature,
        seed=5,
        max_tokens=12,
        extra_headers=headers,
        extra_body={"metrics": True, **({"speculative_config": config} if config else {})},
    )
    return found.choices[0].text, found.to_dict()["metrics"]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(
    "named", [{"draft_model": "block"}, {"draft_model": "ours"}, {"drafters": ["block"]}]
)
def test_a_request_names_it(trained: Running, named: dict[str, Any], temperature: float) -> None:
    plain, _ = answer_of(trained, temperature, disabled=True)
    text, report = answer_of(trained, temperature, **named, adaptive=False, num_speculative_tokens=3)
    assert text == plain
    assert report["speculative_decoding"]["num_draft_tokens"] > 10  # nobody else was asked


def test_a_route_names_it(trained: Running) -> None:
    text, report = answer_of(trained, headers={"x-team": "heads"})
    assert text == answer_of(trained, disabled=True)[0]
    assert report["speculative_decoding"]["num_draft_tokens"] > 10


def test_by_default_it_drafts_last(trained: Running) -> None:
    assert trained.app.engine.llm.spec.drafters == ("grammar", "suffix", "ngram", "block")
    assert answer_of(trained)[0] == answer_of(trained, disabled=True)[0]


def test_a_kind_that_is_not_loaded_is_refused(trained: Running) -> None:
    with pytest.raises(openai.BadRequestError, match="'eagle' is known but not loaded"):
        answer_of(trained, draft_model="eagle")
