"""Several models in one server: loaded when they are asked for, unloaded when another one needs the room."""

import asyncio
import gc
import json
import threading
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.requests import ClientDisconnect, Request

from paceline import LLM, EngineConfig
from paceline.errors import Busy, ModelError, ShuttingDown, TimedOut, UsageError
from paceline.paths import home
from paceline.server.launch import ModelSettings, _memory_bytes
from paceline.server.model_pool import ModelPool, PoolLimits, ServedModel
from paceline.server.models_file import ModelsFileError, read_models
from paceline.server.openai.models import ModelServing
from paceline.server.telemetry.metrics import Metrics
from paceline.trace.record import RequestRecord
from paceline.trace.store import Store
from paceline.web.api_errors import ApiError
from support.native_targets import tiny_model
from support.servers import IDLE_S, TEMPLATE, Running, running, until
from support.tiny_gguf import Sizes
from support.tokenizers import byte_level_facts

pytestmark = pytest.mark.slow  # real connections and waits: left out of make quick

ENGINE = EngineConfig("cpu", cache_mb=16, threads=1, max_waiting=8)
PROMPT = "one two three one two three one two three "


def toy_model(path: Path, seed: int) -> Path:
    facts = byte_level_facts("smollm")
    sizes = Sizes(2, 256, 4, 2, 64, 256, len(facts["tokens"]), 2048)
    return tiny_model(
        path, kind="Q8_0", sizes=sizes, tied=False, seed=seed, tokenizer=facts, template=TEMPLATE
    )


@contextmanager
def serving(folder: Path, first: EngineConfig = ENGINE, **settings: Any) -> Iterator[Running]:
    """Two models, `a` and `b`, and `broken`, whose file has no weights; room for one at a time."""
    shared, own = home() / "native", folder / "home"
    shared.mkdir(parents=True, exist_ok=True)
    own.mkdir()
    (own / "native").symlink_to(shared)
    a, b = (toy_model(folder / f"{name}.gguf", seed) for seed, name in enumerate("ab"))
    broken = folder / "broken.gguf"
    broken.write_bytes(a.read_bytes())
    further = tuple(
        ModelSettings(str(path), (path.stem, f"{path.stem}-too"), engine=ENGINE) for path in (b, broken)
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PACELINE_HOME", str(own))
        given = {"max_loaded": 1, "further_models": further, **settings}
        with running(str(a), first, **given) as server:
            broken.write_bytes(b"GGUF")  # since the start
            yield server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("models")
    with serving(folder, store=f"sqlite:///{folder}/traces.db", single_user=True) as found:
        yield found


def post(server: Running, model: str | None, path: str = "/v1/completions", **more: Any) -> httpx.Response:
    named = {} if model is None else {"model": model}
    body = {"prompt": PROMPT, "max_tokens": 24, "temperature": 0, "ignore_eos": True, **named, **more}
    return httpx.post(f"{server.url}{path}", json=body, trust_env=False, timeout=600)


def written(server: Running, model: str | None, **more: Any) -> dict[str, Any]:
    answer: dict[str, Any] = post(server, model, **more).raise_for_status().json()
    return answer


def get(server: Running, path: str) -> Any:
    return httpx.get(f"{server.url}{path}", trust_env=False, timeout=60).raise_for_status().json()


def states(server: Running) -> dict[str, str]:
    return {card["id"]: card["status"]["value"] for card in get(server, "/v1/models")["data"]}


def hold_loads(server: Running, monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """Loads wait for the second event, and set the first one when they begin."""
    begun, go_on = threading.Event(), threading.Event()
    load = server.app.models._load

    def held(model: ServedModel) -> Any:
        begun.set()
        assert go_on.wait(600)
        return load(model)

    monkeypatch.setattr(server.app.models, "_load", held)
    return begun, go_on


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_speculative_text_is_plain_text_while_models_take_turns(server: Running, temperature: float) -> None:
    """Two models of different weights, one place: every answer comes from a model loaded anew."""
    sampling: dict[str, Any] = {"temperature": temperature, "seed": 3, "max_tokens": 48}
    off, on = {"disabled": True}, {"drafters": ["suffix", "ngram"], "adaptive": False}
    plain: dict[str, str] = {}
    fast, drafted = {}, 0
    for model in "abab":
        answer = written(server, model, speculative_config=off, **sampling)
        assert plain.setdefault(model, answer["choices"][0]["text"]) == answer["choices"][0]["text"]
    for model in "abab":
        answer = written(server, model, speculative_config=on, metrics=True, **sampling)
        fast[model] = answer["choices"][0]["text"]
        drafted += answer["metrics"]["speculative_decoding"]["num_draft_tokens"]
        assert answer["model"] == model
    assert fast == plain
    assert plain["a"] != plain["b"]
    assert drafted > 0


def test_both_models_at_once_write_what_each_writes_alone(tmp_path: Path) -> None:
    """Room for both: their passes take turns, and neither touches the other's cache or traces."""
    with serving(tmp_path, max_loaded=2, store=f"sqlite:///{tmp_path}/traces.db") as server:
        alone = {model: written(server, model)["choices"][0]["text"] for model in "ab"}
        with ThreadPoolExecutor(8) as clients:
            jobs = [(model, clients.submit(written, server, model)) for model in "abababab"]
            assert all(job.result()["choices"][0]["text"] == alone[model] for model, job in jobs)
        store: Any = server.app.log._recorder._store  # type: ignore[union-attr]
        for record in saved(server):
            _, rounds = store.get(record.id)
            assert sum(r.committed for r in rounds) == record.output_tokens == 24
        assert states(server) == {
            "a": "loaded", "b": "loaded", "b-too": "loaded", "broken": "unloaded", "broken-too": "unloaded"
        }  # fmt: skip


def test_a_model_does_without_the_drafters_of_a_route_that_it_lacks(tmp_path: Path) -> None:
    file = tmp_path / "routes.yaml"
    file.write_text("routes:\n  - name: all\n    drafters: [quantized, ngram]\n    adaptive: false\n")
    engine = replace(ENGINE, dtype="float32")  # of the copy in 4 bits
    quantized = {"drafters": ("quantized",), "max_loaded": 2, "routes": str(file)}
    with serving(tmp_path, first=engine, **quantized) as server:
        for model in "ab":
            assert written(server, model)["usage"]["completion_tokens"] == 24
        drafters = {route["model"]: route["drafters"] for route in get(server, "/v1/routes")["data"]}
        assert drafters == {"a": ["quantized", "ngram"], "b": ["ngram"]}


def test_a_request_names_its_model_by_any_of_its_names(server: Running) -> None:
    assert written(server, "b-too")["model"] == "b"
    assert written(server, None)["model"] == "a"  # the default
    refused = post(server, "c")
    assert refused.status_code == 404
    assert refused.json()["error"]["message"] == "the model 'c' is not served here; 'a', 'b', 'broken' are"


def test_the_list_says_which_models_are_loaded(server: Running) -> None:
    written(server, "b")
    found = states(server)
    assert (found["a"], found["b"], found["b-too"]) == ("unloaded", "loaded", "loaded")
    card = get(server, "/v1/models/a")
    assert (card["id"], card["status"], card["max_model_len"]) == ("a", {"value": "unloaded"}, 2048)
    assert httpx.get(f"{server.url}/v1/models/c", trust_env=False).status_code == 404


def test_the_memory_of_an_unloaded_model_is_free(server: Running) -> None:
    written(server, "a")
    engine = server.app.models.find("a").engine
    assert engine is not None
    target = weakref.ref(engine.llm.target)
    del engine
    written(server, "b")
    assert until(lambda: gc.collect() >= 0 and target() is None, IDLE_S)


def test_tokens_are_those_of_the_model_that_is_named(server: Running) -> None:
    for model in "ab":
        found = post(
            server, model, "/tokenize", prompt="Hi", max_tokens=None, temperature=None, ignore_eos=None
        )
        assert found.status_code == 400  # those are not parameters of this path
        body = {"model": model, "prompt": "Hi"}
        found = httpx.post(f"{server.url}/tokenize", json=body, trust_env=False, timeout=600)
        assert found.raise_for_status().json()["count"] > 0
        assert states(server)[model] == "loaded"


def test_a_model_that_cannot_be_loaded_is_a_503_and_the_others_stay(server: Running) -> None:
    before = written(server, "a")["choices"][0]["text"]
    failed = post(server, "broken")
    assert (failed.status_code, failed.json()["error"]["code"]) == (503, "model_not_loaded")
    assert (
        failed.json()["error"]["message"]
        == "the model 'broken' could not be loaded: the server's log says why"
    )
    assert int(failed.headers["retry-after"]) > 0
    found = states(server)
    assert (found["a"], found["broken"]) == ("loaded", "failed")  # nothing had to go for it
    assert written(server, "a")["choices"][0]["text"] == before
    assert get(server, "/health") == {"status": "ok"}


def test_the_server_answers_while_a_model_is_loaded(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    written(server, "a")
    begun, go_on = hold_loads(server, monkeypatch)
    with ThreadPoolExecutor(1) as client:
        answer = client.submit(written, server, "b")
        assert begun.wait(600)
        try:
            assert get(server, "/health") == {"status": "ok"}
            assert get(server, "/ready") == {"ready": True}
            assert states(server)["b"] == "loading"
            assert [one["state"] for one in get(server, "/page/live")["requests"]] == ["loading"]
        finally:
            go_on.set()
        assert answer.result()["model"] == "b"


def test_more_requests_than_may_wait_for_a_load_are_refused(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(server, "a")
    begun, go_on = hold_loads(server, monkeypatch)
    model = server.app.models.find("b")
    with ThreadPoolExecutor(ENGINE.max_waiting) as clients:
        answers = [clients.submit(written, server, "b") for _ in range(ENGINE.max_waiting)]
        try:
            assert begun.wait(600)
            assert until(lambda: len(model.waiting) == ENGINE.max_waiting, 600)
            refused = post(server, "b")
        finally:
            go_on.set()
        assert len({answer.result()["choices"][0]["text"] for answer in answers}) == 1
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "server_busy")
    assert "wait for models to be loaded already" in refused.json()["error"]["message"]


def test_a_client_that_leaves_waits_no_longer(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    written(server, "a")
    begun, go_on = hold_loads(server, monkeypatch)
    model = server.app.models.find("b")

    async def leave() -> None:
        async with httpx.AsyncClient(base_url=server.url, trust_env=False) as client:
            body = {"model": "b", "prompt": PROMPT, "stream": True}
            request = asyncio.create_task(client.post("/v1/completions", json=body))
            await asyncio.to_thread(begun.wait, 600)
            request.cancel()

    try:
        asyncio.run(leave())
        assert until(lambda: not model.waiting and not server.app.admission.in_flight, 600)
    finally:
        go_on.set()
    assert until(lambda: model.state == "loaded", 600)  # it was on its way
    assert model.requests == 0
    assert written(server, "a")["model"] == "a"


STREAMS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 4},
    "/v1/completions": {"prompt": PROMPT, "max_tokens": 4},
    "/v1/responses": {"input": PROMPT, "max_output_tokens": 4},
}


@pytest.fixture(scope="module")
def impatient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server whose streams get a comment every 20 ms."""
    with serving(tmp_path_factory.mktemp("impatient"), keep_alive_s=0.02) as found:
        yield found


@contextmanager
def commented(server: Running, path: str, model: str) -> Iterator[Iterator[str]]:
    """The lines of a stream after its second comment."""
    body = {"model": model, "stream": True, **STREAMS[path]}
    with httpx.stream("POST", f"{server.url}{path}", json=body, trust_env=False, timeout=60) as answer:
        assert answer.status_code == 200
        lines = answer.iter_lines()
        assert [next(lines) for _ in range(4)] == [": keep-alive", ""] * 2
        yield lines


@pytest.mark.parametrize("path", STREAMS)
def test_a_stream_gets_comments_while_its_model_is_loaded(
    impatient: Running, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    written(impatient, "a")
    _, go_on = hold_loads(impatient, monkeypatch)
    try:
        with commented(impatient, path, "b") as lines:
            go_on.set()
            told = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    finally:
        go_on.set()
    models = {one.get("model") or one.get("response", {}).get("model") for one in told}
    assert "b" in models - {None}
    assert not any("error" in one for one in told)
    assert until(lambda: not impatient.app.admission.in_flight, 60)
    assert impatient.app.models.find("b").requests == 0


@pytest.mark.parametrize("path", STREAMS)
def test_a_client_that_leaves_after_comments_waits_no_longer(
    impatient: Running, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    written(impatient, "a")
    begun, go_on = hold_loads(impatient, monkeypatch)
    model = impatient.app.models.find("b")
    try:
        with commented(impatient, path, "b"):
            assert begun.wait(600)
        assert until(lambda: not model.waiting and not impatient.app.admission.in_flight, 600)
    finally:
        go_on.set()
    assert until(lambda: model.state == "loaded", 600)  # it was on its way
    assert model.requests == 0


@pytest.mark.parametrize("path", STREAMS)
def test_a_load_that_fails_after_comments_ends_the_stream_with_an_error(
    impatient: Running, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    written(impatient, "a")
    go_on = threading.Event()

    def fails(model: ServedModel) -> Any:
        assert go_on.wait(600)
        raise ModelError("no weights")

    monkeypatch.setattr(impatient.app.models, "_load", fails)
    try:
        with commented(impatient, path, "b") as lines:
            go_on.set()
            (told,) = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    finally:
        go_on.set()
    error = told.get("error") or told["response"]["error"]
    assert error["message"] == "the model 'b' could not be loaded: the server's log says why"
    assert until(lambda: not impatient.app.admission.in_flight, 60)


def test_a_model_with_requests_in_flight_is_not_unloaded(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(server, "a")
    model = server.app.models.find("a")
    assert model.engine is not None
    engine, release = model.engine.llm.engine, threading.Event()
    step = engine.step

    def held() -> Any:
        assert release.wait(600)
        return step()

    monkeypatch.setattr(engine, "step", held)
    del engine
    with ThreadPoolExecutor(3) as clients:
        first = clients.submit(written, server, "a")
        assert until(lambda: model.requests == 1, 600)
        other = clients.submit(written, server, "b")
        assert until(lambda: model.leaving, 600)
        late = clients.submit(written, server, "a")  # behind b, which waits for the place
        assert until(lambda: len(model.waiting) == 1, 600)
        assert states(server)["a"] == "loaded"
        assert not first.done()
        assert not other.done()
        release.set()
        assert [job.result()["model"] for job in (first, other, late)] == ["a", "b", "a"]
        assert first.result()["choices"] == late.result()["choices"]


def test_metrics_and_traces_have_the_model(server: Running) -> None:
    for model in "ab":
        written(server, model)
    assert post(server, "broken").status_code == 503
    text = httpx.get(f"{server.url}/metrics", trust_env=False).text
    families = {family.name: family for family in text_string_to_metric_families(text)}
    tokens = {s.labels["model_name"]: s.value for s in families["vllm:generation_tokens"].samples}
    assert min(tokens["a"], tokens["b"]) >= 24
    assert tokens["broken"] == 0
    accepted = {s.labels["model_name"] for s in families["paceline_tokens_per_pass"].samples}
    assert accepted == {"a", "b"}
    assert all("model_name" not in s.labels for s in families["paceline_refused"].samples)
    loads = {(s.labels["model_name"], s.labels["outcome"]) for s in families["paceline_model_loads"].samples}
    assert {("a", "loaded"), ("a", "unloaded"), ("b", "loaded"), ("broken", "failed")} <= loads
    assert {route["model"] for route in get(server, "/v1/routes")["data"]} == {"b"}  # of what is loaded
    assert [record.model for record in saved(server)[:3]] == ["broken", "b", "a"]


def test_a_route_for_several_models_takes_the_drafters_that_each_has(tmp_path: Path) -> None:
    routes = tmp_path / "routes.yaml"
    routes.write_text("routes: [{name: every, drafters: [model, suffix]}]")
    drafted = ModelSettings(
        str(tmp_path / "b.gguf"), ("b",), draft_model=str(tmp_path / "a.gguf"), engine=ENGINE
    )
    with serving(tmp_path, routes=str(routes), further_models=(drafted,)) as server:
        for model, drafters in (("a", ["suffix"]), ("b", ["model", "suffix"])):
            assert written(server, model)["model"] == model
            (route,) = get(server, "/v1/routes")["data"]
            assert (route["model"], route["drafters"]) == (model, drafters)


def saved(server: Running) -> Sequence[RequestRecord]:
    """The traces, newest first."""
    recorder = server.app.log._recorder
    assert recorder is not None
    assert isinstance(recorder._store, Store)
    assert until(lambda: not recorder._waiting, 60)
    return recorder._store.list(100)


class Engine:
    """As much of an engine as the pool sees."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes, self.events = nbytes, list[str]()
        self.llm = self.target = self
        self.max_context = 8

    @property
    def thread(self) -> "Engine":
        return self

    def start(self) -> None:
        self.events.append("start")

    def stop(self, timeout: float) -> None:
        self.events.append("stop")

    def close(self, timeout: float) -> None:
        self.events.append("close")


def a_pool(*names: str, mb: int = 10, **limits: int) -> ModelPool:
    def metrics(name: str) -> Metrics:
        return Metrics(name, (), running=lambda: 0, waiting=lambda: 0, cache_use=lambda: 0.0)

    models = [ServedModel((name,), metrics(name), mb << 20) for name in names]
    ticks = iter(range(1000))
    clock = lambda: float(next(ticks))  # noqa: E731
    return ModelPool(models, lambda model: Engine(model.nbytes), PoolLimits(**limits), clock=clock)  # type: ignore[arg-type,return-value]


def loaded(pool: ModelPool) -> list[str]:
    return [model.name for model, _ in pool.loaded]


def test_the_memory_bound_unloads_the_least_recently_used_first() -> None:
    async def story() -> None:
        pool = a_pool("a", "b", "c", "d", memory_mb=30)
        for name in "abc":
            await pool.acquire(pool.find(name))
            pool.release(pool.find(name))
        assert loaded(pool) == ["a", "b", "c"]
        await pool.acquire(pool.find("a"))  # stays in use
        await pool.acquire(pool.find("d"))
        assert loaded(pool) == ["a", "c", "d"]
        pool.release(pool.find("d"))
        await pool.acquire(pool.find("b"))
        assert loaded(pool) == ["a", "b", "d"]

    asyncio.run(story())


def test_a_model_that_leaves_stays_if_another_one_goes_first() -> None:
    async def story() -> None:
        pool = a_pool("a", "b", "c", max_loaded=2)
        a, b, c = (pool.find(name) for name in "abc")
        for model in (a, b):
            await pool.acquire(model)
        third = asyncio.create_task(pool.acquire(c))
        while not a.leaving:
            await asyncio.sleep(0)
        late = asyncio.create_task(pool.acquire(a))
        await asyncio.sleep(0)
        pool.release(b)
        assert isinstance(await third, Engine)
        assert await late is a.engine
        assert loaded(pool) == ["a", "c"]
        assert (a.requests, b.requests, c.requests) == (2, 0, 1)

    asyncio.run(story())


def test_a_model_stays_if_nobody_waits_for_the_other_any_more() -> None:
    async def story() -> None:
        pool = a_pool("a", "b", max_loaded=1)
        a = pool.find("a")
        await pool.acquire(a)
        waits = asyncio.create_task(pool.acquire(pool.find("b")))
        while not a.leaving:
            await asyncio.sleep(0)
        late = asyncio.create_task(pool.acquire(a))
        await asyncio.sleep(0)
        waits.cancel()
        assert await late is a.engine  # though its first request has not ended
        assert (a.requests, loaded(pool)) == (2, ["a"])

    asyncio.run(asyncio.wait_for(story(), 60))


def test_a_deadline_ends_the_wait_for_a_model() -> None:
    async def story() -> None:
        pool = a_pool("a", "b", max_loaded=1)
        await pool.acquire(pool.find("a"))
        with pytest.raises(TimedOut, match="was not loaded by then"):
            await pool.acquire(pool.find("b"), deadline=0.0)
        assert not pool.find("b").waiting

    asyncio.run(story())


def test_a_model_stays_if_nobody_waits_for_its_room_any_more() -> None:
    async def story() -> None:
        pool = a_pool("a", "b", max_loaded=1)
        a, b = pool.find("a"), pool.find("b")
        await pool.acquire(a)
        leaves = asyncio.create_task(pool.acquire(b))
        while not a.leaving:
            await asyncio.sleep(0)
        late = asyncio.create_task(pool.acquire(a))
        await asyncio.sleep(0)
        leaves.cancel()
        async with asyncio.timeout(60):  # the first request of `a` does not end meanwhile
            assert await late is a.engine
        pool.release(a)
        pool.release(a)
        assert await pool.acquire(a) is a.engine
        assert loaded(pool) == ["a"]

    asyncio.run(story())


def test_a_client_that_leaves_just_when_the_model_is_loaded_holds_it_no_longer() -> None:
    async def story() -> None:
        pool, gone = a_pool("a"), asyncio.Event()
        a, load = pool.find("a"), pool._load

        def loaded_as_the_client_leaves(model: ServedModel) -> Any:
            engine: Any = load(model)
            engine.start = gone.set
            return engine

        async def receive() -> dict[str, str]:
            await gone.wait()
            return {"type": "http.disconnect"}

        pool._load = loaded_as_the_client_leaves
        serving = ModelServing(pool, None, None)  # type: ignore[arg-type]
        with pytest.raises(ClientDisconnect):
            async with serving._loaded(Request({"type": "http"}, receive), "a"):
                raise AssertionError("nobody is there")
        assert a.engine is not None
        assert a.requests == 0

    asyncio.run(story())


def test_a_pool_that_stops_refuses_those_that_wait() -> None:
    async def story() -> None:
        pool = a_pool("a", "b", max_loaded=1)
        await pool.acquire(pool.find("a"))
        waits = asyncio.create_task(pool.acquire(pool.find("b")))
        while not pool.find("b").waiting:
            await asyncio.sleep(0)
        await pool.stop(1.0)
        with pytest.raises(ShuttingDown):
            await waits
        with pytest.raises(ShuttingDown):
            await pool.acquire(pool.find("b"))

    asyncio.run(story())


@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_the_memory_of_a_model_is_known_before_it_is_loaded(dtype: str, tmp_path: Path) -> None:
    path, engine = toy_model(tmp_path / "a.gguf", 0), replace(ENGINE, dtype=dtype)
    target = LLM(str(path), config=engine).target
    known = _memory_bytes(ModelSettings(str(path), ("a",), engine=engine))
    assert known == pytest.approx(target.bytes_held + (engine.cache_mb << 20), rel=0.05)


def test_bounds_that_no_model_fits_are_errors_at_the_start() -> None:
    with pytest.raises(UsageError, match="a needs about 10 MB with its cache, and the models may have 9"):
        a_pool("a", memory_mb=9)
    with pytest.raises(UsageError, match="two models are called 'a'"):
        a_pool("a", "a")
    with pytest.raises(UsageError, match="max_loaded"):
        a_pool("a", max_loaded=-1)


def test_a_file_of_models_gives_each_settings_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "models.yaml"
    file.write_text(
        "models:\n  - model: small.gguf\n    name: small\n    aliases: [gpt-4o-mini]\n    drafters: [ngram]\n"
        "  - model: large.gguf\n    cache_mb: 77\n"
    )
    small, large = read_models(file, ModelSettings("", (), max_draft=3, engine=ENGINE))
    assert (small.names, small.drafters, small.engine) == (("small", "gpt-4o-mini"), ("ngram",), ENGINE)
    assert (large.names, large.drafters, large.engine.cache_mb) == (("large.gguf",), None, 77)
    assert large.max_draft == small.max_draft == 3
    for text, problem in (
        ("models: []", "has no models"),
        ("models:\n  - model: a\n    cache: 1", "unknown key 'cache'; did you mean 'cache_mb'"),
        ("models:\n  - name: a", "models[0]: model is missing"),
        ("models:\n  - model: a\n    max_draft: 65", "models[0].max_draft=65 is not usable"),
        ("models:\n  - model: a\n    aliases: [b, '']", "models[0].aliases[1]"),
        ("models:\n  - model: a\n  - model: b\n    name: ''", "models[1].name"),
        ("models:\n  - model: a\n    cache_mb: 0", "models[0].cache_mb=0 is not usable"),
    ):
        file.write_text(text)
        with pytest.raises(ModelsFileError) as caught:
            read_models(file, ModelSettings("", (), engine=ENGINE))
        assert problem in str(caught.value)


def test_a_waiting_request_beyond_the_bound_is_busy() -> None:
    async def story() -> None:
        pool = a_pool("a", "b", max_loaded=1, max_waiting=1)
        await pool.acquire(pool.find("a"))
        waits = asyncio.create_task(pool.acquire(pool.find("b")))
        while not pool.find("b").waiting:
            await asyncio.sleep(0)
        with pytest.raises(Busy):
            await pool.acquire(pool.find("b"))
        pool.release(pool.find("a"))
        await waits

    asyncio.run(story())


@pytest.mark.parametrize("problem", [ZeroDivisionError, StopIteration, SystemExit])
def test_a_load_that_fails_is_tried_again_by_the_next_request(problem: type[BaseException]) -> None:
    async def story() -> None:
        pool = a_pool("a", "b")
        load = pool._load

        def failing(model: ServedModel) -> Any:
            raise problem

        pool._load = failing
        with pytest.raises(ApiError, match="could not be loaded"):
            await asyncio.wait_for(pool.acquire(pool.find("b")), 60)
        assert pool.find("b").state == "failed"
        pool._load = load
        assert isinstance(await pool.acquire(pool.find("b")), Engine)

    asyncio.run(story())


def test_real_weights_and_a_tiny_model_take_turns(smollm2_path: Path, tmp_path: Path) -> None:
    """The same text plain and speculative, alone and after the other model."""
    tiny = toy_model(tmp_path / "tiny.gguf", 0)
    engine = EngineConfig("cpu", cache_mb=64, max_waiting=8)
    further = (ModelSettings(str(tiny), ("tiny",), engine=engine),)
    sampling: dict[str, Any] = {"temperature": 0.7, "seed": 11, "max_tokens": 24}
    settings: dict[str, Any] = {"further_models": further, "max_loaded": 1, "served_model_name": ("real",)}
    with running(str(smollm2_path), engine, **settings) as server:
        plain = {}
        for model in ("real", "tiny"):
            answer = written(server, model, speculative_config={"disabled": True}, **sampling)
            plain[model] = answer["choices"][0]["text"]
        for model in ("real", "tiny", "real"):
            answer = written(server, model, metrics=True, **sampling)
            assert answer["choices"][0]["text"] == plain[model]
            assert states(server)[model] == "loaded"
