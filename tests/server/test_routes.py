"""Routes: what a file may say, what it is told otherwise, and which route a request takes."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from paceline.config import SpecConfig
from paceline.errors import SettingError
from paceline.server.launch import ServerSettings
from paceline.server.openai.protocol import CompletionRequest
from paceline.server.routes import (
    MAX_PROMPT_CHARS,
    Match,
    Route,
    RouteError,
    RouteFile,
    RouteRequest,
    Routes,
    load,
    prompt_class,
)
from paceline.web import request_body
from support.servers import toy_running

PAGE = Path(__file__).parents[2] / "docs" / "routes.md"
TOOL = {"type": "function", "function": {"name": "search", "parameters": {}}}


def loaded(tmp_path: Path, *routes: Any) -> Routes:
    file = tmp_path / "routes.yaml"
    file.write_text(yaml.safe_dump({"routes": list(routes)}))
    return load(file)


def problems(tmp_path: Path, text: str, known: set[str] | None = None) -> tuple[str, ...]:
    file = tmp_path / "routes.yaml"
    file.write_text(text)
    with pytest.raises(RouteError) as refused:
        load(file, known)
    assert str(refused.value) == "\n".join(refused.value.problems)
    return refused.value.problems


def one_problem(tmp_path: Path, route: str) -> str:
    file = f"routes:\n- {{name: first, match: {{path: /a}}}}\n- {{name: x, {route}}}\n"
    (problem,) = problems(tmp_path, file)
    return problem


@pytest.mark.parametrize(
    ("match", "request_", "taken"),
    [
        ({"path": "/v1/*"}, RouteRequest(path="/v1/chat/completions"), True),
        ({"path": "/v1/*"}, RouteRequest(path="/v2/chat"), False),
        ({"path": "/V1/*"}, RouteRequest(path="/v1/chat"), False),
        ({"model": "qwen*"}, RouteRequest(model="qwen2.5"), True),
        ({"model": "qwen*"}, RouteRequest(model="a-qwen"), False),
        ({"header": {"X-Agent": "plan*"}}, RouteRequest(headers={"x-aGENT": "planner"}), True),
        ({"header": {"x-agent": "plan*"}}, RouteRequest(headers={"x-agent": "tester"}), False),
        ({"header": {"x-agent": "*"}}, RouteRequest(), False),
        ({"header": {"a": "1", "b": "2"}}, RouteRequest(headers={"a": "1", "b": "2"}), True),
        ({"header": {"a": "1", "b": "2"}}, RouteRequest(headers={"a": "1"}), False),
        ({"tools": ["read", "grep"]}, RouteRequest(tools=frozenset({"grep", "x"})), True),
        ({"tools": ["read", "grep"]}, RouteRequest(tools=frozenset({"x"})), False),
        ({"prompt": "code"}, RouteRequest(prompt="code"), True),
        ({"prompt": "code"}, RouteRequest(prompt="chat"), False),
        ({"path": "/a", "model": "m"}, RouteRequest(path="/a", model="m"), True),
        ({"path": "/a", "model": "m"}, RouteRequest(path="/a", model="n"), False),
    ],
)
def test_a_route_is_taken_if_all_that_is_given_holds(
    tmp_path: Path, match: dict[str, Any], request_: RouteRequest, taken: bool
) -> None:
    routes = loaded(tmp_path, {"name": "x", "match": match})
    assert (routes.find(request_).name == "x") == taken


def test_the_first_match_wins_and_the_rest_takes_the_default(tmp_path: Path) -> None:
    wide, narrow = {"name": "wide", "match": {"path": "/*"}}, {"name": "narrow", "match": {"path": "/a"}}
    assert loaded(tmp_path, wide, narrow).find(RouteRequest(path="/a")).name == "wide"
    assert loaded(tmp_path, narrow, wide).find(RouteRequest(path="/a")).name == "narrow"
    assert loaded(tmp_path, narrow).find(RouteRequest(path="/b")) == Route(name="default")
    own = loaded(tmp_path, narrow, {"name": "rest", "enabled": False})
    assert own.find(RouteRequest(path="/b")).name == "rest"
    assert len(own.routes) == 2
    assert loaded(tmp_path).find(RouteRequest()) == Routes().find(RouteRequest()) == Route(name="default")


@given(st.lists(st.sampled_from(["/a", "/b*", "/*", "?a", "/[ab]"]), max_size=6), st.text("/ab", max_size=3))
def test_some_route_is_always_found(globs: list[str], path: str) -> None:
    routes = [Route(name=f"r{i}", match=Match(path=glob)) for i, glob in enumerate(globs)]
    found = Routes((*routes, Route(name="default"))).find(RouteRequest(path=path))
    holding = [r.name for r in routes if r.match and r.match.holds(RouteRequest(path=path))]
    assert found.name == (holding[0] if holding else "default")


@pytest.mark.parametrize(
    ("route", "said"),
    [
        ("match: {header: {X-a: on}}", "routes[1].match.header.X-a: True is not usable: expected a text"),
        ("match: {header: []}", "routes[1].match.header: [] is not usable: expected a mapping"),
        ("match: {header: {}}", "routes[1].match.header: {} is not usable: expected at least one entry"),
        ("match: {header: {a: x, A: y}}", "expected every header once"),
        ("match: {header: {on: x}}", "routes[1].match.header: the key True is not usable"),
        ("match: {tools: []}", "routes[1].match.tools: [] is not usable: expected at least one entry"),
        ("match: {tools: read}", "routes[1].match.tools: 'read' is not usable: expected a list"),
        ("match: {prompt: poem}", "expected 'code', 'json', 'chat' or 'tools'"),
        (
            "match: {promt: code}",
            "routes[1].match: unknown key 'promt'; did you mean 'prompt'? Known: path, ",
        ),
        ("match: {}", "routes[1].match: {} is not usable: expected at least one condition"),
        ("match:", "routes[1].match: empty: give it a value or leave it out"),
        ("match: all", "routes[1].match: 'all' is not usable: expected a mapping"),
        ("drafters: suffix", "routes[1].drafters: 'suffix' is not usable: expected a list"),
        ("drafters: [1]", "routes[1].drafters[0]: 1 is not usable: expected a text"),
        (
            "max_draft: 65",
            "routes[1].max_draft: 65 is not usable: expected 0 to 64",
        ),
        ("num_speculative_tokens: '8'", "expected a whole number"),
        ("num_speculative_tokens: true", "expected a whole number"),
        ("tree_width: 0", "routes[1].tree_width: 0 is not usable: expected 1 to 16"),
        ("tree_width: 2, accept: block", "routes[1].tree_width: 2 is not usable: expected 1"),
        ("adaptive: 1", "routes[1].adaptive: 1 is not usable: expected true or false"),
        ("accept: greedy", "expected 'match', 'residual', 'block' or 'typical'"),
        ("acceptance_threshold: 1.1", "routes[1].acceptance_threshold: 1.1 is not usable: expected 0 to 1"),
        ("acceptance_threshold: .nan", "expected a finite number"),
        ("max_tokens: 0", "routes[1].max_tokens: 0 is not usable: expected 1 to 10,000,000"),
        ("max_prompt_tokens: 1.5", "expected a whole number"),
        ("timeout_s: 0", "expected 0.001 to 86,400"),
        ("timeout_s: 2024-01-01", "routes[1].timeout_s: reads as a date: put it in quotes"),
        ("priority: high", "routes[1].priority: 'high' is not usable: expected a whole number"),
        ("remember: maybe", "expected true or false"),
        ("trace_txt: true", "unknown key 'trace_txt'; did you mean 'trace_text'?"),
        (
            "predicted: {tokens_per_pass: 2, speedup: 1, concurrency: 4, loads: "
            "[{tokens_per_pass: 2, speedup: 1}]}",
            "routes[1].predicted.loads[0]: concurrency is missing",
        ),
        (
            "predicted: {tokens_per_pass: 2, speedup: 1, loads: "
            "[{tokens_per_pass: 2, speedup: 1, concurrency: 4}]}",
            "is not usable: expected `concurrency` beside `loads`: the outputs at once",
        ),
        ("colour: red", "routes[1]: unknown key 'colour'. Known: name, match, enabled, drafters, "),
    ],
)
def test_a_mistake_is_reported_with_its_path(tmp_path: Path, route: str, said: str) -> None:
    assert said in one_problem(tmp_path, route)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "the file: empty"),
        ("[]", "the file: [] is not usable: expected a mapping"),
        ("{}", "the file: routes is missing"),
        ("routes: {}", "routes: {} is not usable: expected a list"),
        ("routes: []\nroute: []", "the file: unknown key 'route'; did you mean 'routes'? Known: routes"),
        ("routes: [{}]", "routes[0]: name is missing"),
        ("routes: [{name: 7}]", "routes[0].name: 7 is not usable: expected a text"),
        ("routes: [{name: a b}]", "routes[0].name: 'a b' is not usable: expected 1 to 64 letters"),
        ('routes: [{name: "a\\n"}]', "expected 1 to 64 letters"),
        ("routes: [{name: a}, {name: b}]", "routes[0]: has no match and so takes every request"),
        ("routes: [{name: default, match: {path: x}}]", "routes[0].name: 'default' is the route of what"),
        (
            "routes: [{name: a, match: {path: x}}, {name: a}]",
            "routes[1].name: 'a' is the name of routes[0] already",
        ),
    ],
)
def test_what_is_wrong_with_the_whole(tmp_path: Path, text: str, said: str) -> None:
    (problem,) = problems(tmp_path, text)
    assert said in problem


def test_every_problem_is_reported_at_once(tmp_path: Path) -> None:
    routes = """routes:
- {name: a, remember: 1, x: 1}
- {tree_width: 99, match: , drafters: [sufix]}
- {name: a, match: {path: /a}, accept: block, tree_width: 2, timeout_s: 2024-01-01}
- just a text
"""
    assert problems(tmp_path, routes, {"suffix"}) == (
        "routes[1].match: empty: give it a value or leave it out",
        "routes[2].timeout_s: reads as a date: put it in quotes",
        "routes[0].remember: 1 is not usable: expected true or false",
        f"routes[0]: unknown key 'x'. Known: {', '.join(Route.model_fields)}",
        "routes[1]: name is missing",
        "routes[1].tree_width: 99 is not usable: expected 1 to 16",
        "routes[3]: 'just a text' is not usable: expected a mapping",
        "routes[0]: has no match and so takes every request: expected it to be the last route",
        "routes[2].name: 'a' is the name of routes[0] already",
        "routes[2].tree_width: 2 is not usable: expected 1, as accept is 'block'",
        "routes[1].drafters[0]: unknown drafter 'sufix'; did you mean 'suffix'? "
        "Known: block, eagle, medusa, model, quantized, self, suffix",
    )


def test_old_names_of_settings_are_taken(tmp_path: Path) -> None:
    old = {"name": "a", "num_speculative_tokens": 3, "acceptance_threshold": 0.5, "learn": False}
    new = {"name": "a", "max_draft": 3, "threshold": 0.5, "remember": False}
    assert loaded(tmp_path, old) == loaded(tmp_path, new)
    assert loaded(tmp_path, new).routes[0].spec(SpecConfig()) == SpecConfig(max_draft=3, threshold=0.5)


def test_an_old_name_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    request_body._log_once.cache_clear()
    loaded(tmp_path, {"name": "a", "remember": False})
    assert caplog.messages == []
    for _ in range(2):
        loaded(tmp_path, {"name": "a", "learn": False})
        assert (
            request_body.parse_request(
                {"model": "m", "prompt": "x", "learn": False}, CompletionRequest
            ).remember
            is False
        )
    assert caplog.messages == ["the field learn is now called remember; the old name will be removed"]


def test_drafters_that_are_not_loaded_are_refused_if_the_loaded_ones_are_known(tmp_path: Path) -> None:
    a, b = "match: {path: x}, drafters: [suffix, sufix]", "drafters: [block]"
    text = f"routes: [{{name: a, {a}}}, {{name: b, {b}}}]"
    unknown, not_loaded = problems(tmp_path, text, {"suffix", "ngram"})
    assert unknown.startswith(
        "routes[0].drafters[1]: unknown drafter 'sufix'; did you mean 'suffix'? Known: "
    )
    assert not_loaded == (
        "routes[1].drafters[0]: the drafter 'block' is known but not loaded: load the model with "
        "trained=[...] (--trained), a head of kind block. Loaded: ngram, suffix"
    )
    assert load(tmp_path / "routes.yaml").routes[0].drafters == ("suffix", "sufix")


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["routes", "name", "match", "header", "tools", "drafters", "timeout_s"])
            | st.text(max_size=3),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(anything)
def test_any_data_is_routes_or_our_error(tmp_path_factory: pytest.TempPathFactory, data: Any) -> None:
    file = tmp_path_factory.getbasetemp() / "any.yaml"
    for content in (data, {"routes": data}, {"routes": [data]}):
        file.write_text(yaml.safe_dump(content, allow_unicode=True), encoding="utf-8")
        said: tuple[str, ...] = ("fine",)
        try:
            assert load(file).find(RouteRequest())
        except RouteError as error:
            said = error.problems
        assert said
        assert all(len(line.splitlines()) == 1 for line in said)


def test_a_problem_is_one_line_whatever_the_file_says(tmp_path: Path) -> None:
    for route in ('match: {header: {"a\\nb": 1}}', 'match: {header: {"a\\nb": }}', '"a\\nb": 1'):
        assert len(one_problem(tmp_path, route).splitlines()) == 1


def test_a_route_is_laid_over_the_servers_settings() -> None:
    base = SpecConfig(("ngram",), 6, 2, False, "residual")
    assert Route(name="x").spec(base) == base
    assert Route(name="x", drafters=("suffix",), max_draft=0).spec(base) == SpecConfig(
        ("suffix",), 0, 2, False, "residual"
    )
    assert Route(name="x", adaptive=True, accept="match", tree_width=1).spec(base) == SpecConfig(
        ("ngram",), 6, 1, True, "match"
    )
    plain = Route(name="x", enabled=False, drafters=("suffix",), max_draft=4).spec(base)
    assert (plain.drafters, plain.max_draft) == ((), 0)
    named = Route(name="x", drafters=("block", "suffix"))
    assert named.spec(base, {"suffix", "ngram"}).drafters == ("suffix",)
    assert Route(name="x", accept="block").spec(base).tree_width == 1  # not an error while requests run
    block = SpecConfig(accept="block")
    assert Route(name="x", tree_width=4).spec(block).tree_width == 1


def test_routes_are_frozen() -> None:
    with pytest.raises(ValidationError):
        Route(name="x").name = "y"


def test_a_route_file_follows_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.web.config_file.CHECK_EVERY_S", 0.0)
    file = tmp_path / "routes.yaml"
    file.write_text("routes: [{name: a}]")
    routes = RouteFile(file, {"suffix"})
    for text, name in [
        ("routes: [{name: bb}]", "bb"),
        ("routes: [{name: broken, drafters: [nobody]}]", "bb"),
        ("routes: [{name: last, drafters: [suffix]}]", "last"),
    ]:
        file.write_text(text)
        os.utime(file, ns=(0, file.stat().st_mtime_ns + 10**9))
        assert routes.current().find(RouteRequest()).name == name


PYTHON = "import os\n\ndef f(x):\n    return x + 1\n\nfor i in range(3):\n    print(f(i))\n"
JAVASCRIPT = "const a = 1;\nfunction f(x) {\n  g(x);\n}\n"
ESSAY = (
    "I return to the class of things we import from abroad.\nWhat do you think?\nTell me: why; how; when.\n"
)


@pytest.mark.parametrize(
    ("asked", "tools", "answer", "found"),
    [
        ("hello", [TOOL], {"type": "json_object"}, "tools"),
        ("hello", [], {"type": "json_object"}, "json"),
        (PYTHON, None, {"type": "json_schema", "json_schema": {}}, "json"),
        (PYTHON, None, {"type": "text"}, "code"),
        (JAVASCRIPT, None, None, "code"),
        ("Why is this slow?\n```\nx\n```", None, None, "code"),
        (ESSAY, None, None, "chat"),
        ("Use `sum(x)`; is it fine? {", None, None, "chat"),
        (PYTHON + "so to say\n" * 40, None, None, "chat"),
        (PYTHON + " " + "x" * MAX_PROMPT_CHARS, None, None, "chat"),
        ("", None, None, "chat"),
        ([{"role": "user", "content": PYTHON}], None, None, "code"),
        (
            [{"role": "user", "content": [{"type": "text", "text": PYTHON}, {"type": "image_url"}]}],
            None,
            None,
            "code",
        ),
        ([{"role": "system", "content": PYTHON}, {"role": "user", "content": "hi"}], None, None, "chat"),
        ([{"role": "user", "content": PYTHON}, {"role": "assistant", "content": "ok"}], None, None, "code"),
        ([{"role": "user", "content": PYTHON}, {"role": "user", "content": "hi"}], None, None, "chat"),
        ([7, {"role": "user", "content": None}, {"role": "user"}], None, None, "chat"),
        ([1, 2, 3], None, None, "chat"),
        ([], "", "json", "chat"),
    ],
)
def test_prompt_class(asked: Any, tools: Any, answer: Any, found: str) -> None:
    assert prompt_class(asked, tools, answer) == found


def test_a_request_is_known_by_its_body() -> None:
    headers = {"X-Agent": "a"}
    chat = {"model": "m", "messages": [{"role": "user", "content": PYTHON}]}
    assert RouteRequest.of_body("/v1/chat/completions", headers, chat) == RouteRequest(
        "/v1/chat/completions", "m", {"x-agent": "a"}, frozenset(), "code"
    )
    assert RouteRequest.of_body("/", {}, {**chat, "tools": [TOOL]}).tools == {"search"}
    assert RouteRequest.of_body("/", {}, {"prompt": PYTHON}).prompt == "code"
    responses = {"input": "hi", "text": {"format": {"type": "json_schema"}}}
    assert RouteRequest.of_body("/v1/responses", {}, responses).prompt == "json"
    named = {"input": "hi", "tools": [{"type": "function", "name": "read"}]}
    assert RouteRequest.of_body("/v1/responses", {}, named).tools == {"read"}


@given(
    st.dictionaries(
        st.sampled_from(["model", "messages", "prompt", "input", "tools", "text", "response_format"]),
        st.recursive(
            st.none() | st.integers() | st.text(),
            lambda x: (
                st.lists(x, max_size=3)
                | st.dictionaries(
                    st.sampled_from(["role", "content", "text", "function", "name", "type", "format"]),
                    x,
                    max_size=3,
                )
            ),
        ),
    )
)
def test_any_body_has_a_class(body: dict[str, Any]) -> None:
    assert RouteRequest.of_body("/", {}, body).prompt in ("code", "json", "chat", "tools")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), re.S)


def test_the_example_of_the_docs_is_understood_as_the_docs_say(tmp_path: Path) -> None:
    file = tmp_path / "routes.yaml"
    file.write_text(blocks("yaml")[0])
    routes = load(file)
    told = json.loads(blocks("json")[0])
    assert len(told) >= 4
    for example in told:
        request = {"prompt": "chat", "headers": {}, "tools": [], **example["request"]}
        assert routes.find(RouteRequest(**request)).name == example["route"]


def test_the_docs_name_every_setting() -> None:
    page = PAGE.read_text()
    for name in (*Route.model_fields, *Match.model_fields):
        assert f"| `{name}` |" in page, name


def test_a_route_limits_the_tokens_of_an_answer(tmp_path: Path) -> None:
    limited = {"name": "brief", "match": {"header": {"x-brief": "yes"}}, "max_tokens": 3}
    (tmp_path / "routes.yaml").write_text(yaml.safe_dump({"routes": [limited]}))
    with toy_running(tmp_path, routes=str(tmp_path / "routes.yaml")) as server:
        for max_tokens, brief, written in ((8, "yes", 3), (2, "yes", 2), (8, "no", 8)):
            answer = server.client().completions.create(
                model=server.model,
                prompt="x",
                max_tokens=max_tokens,
                extra_body={"ignore_eos": True},
                extra_headers={"x-brief": brief},
            )
            assert answer.usage is not None
            assert answer.usage.completion_tokens == written


def test_a_server_does_not_start_with_a_route_whose_drafter_is_not_loaded(tmp_path: Path) -> None:
    (tmp_path / "routes.yaml").write_text("routes: [{name: a, drafters: [block]}]")
    message = r"drafter 'block' is known but not loaded: .*--trained.*a head of kind block"
    with (
        pytest.raises(RouteError, match=message),
        toy_running(tmp_path, routes=str(tmp_path / "routes.yaml")),
    ):
        pass


def test_the_servers_max_draft_holds_where_no_route_says(tmp_path: Path) -> None:
    (tmp_path / "routes.yaml").write_text("routes: [{name: a, match: {path: /x}, max_draft: 2}]")
    with toy_running(tmp_path, max_draft=5, routes=str(tmp_path / "routes.yaml")) as server:
        base = server.app.engine.llm.spec
        routes = load(tmp_path / "routes.yaml").routes
        assert [route.spec(base).max_draft for route in routes] == [2, 5]
    with pytest.raises(SettingError, match="max_draft=65"):
        ServerSettings("toy", max_draft=65)


def test_a_route_may_carry_a_prediction(tmp_path: Path) -> None:
    file = tmp_path / "routes.yaml"
    file.write_text("routes: [{name: a, predicted: {tokens_per_pass: 2.5, speedup: 1.8}}]")
    (route,) = load(file).routes
    assert route.predicted is not None
    assert (route.predicted.tokens_per_pass, route.predicted.speedup) == (2.5, 1.8)
    file.write_text("routes: [{name: a, predicted: {tokens_per_pass: 0.5, speedup: 1.8}}]")
    with pytest.raises(RouteError, match=r"predicted\.tokens_per_pass"):
        load(file)
