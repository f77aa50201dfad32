"""gate.yaml: every problem at once, and an example that can be used."""

from pathlib import Path

import pytest
import yaml

from paceline.gate.gateway.config import GateConfigError, load

EXAMPLE = Path(__file__).parents[3] / "examples" / "gate.yaml"


def test_the_example_can_be_used_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    config = load(EXAMPLE)
    first = config.route("/v1/chat/completions", {"x-agent": "coder"}, "smollm2-135m", None)
    assert first is not None
    assert first.name == "agents"
    assert config.plans["agents-speculative"].stages == (0.1, 0.25, 0.5, 1.0)
    rest = config.route("/v1/chat/completions", {}, "anything", None)
    assert rest is not None
    assert rest.name == "everything-else"


def test_every_problem_is_listed(tmp_path: Path) -> None:
    file = tmp_path / "gate.yaml"
    file.write_text(
        yaml.safe_dump(
            {
                "upstreams": [
                    {"name": "a", "url": "http://h:1"},
                    {"name": "a", "url": "http://h:1", "api_key_env": "PACELINE_NO_SUCH_VARIABLE"},
                ],
                "routes": [
                    {"name": "r", "upstreams": {"b": 1}},
                    {"name": "r", "upstreams": {"a": 0}, "fallback": ["aa"]},
                ],
            }
        )
    )
    with pytest.raises(GateConfigError) as error:
        load(file)
    problems = "\n".join(error.value.problems)
    for part in (
        "upstreams[1].name: 'a' is the name of upstreams[0]",
        "PACELINE_NO_SUCH_VARIABLE is not set",
        "routes[0]: has no match",
        "routes[0].upstreams: unknown upstream 'b'",
        "routes[1].name: 'r'",
        "routes[1].upstreams: expected at least one with a weight above 0",
        "routes[1].fallback: unknown upstream 'aa'",
    ):
        assert part in problems


def test_shapes_are_checked_and_unknown_keys_name_the_known_ones(tmp_path: Path) -> None:
    file = tmp_path / "gate.yaml"
    file.write_text("upstreams: [{name: a, url: ftp://x}]\nroutes: [{name: r, upstream: {a: 1}}]\n")
    with pytest.raises(GateConfigError) as error:
        load(file)
    text = str(error.value)
    assert "upstreams[0].url: 'ftp://x' is not usable: expected http://host:port" in text
    assert "upstream" in text
    assert "fallback" in text


def test_mirrors_and_promotions_are_checked(tmp_path: Path) -> None:
    file = tmp_path / "gate.yaml"
    file.write_text(
        """
upstreams: [{name: a, url: "http://h:1"}, {name: b, url: "http://h:2"}]
routes:
  - {name: r, match: {model: x}, upstreams: {a: 1}, mirror: {candidate: c}}
  - {name: s, match: {model: y}, upstreams: {a: 1}, mirror: {candidate: a}, promotion: {}}
  - {name: t, match: {model: z}, upstreams: {a: 1}, promotion: {}}
  - {name: u, match: {model: m}, upstreams: {a: 1}, mirror: {candidate: b, experiment: e}}
  - {name: v, upstreams: {a: 1}, mirror: {candidate: b, experiment: e}}
"""
    )
    with pytest.raises(GateConfigError) as error:
        load(file)
    problems = "\n".join(error.value.problems)
    for part in (
        "routes[0].mirror.candidate: unknown upstream 'c'",
        "routes[1].promotion: expected a candidate that is none of the route's own upstreams",
        "routes[2].promotion: expected a mirror too",
        "routes[4].mirror.experiment: 'e' is that of routes[3] already",
    ):
        assert part in problems
    file.write_text(
        "upstreams: [{name: a, url: 'http://h:1'}, {name: b, url: 'http://h:2'}]\n"
        "routes: [{name: r, upstreams: {a: 1}, mirror: {candidate: b}, promotion: {stages: [0.5, 0.1]}}]\n"
    )
    with pytest.raises(GateConfigError, match=r"routes\[0\].promotion.stages: .* shares above 0 that rise"):
        load(file)
