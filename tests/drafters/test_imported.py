"""Drafters by import path: what cannot be used is said, and what they do changes no word."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from paceline import LLM, EngineConfig, SpecConfig
from paceline.drafters.drafter_list import well_formed
from paceline.drafters.imported import import_drafter
from paceline.errors import UsageError
from paceline.loading import import_drafters
from paceline.server.routes import RouteError
from paceline.types import ROOT, Draft
from support.servers import NAME, Running, toy_chat_model, toy_running

MODULE = "own_drafters"
SOURCE = """
import random
import torch
from paceline import Draft, Drafter
from paceline.types import ROOT

class Echo(Drafter):
    "Guesses that the last tokens come again."
    name = "echo"
    def draft(self, asks):
        return [Draft(tuple(ask.seq.tokens[-ask.budget:])) for ask in asks]

class Liar(Echo):
    "Sure of tokens that are never right, in a tree."
    name = "liar"
    def draft(self, asks):
        return [Draft((7, 8, 9), (ROOT, ROOT, 0), (), (1.0, 1.0, 1.0), torch.ones(3, 8)) for ask in asks]

class Raises(Drafter):
    name = "raises"
    def draft(self, asks):
        raise KeyError("no idea")
    begin = observe = end = prepare = draft

class Garbage(Drafter):
    name = "garbage"
    def __init__(self):
        self.random = random.Random(0)
    def draft(self, asks):
        return self.random.choice([
            None, 7, [None], ["abc"], [Draft(("a", "b"))], [Draft((1.5,))], [Draft((1, 2), (1, 0))],
            [Draft((1, 2), (5, 7))], [Draft((1, 2), ())], [Draft((1, 2), sources=("x",))],
            [Draft((-5, 1 << 40))],
            [Draft((1, 2), scores=(float("nan"), 9.0))], [Draft((1, 2), scores=(1.0,))], [Draft()] * 9, [],
            [Draft((1, 2), q="q")], [Draft((1, 2), q=torch.ones(1, 3))], [Draft(tuple(range(500)))],
        ])

def make():
    return Echo()

class Nameless(Drafter):
    def draft(self, asks): return []
class Silent(Drafter):
    name = "silent"
class Suffix(Echo):
    name = "suffix"
class Needs(Echo):
    def __init__(self, path): pass
class NoDrafter:
    name = "other"
    def draft(self, asks): return []
instance = Echo()
number = 7
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """In the working folder, which is not on sys.path."""
    (tmp_path / f"{MODULE}.py").write_text(SOURCE)
    (tmp_path / "broken_drafters.py").write_text("1 / 0")
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.modules.pop(MODULE, None)


def test_a_class_or_a_function_makes_a_new_drafter_each_time(module: Path) -> None:
    before = list(sys.path)
    one, other = import_drafter(f"{MODULE}:Echo"), import_drafter(f"{MODULE}:make")
    assert (one.name, other.name) == ("echo", "echo")
    assert one is not other
    assert sys.path == before


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("absent_module:Echo", "there is no module 'absent_module'"),
        ("broken_drafters:Echo", "cannot be imported: ZeroDivisionError: division by zero"),
        (f"{MODULE}:Absent", f"{MODULE} has no 'Absent'"),
        (f"{MODULE}:number", "is an object of type int: expected a class of drafters"),
        (f"{MODULE}:instance", "is an object of type Echo: expected a class of drafters"),
        (f"{MODULE}:NoDrafter", "makes an object of type NoDrafter: expected a drafter"),
        (f"{MODULE}:Needs", "could not be made: TypeError"),
        (f"{MODULE}:Nameless", "has no usable `name`"),
        (f"{MODULE}:Silent", "has no method `draft`"),
        (f"{MODULE}:Suffix", "is called 'suffix', as a drafter of the package is: rename it"),
        (":Echo", "is no import path: expected module:Class"),
        ("a b:Echo", "is no import path"),
        ("a:b:c", "is no import path"),
    ],
)
def test_what_cannot_be_used_is_said(path: str, problem: str, module: Path) -> None:
    with pytest.raises(UsageError) as caught:
        import_drafters([path])
    assert problem in str(caught.value)


def test_two_drafters_of_one_name_are_an_error(module: Path) -> None:
    with pytest.raises(UsageError, match=f"is called 'echo', as {MODULE}:Echo is: rename it"):
        import_drafters([f"{MODULE}:Echo", f"{MODULE}:make"])


@pytest.fixture
def toy(module: Path, monkeypatch: pytest.MonkeyPatch) -> LLM:
    names = ("Echo", "Liar", "Raises", "Garbage")
    spec = SpecConfig((f"{MODULE}:Echo", "suffix"))
    return LLM(
        str(toy_chat_model(module)),
        drafters=[f"{MODULE}:{name}" for name in names],
        spec=spec,
        config=EngineConfig("cpu", cache_mb=16),
    )


def test_whatever_a_drafter_does_the_text_is_the_models(toy: LLM, caplog: pytest.LogCaptureFixture) -> None:
    assert toy.spec.drafters == ("echo", "suffix")
    prompt = "one two three one two three one"
    for temperature in (0.0, 0.9):
        params: dict[str, Any] = {"max_tokens": 32, "seed": 5, "temperature": temperature, "ignore_eos": True}
        plain = toy.generate(prompt, spec=SpecConfig(("none",)), **params)
        for names in (
            ("echo",),
            ("liar",),
            ("raises",),
            ("garbage",),
            ("garbage", "raises", "liar", "suffix"),
        ):
            for width in (1, 4):
                spec = SpecConfig(names, adaptive=False, tree_width=width)
                found = toy.generate(prompt, spec=spec, **params)
                assert found.token_ids == plain.token_ids, (names, width, temperature)
                assert found.finish == plain.finish == "length"
    lines = [line for line in caplog.messages if line.startswith("drafter raises failed")]
    assert lines
    assert len(lines) == len(set(lines))  # each kind of failure is logged once
    schema = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]}
    typed: dict[str, Any] = {
        "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    }
    plain = toy.generate(prompt, spec=SpecConfig(("none",)), max_tokens=32, seed=5, **typed)
    for name in ("liar", "raises", "garbage"):
        spec = SpecConfig(("grammar", name), adaptive=False)
        assert toy.generate(prompt, spec=spec, max_tokens=32, seed=5, **typed).token_ids == plain.token_ids


def test_a_good_drafter_of_ones_own_is_accepted(toy: LLM) -> None:
    found = toy.generate(
        "one two three",
        spec=SpecConfig(("echo",), adaptive=False),
        max_tokens=32,
        temperature=0,
        ignore_eos=True,
    )
    assert found.accepted["echo"] > 0  # the toy repeats itself


def test_a_draft_that_passes_the_check_is_one() -> None:
    draft = Draft((1, 2), (ROOT, 0), ("a", "b"), (0.5, 1.0))
    assert well_formed(draft) == draft


BODY: dict[str, Any] = {"model": NAME, "prompt": "one two", "max_tokens": 4, "temperature": 0}


def test_a_request_names_it_by_its_name_and_never_by_a_path(module: Path) -> None:
    import httpx

    def post(server: Running, **config: Any) -> httpx.Response:
        body = BODY | {"speculative_config": config}
        return httpx.post(f"{server.url}/v1/completions", json=body, trust_env=False, timeout=600)

    routes = module / "routes.yaml"
    listed = [{"name": "mine", "match": {"path": "/v1/completions"}, "drafters": [f"{MODULE}:Liar", "ngram"]}]
    routes.write_text(yaml.safe_dump({"routes": listed}))
    with toy_running(module, drafters=(f"{MODULE}:Echo", "suffix"), routes=str(routes)) as server:
        assert server.app.engine.llm.spec.drafters == ("echo", "suffix")
        assert post(server, drafters=["echo"]).status_code == 200
        for path in (f"{MODULE}:Echo", f"{MODULE}:Garbage", "os:getcwd"):
            refused = post(server, drafters=[path])
            assert refused.status_code == 400
            assert "is an import path, which only those who load the model may give" in refused.text
        assert "antigravity" not in sys.modules
        assert "import path" in post(server, draft_model="antigravity:x").text
        assert "antigravity" not in sys.modules
        found = httpx.get(f"{server.url}/v1/routes", trust_env=False).json()["data"]
        assert [route["drafters"] for route in found] == [["liar", "ngram"], ["echo", "suffix"]]


def test_a_drafter_of_a_route_serves_no_other_request(module: Path) -> None:
    routes = module / "routes.yaml"
    routes.write_text(yaml.safe_dump({"routes": [{"name": "mine", "drafters": [f"{MODULE}:Liar"]}]}))
    with toy_running(module, routes=str(routes)) as server:
        assert server.app.engine.llm.spec.drafters == SpecConfig().drafters
        assert "liar" in server.app.engine.llm.drafters


def test_a_route_with_a_wrong_path_shows_at_the_start(module: Path) -> None:
    routes = module / "routes.yaml"
    routes.write_text(yaml.safe_dump({"routes": [{"name": "mine", "drafters": ["absent_module:X"]}]}))
    with (
        pytest.raises(UsageError, match="no module 'absent_module'"),
        toy_running(module, routes=str(routes)),
    ):
        pass
    routes.write_text(yaml.safe_dump({"routes": [{"name": "mine", "drafters": ["echo"]}]}))
    with pytest.raises(RouteError, match="unknown drafter 'echo'"), toy_running(module, routes=str(routes)):
        pass
