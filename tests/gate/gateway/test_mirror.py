"""Mirroring between real servers: pairs, isolation of users, sampling, eligibility, feedback, spans."""

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import openai
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from paceline.gate.gateway.spans import GateSpans
from paceline.gate.pair import Pair
from paceline.gate.store import GateStore, Rollout
from paceline.web.api_keys import add
from paceline.web.otel import Exporter
from support.clients import run
from support.servers import IDLE_S, until
from support.upstreams import WORDS, Gate, Upstream, gate, upstream

if TYPE_CHECKING:
    from support.servers import Running

TEXT = "".join(WORDS)


@pytest.fixture(scope="module")
def both() -> Iterator[tuple[Upstream, Upstream]]:
    with upstream("base") as base, upstream("cand") as cand:
        yield base, cand


@pytest.fixture(autouse=True)
def _fresh(both: tuple[Upstream, Upstream]) -> Iterator[None]:
    yield
    for one in both:
        one.behaviour, one.hold = "answer", None
        one.requests.clear()


@contextmanager
def mirroring(
    folder: Path,
    both: tuple[Upstream, Upstream],
    settings: dict[str, Any] | None = None,
    route: dict[str, Any] | None = None,
    **mirror: Any,
) -> Iterator[Gate]:
    config = {
        "upstreams": [{"name": one.name, "url": one.url} for one in both],
        "routes": [
            {
                "name": "all",
                "upstreams": {"base": 1},
                "mirror": {"candidate": "cand", "share": 1.0, "text": True, **mirror},
                **(route or {}),
            }
        ],
    }
    with gate(folder, config, store=str(folder / "gate.db"), **(settings or {})) as running:
        yield running


def ask(client: openai.OpenAI, content: str = "hello", **more: Any) -> str:
    messages: Any = [{"role": "user", "content": content}]
    chunks = client.chat.completions.create(model="m", messages=messages, stream=True, **more)
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


def pairs(running: Gate, folder: Path, count: int, experiment: str = "all-cand") -> list[Pair]:
    """Waits for so many outcomes of second legs."""
    store = GateStore.open(str(folder / "gate.db"))
    try:
        until(lambda: store.count(experiment) >= count, IDLE_S)
        running.app.writer.flush(IDLE_S)
        return list(store.pairs(experiment))
    finally:
        store.close()


def outcomes(running: Gate) -> dict[str, float]:
    lines = running.app.metrics.render()[0].decode().splitlines()
    found = [line for line in lines if line.startswith("paceline_gate_mirror_total{")]
    return {line.split('outcome="')[1].split('"')[0]: float(line.split()[-1]) for line in found}


def idle(running: Gate) -> bool:
    """No request of a user is in flight, and no second leg waits or runs."""
    app = running.app
    lanes = app.mirror._lanes.values()
    return not app._in_flight.total() and not any(lane.waiting or lane.running for lane in lanes)


def test_both_legs_are_one_pair_with_one_seed_and_the_user_sees_only_the_baseline(
    both: tuple[Upstream, Upstream], tmp_path: Path
) -> None:
    with mirroring(tmp_path, both) as running:
        messages: Any = [{"role": "user", "content": "hello"}]
        chunks = list(
            running.client().chat.completions.create(
                model="m", messages=messages, temperature=0.5, stream=True, extra_headers={"x-cohort": "eu"}
            )
        )
        (pair,) = pairs(running, tmp_path, 1)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "base " + TEXT
    assert all(chunk.usage is None for chunk in chunks)  # the gate asked for it, the client did not
    first, second = both[0].requests[0], both[1].requests[0]
    assert first["seed"] == second["seed"] == pair.seed
    assert first["messages"] == second["messages"] == messages
    assert second["stream"] is True
    assert second["headers"]["x-paceline-mirror"] == pair.id
    assert (pair.baseline.upstream, pair.candidate.upstream) == ("base", "cand")
    assert (pair.baseline.text, pair.candidate.text) == ("base " + TEXT, "cand " + TEXT)
    assert pair.baseline.completion_tokens == pair.candidate.completion_tokens == 5
    assert len(pair.baseline.chunk_s) == len(pair.candidate.chunk_s) == 5
    assert pair.same is False
    assert pair.divergence is not None
    assert pair.divergence.character == 0
    assert (pair.cohort, pair.order, pair.temperature) == ("eu", "baseline_first", 0.5)


def test_large_bodies_reach_both_legs_whole(both: tuple[Upstream, Upstream], tmp_path: Path) -> None:
    content = "long \u00e9 " * 20_000
    with mirroring(tmp_path, both) as running:
        assert ask(running.client(), content) == "base " + TEXT
        (pair,) = pairs(running, tmp_path, 1)
    assert [one.requests[0]["messages"][0]["content"] for one in both] == [content] * 2
    assert [one.requests[0]["seed"] for one in both] == [pair.seed] * 2


def test_without_text_a_pair_tells_only_whether_its_answers_are_equal(
    both: tuple[Upstream, Upstream], tmp_path: Path
) -> None:
    with mirroring(tmp_path, both, candidate="base", experiment="aa", text=False) as running:  # an A/A
        answer = running.client().chat.completions.create(
            model="m", messages=[{"role": "user", "content": "secret words"}], seed=3
        )
        assert answer.choices[0].message.content == "base " + TEXT
        (pair,) = pairs(running, tmp_path, 1, "aa")
    assert pair.same is True
    assert pair.baseline.text is None
    assert pair.request is None
    assert pair.seed == 3
    assert (pair.baseline.upstream, pair.candidate.upstream) == ("base", "base")
    assert b"secret words" not in (tmp_path / "gate.db").read_bytes()


def test_users_are_answered_while_the_mirror_is_blocked_and_full(
    both: tuple[Upstream, Upstream], tmp_path: Path
) -> None:
    both[1].hold = threading.Event()
    with mirroring(tmp_path, both, max_concurrent=1, max_waiting=2) as running:
        client = running.client()
        for number in range(8):
            assert ask(client, f"talk {number}") == "base " + TEXT
        assert until(lambda: outcomes(running).get("queue_full") == 5, IDLE_S)
        assert not both[1].hold.is_set()  # the candidate has answered nobody yet
        assert len(both[1].requests) == 1
        both[1].hold.set()
        assert len(pairs(running, tmp_path, 3)) == 3


def test_a_candidate_that_fails_is_recorded_and_never_opens_a_breaker_of_users(
    both: tuple[Upstream, Upstream], tmp_path: Path
) -> None:
    both[1].behaviour = "cut"
    with mirroring(tmp_path, both, order="concurrent") as running:
        for number in range(7):
            assert ask(running.client(), f"talk {number}") == "base " + TEXT
            until(lambda n=number: sum(outcomes(running).values()) == n + 1, IDLE_S)  # type: ignore[misc]
        recorded = pairs(running, tmp_path, 5)
        assert outcomes(running) == {"recorded": 5.0, "breaker_open": 2.0}
        assert running.app.client.states["cand"].breaker.state == "closed"
    assert {pair.candidate.error for pair in recorded} == {"disconnect"}
    assert {pair.order for pair in recorded} == {"concurrent"}
    assert all(pair.baseline.ok for pair in recorded)


def test_a_baseline_that_fails_is_mirrored_too(both: tuple[Upstream, Upstream], tmp_path: Path) -> None:
    both[0].behaviour = "status 400"
    with mirroring(tmp_path, both) as running:
        with pytest.raises(openai.BadRequestError):
            ask(running.client())
        (pair,) = pairs(running, tmp_path, 1)
    assert (pair.baseline.error, pair.candidate.error) == ("http_400", None)


def test_whole_conversations_are_sampled(both: tuple[Upstream, Upstream], tmp_path: Path) -> None:
    talks = 40
    with mirroring(tmp_path, both, share=0.5) as running:
        client = running.client()
        for number in range(talks):
            ask(client, f"talk {number}")
            messages: Any = [
                {"role": "user", "content": f"talk {number}"},
                {"role": "assistant", "content": "yes"},
                {"role": "user", "content": "and then?"},
            ]
            client.chat.completions.create(model="m", messages=messages)
        assert until(lambda: idle(running), IDLE_S)
        sampled = [request["messages"][0]["content"] for request in both[1].requests]
    assert {sampled.count(content) for content in sampled} == {2}  # both turns or none
    assert talks / 4 < len(set(sampled)) < 3 * talks / 4


def test_requests_that_must_not_run_twice_are_not_mirrored(
    both: tuple[Upstream, Upstream], tmp_path: Path
) -> None:
    unmirrored: list[tuple[dict[str, Any], str]] = [
        ({"n": 2}, "several_choices"),
        ({"extra_body": {"tools": [{"type": "web_search"}]}}, "server_tools"),
        ({"extra_body": {"web_search_options": {}}}, "server_tools"),
        ({"extra_body": {"previous_response_id": "x"}}, "server_state"),
        ({"extra_headers": {"x-paceline-mirror": "never"}}, "opted_out"),
    ]
    with mirroring(tmp_path, both) as running:
        client = running.client()
        for more, _ in unmirrored:
            ask(client, **more)
        assert until(lambda: outcomes(running) == Counter(reason for _, reason in unmirrored), IDLE_S)
        ask(client, store=True, tools=[{"type": "function", "function": {"name": "f"}}])
        pairs(running, tmp_path, 1)
    (second,) = both[1].requests
    assert "store" not in second
    assert both[0].requests[-1]["store"] is True


def test_nothing_is_mirrored_above_a_load(both: tuple[Upstream, Upstream], tmp_path: Path) -> None:
    both[0].hold = threading.Event()
    with mirroring(tmp_path, both, shed_above=1) as running:
        users = [threading.Thread(target=ask, args=(running.client(), f"talk {n}")) for n in range(3)]
        for user in users:
            user.start()
        assert until(lambda: len(both[0].requests) == 3, IDLE_S)
        both[0].hold.set()
        for user in users:
            user.join()
        assert until(lambda: outcomes(running) == {"shed": 2.0, "recorded": 1.0}, IDLE_S)


def test_feedback_is_counted_for_the_arm_that_answered(
    both: tuple[Upstream, Upstream], tmp_path: Path
) -> None:
    keys = tmp_path / "keys.json"
    mine, other = add(keys, "mine"), add(keys, "other")
    with mirroring(tmp_path, both, {"keys": str(keys)}) as running:
        url, headers = f"{running.url}/v1", {"authorization": f"Bearer {mine}"}
        body = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
        answer = httpx.post(f"{url}/chat/completions", json=body, headers=headers)
        pairs(running, tmp_path, 1)
        request_id = answer.headers["x-request-id"]

        def tell(key: str, **fields: Any) -> int:
            bearer = {"authorization": f"Bearer {key}"}
            return httpx.post(f"{url}/feedback", json=fields, headers=bearer).status_code

        assert tell(mine, request_id=request_id, thumbs="up") == 200
        assert tell(mine, request_id=answer.json()["id"], thumbs="down", escalation=True) == 200
        assert tell(other, request_id=request_id, thumbs="up") == 404
        assert tell(mine, request_id="unknown", thumbs="up") == 404
        assert tell(mine, request_id=request_id) == 400
        assert tell(mine, request_id=request_id, thumbs="sideways") == 400
        store = GateStore.open(str(tmp_path / "gate.db"))
        (word,) = store.feedback("all-cand")  # the last one
        store.close()
    assert (word.request, word.arm, word.thumbs, word.escalation) == (request_id, "baseline", "down", True)


def test_spans_of_both_legs_share_a_trace_and_the_pairs_id(
    both: tuple[Upstream, Upstream], tmp_path: Path
) -> None:
    spans, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    with mirroring(tmp_path, both) as running:
        traced = GateSpans(Exporter(provider))
        running.app.spans = running.app.proxy._spans = running.app.mirror._spans = traced
        ask(running.client())
        (pair,) = pairs(running, tmp_path, 1)
        assert until(lambda: len(spans.get_finished_spans()) == 3, IDLE_S)
    by_name = {span.name: span for span in spans.get_finished_spans()}
    assert set(by_name) == {"chat m", "upstream base", "upstream cand"}
    assert len({span.context.trace_id for span in by_name.values()}) == 1
    request, second = (dict(by_name[name].attributes or {}) for name in ("chat m", "upstream cand"))
    assert request["mirror.pair_id"] == second["mirror.pair_id"] == pair.id
    assert second["route.role"] == "candidate"
    assert second["gen_ai.usage.output_tokens"] == second["llm.token_count.completion"] == 5
    assert second["llm.token_count.prompt"] == 7
    assert isinstance(second["gen_ai.server.time_to_first_token"], float)
    assert request["gen_ai.usage.output_tokens"] == 5
    traces = {one.requests[0]["headers"]["traceparent"].split("-")[1] for one in both}
    assert traces == {f"{by_name['chat m'].context.trace_id:032x}"}


def test_a_real_server_with_and_without_speculation_makes_pairs_of_equal_text(
    toy_server: "Running", tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = {"speculative_config": {"disabled": True}}
    eager = {"speculative_config": {"drafters": ["ngram"], "adaptive": False}, "metrics": True}
    config = {
        "upstreams": [
            {"name": "plain", "url": toy_server.url, "extra_body": plain},
            {"name": "speculative", "url": toy_server.url, "extra_body": eager},
        ],
        "routes": [
            {
                "name": "all",
                "upstreams": {"plain": 1},
                "mirror": {"candidate": "speculative", "share": 1.0, "text": True},
            }
        ],
    }
    store = str(tmp_path / "gate.db")
    with gate(tmp_path, config, store=store) as running:
        client = running.client()
        for number in range(3):
            prompt: Any = [{"role": "user", "content": f"again and again {number} again and again"}]
            request: Any = {"model": "toy", "messages": prompt, "temperature": 2.0, "max_tokens": 24}
            assert list(client.chat.completions.create(**request, stream=True))
            assert client.chat.completions.create(**request).choices
        recorded = pairs(running, tmp_path, 6, "all-speculative")
    assert [pair.same for pair in recorded] == [True] * 6
    assert all(pair.seed is not None and pair.ok for pair in recorded)
    assert len({pair.conversation for pair in recorded}) == 3
    assert {pair.baseline.completion_tokens for pair in recorded} == {24}
    assert {pair.baseline.draft_tokens for pair in recorded} <= {None, 0}
    assert any(pair.candidate.draft_tokens for pair in recorded)
    assert all(pair.baseline.ttft_s for pair in recorded)
    code, out, _ = run(capsys, "gate", "export", "all-speculative", "--store", store)
    assert code == 0
    assert [Pair.from_json(line) for line in out.splitlines()] == recorded


def test_users_of_a_promoted_candidate_are_paired_with_the_baseline_which_takes_over_if_it_fails(
    both: tuple[Upstream, Upstream], tmp_path: Path
) -> None:
    store = GateStore.open(str(tmp_path / "gate.db"))
    assert store.change(Rollout("all-cand"), "promoted", 1.0, "test", "trusted")
    promotion = {"automatic": False}
    with mirroring(tmp_path, both, route={"promotion": promotion, "retries": {"backoff_s": 0}}) as running:
        assert ask(running.client()) == "cand " + TEXT
        (pair,) = pairs(running, tmp_path, 1)
        assert (pair.baseline.upstream, pair.candidate.upstream) == ("base", "cand")
        assert pair.order == "candidate_first"
        both[1].behaviour = "status 503"
        assert ask(running.client(), "again") == "base " + TEXT
        _, failed = pairs(running, tmp_path, 2)
        ids = (one["headers"]["x-request-id"] for one in both[1].requests)
        answered = [served.arm for id in ids if (served := store.served(id)) is not None]
    assert failed.candidate.fallback
    assert failed.candidate.retries == 1
    assert not failed.baseline.fallback
    assert answered == ["candidate", "baseline"]
    store.close()
