"""A run with prefetching has the results, the effects and the errors of one without."""

import asyncio
import json
import random
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import wait
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.agent import AsyncPrefetch, Prefetch, read_only_tools
from paceline.errors import SettingError

WAIT_S = 10


class Shop:
    """Tools over one piece of state: reading does not change it, counting shows who ran."""

    def __init__(self) -> None:
        self.stock = 3
        self.ran: list[str] = []
        self._lock = threading.Lock()

    def get_stock(self, item: str) -> str:
        with self._lock:
            self.ran.append(f"get_stock {item}")
            if item == "nothing":
                raise LookupError(item)
            return f"{item}: {self.stock}"

    def take(self, item: str) -> str:
        with self._lock:
            self.ran.append(f"take {item}")
            self.stock -= 1
            return f"took {item}"

    @property
    def tools(self) -> dict[str, Callable[..., Any]]:
        return {"get_stock": self.get_stock, "take": self.take}


def predicted(name: str, **arguments: Any) -> dict[str, Any]:
    return {"function": {"name": name, "arguments": json.dumps(arguments)}, "probability": 0.9}


def chunk(*calls: dict[str, Any]) -> dict[str, Any]:
    return {"choices": [], "predicted_tool_calls": list(calls)}


@pytest.fixture
def shop() -> Shop:
    return Shop()


@pytest.fixture
def prefetch(shop: Shop) -> Iterator[Prefetch]:
    with Prefetch(shop.tools, safe=["get_stock"]) as prefetch:
        yield prefetch


def test_a_predicted_call_runs_once_and_its_result_is_used_once(shop: Shop, prefetch: Prefetch) -> None:
    assert list(prefetch.watch([chunk(predicted("get_stock", item="tea")), {"choices": ["text"]}]))
    assert prefetch.run("get_stock", '{ "item" : "tea" }') == "tea: 3"
    assert shop.ran == ["get_stock tea"]
    assert prefetch.run("get_stock", '{"item": "tea"}') == "tea: 3"
    assert shop.ran == ["get_stock tea"] * 2
    assert (prefetch.stats.started, prefetch.stats.used) == (1, 1)


@pytest.mark.parametrize("arguments", ['{"item": "milk"}', '{"item": "tea", "n": 1}', '{"item": ["tea"]}'])
def test_other_arguments_get_no_foreign_result(arguments: str) -> None:
    with Prefetch({"get_stock": lambda **given: given}, safe=["get_stock"]) as prefetch:
        prefetch.start([predicted("get_stock", item="tea")])
        assert prefetch.run("get_stock", arguments) == json.loads(arguments)
        assert prefetch.stats.used == 0


@pytest.mark.parametrize(
    ("one", "other"), [("1", "1.0"), ("1", "true"), ("0", "false"), ('"1"', "1"), ("null", '""')]
)
def test_values_that_a_tool_can_tell_apart_are_different_calls(one: str, other: str) -> None:
    with Prefetch({"get": lambda **given: given}, safe=["get"]) as prefetch:
        prefetch.start([{"function": {"name": "get", "arguments": f'{{"x": {one}}}'}}])
        assert repr(prefetch.run("get", f'{{"x": {other}}}')) == repr(json.loads(f'{{"x": {other}}}'))


def test_the_order_of_members_does_not_matter_for_equality_and_is_kept_for_the_tool() -> None:
    with Prefetch({"get": lambda **given: list(given)}, safe=["get"]) as prefetch:
        prefetch.start([{"function": {"name": "get", "arguments": '{"b": 1, "a": 2}'}}])
        assert prefetch.run("get", '{"a": 2, "b": 1}') == ["b", "a"]
        assert prefetch.run("get", '{"b": 1, "a": 2}') == ["b", "a"]


def test_a_tool_that_is_not_safe_never_runs_ahead_of_time(shop: Shop, prefetch: Prefetch) -> None:
    list(prefetch.watch([chunk(predicted("take", item="tea"), predicted("unknown"))]))
    assert shop.ran == []
    assert prefetch.run("take", '{"item": "tea"}') == "took tea"
    assert shop.ran == ["take tea"]


def test_a_result_from_before_an_effect_is_not_used_after_it(shop: Shop, prefetch: Prefetch) -> None:
    prefetch.start([predicted("get_stock", item="tea")])
    prefetch.run("take", '{"item": "tea"}')
    assert prefetch.run("get_stock", '{"item": "tea"}') == "tea: 2"
    assert prefetch.stats.dropped == 1


def test_results_of_an_earlier_answer_are_dropped_when_the_next_begins(
    shop: Shop, prefetch: Prefetch
) -> None:
    list(prefetch.watch([chunk(predicted("get_stock", item="tea"))]))
    shop.stock = 7  # somebody else
    list(prefetch.watch([{"choices": []}]))
    assert prefetch.run("get_stock", '{"item": "tea"}') == "tea: 7"
    assert (prefetch.stats.used, prefetch.stats.dropped) == (0, 1)


@pytest.mark.parametrize(("later_s", "found"), [(4.0, "tea: 3"), (5.0, "tea: 7")])
def test_a_result_may_wait_for_a_later_answer_as_long_as_it_is_told(
    shop: Shop, later_s: float, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr("paceline.agent.prefetch.monotonic", lambda: now[0])
    with Prefetch(shop.tools, safe=["get_stock"], keep_s=5.0) as prefetch:
        list(prefetch.watch([chunk(predicted("get_stock", item="tea"))]))
        wait(call.running for call in prefetch._ahead.values())
        shop.stock = 7  # somebody else
        now[0] += later_s
        list(prefetch.watch([chunk()]))
        assert prefetch.run("get_stock", '{"item": "tea"}') == found
        assert (prefetch.stats.used, prefetch.stats.dropped) == ((1, 0) if later_s < 5 else (0, 1))


def test_a_result_of_an_earlier_answer_grows_too_old_while_a_later_one_runs(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr("paceline.agent.prefetch.monotonic", lambda: now[0])
    tea, milk = predicted("get_stock", item="tea"), predicted("get_stock", item="milk")
    with Prefetch(shop.tools, safe=["get_stock"], keep_s=5.0) as prefetch:
        list(prefetch.watch([chunk(tea, milk)]))
        wait(call.running for call in prefetch._ahead.values())
        shop.stock = 7  # somebody else
        now[0] = 4.0
        answer = prefetch.watch([chunk(), chunk(tea)])
        next(answer)
        now[0] = 10.0
        next(answer)  # predicted again: the old result does not stand in its way
        assert (prefetch.stats.started, prefetch.stats.dropped) == (3, 2)
        wait(call.running for call in prefetch._ahead.values())
        now[0] = 64.0
        shop.stock = 9
        assert prefetch.run("get_stock", '{"item": "tea"}') == "tea: 7"  # of the answer that runs
        assert prefetch.run("get_stock", '{"item": "milk"}') == "milk: 9"


def test_a_call_made_late_in_a_later_answer_runs_anew(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("paceline.agent.prefetch.monotonic", lambda: now[0])
    with Prefetch(shop.tools, safe=["get_stock"], keep_s=5.0) as prefetch:
        list(prefetch.watch([chunk(predicted("get_stock", item="tea"))]))
        wait(call.running for call in prefetch._ahead.values())
        shop.stock = 7
        now[0] = 4.0
        list(prefetch.watch([chunk()]))
        now[0] = 64.0
        assert prefetch.run("get_stock", '{"item": "tea"}') == "tea: 7"
        assert (prefetch.stats.used, prefetch.stats.dropped) == (0, 1)
        prefetch.start([predicted("get_stock", item="tea")])
        now[0] = 69.0
        list(prefetch.watch([chunk()]))
        assert prefetch.stats.dropped == 2  # no result is held that nobody may use


def test_ages_are_looked_at_under_the_lock(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread's `start` changes what is looked through."""
    held: list[bool] = []
    with Prefetch(shop.tools, safe=["get_stock"], keep_s=5.0) as prefetch:

        def now() -> float:
            held.append(prefetch._lock.locked())
            return 0.0

        monkeypatch.setattr("paceline.agent.prefetch.monotonic", now)
        list(prefetch.watch([chunk(predicted("get_stock", item="tea"))]))
        prefetch.run("get_stock", '{"item": "tea"}')
    assert held
    assert all(held)


@pytest.mark.parametrize("renewed", [False, True])
def test_results_grow_old_in_asyncio_too(renewed: bool, shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("paceline.agent.prefetch.monotonic", lambda: now[0])

    async def answer(prefetch: AsyncPrefetch, *calls: dict[str, Any]) -> None:
        async def chunks() -> AsyncIterator[Any]:
            yield chunk(*calls)

        async for _ in prefetch.watch(chunks()):
            pass

    async def story() -> None:
        tea = predicted("get_stock", item="tea")
        async with AsyncPrefetch(shop.tools, safe=["get_stock"], keep_s=5.0) as prefetch:
            await answer(prefetch, tea)
            await asyncio.wait([call.running for call in prefetch._ahead.values()])
            shop.stock = 7  # somebody else
            now[0] = 4.0
            await answer(prefetch)
            now[0] = 10.0
            if renewed:
                prefetch.start([tea])
                assert (prefetch.stats.started, prefetch.stats.dropped) == (2, 1)
            now[0] = 64.0
            assert await prefetch.run("get_stock", '{"item": "tea"}') == "tea: 7"
            assert (prefetch.stats.used, prefetch.stats.dropped) == (int(renewed), 1)
            prefetch.start([tea])
            await answer(prefetch)
            assert prefetch.stats.dropped == 1
            now[0] = 69.0
            await answer(prefetch)
            assert prefetch.stats.dropped == 2  # at once, which cancels it

    asyncio.run(story())


def test_a_result_that_waits_does_not_outlast_an_effect(shop: Shop) -> None:
    with Prefetch(shop.tools, safe=["get_stock"], keep_s=1e6) as prefetch:
        list(prefetch.watch([chunk(predicted("get_stock", item="tea"))]))
        prefetch.run("take", '{"item": "tea"}')
        list(prefetch.watch([chunk()]))
        assert prefetch.run("get_stock", '{"item": "tea"}') == "tea: 2"


def test_a_call_that_waits_is_not_begun_again(shop: Shop) -> None:
    with Prefetch(shop.tools, safe=["get_stock"], keep_s=1e6) as prefetch:
        for _ in range(3):
            list(prefetch.watch([chunk(predicted("get_stock", item="tea"))]))
        assert prefetch.run("get_stock", '{"item": "tea"}') == "tea: 3"
        assert shop.ran == ["get_stock tea"]


def test_an_error_ahead_of_time_shows_only_where_the_call_is_made(shop: Shop, prefetch: Prefetch) -> None:
    prefetch.start([predicted("get_stock", item="nothing"), predicted("get_stock", item="tea")])
    assert prefetch.run("get_stock", '{"item": "tea"}') == "tea: 3"
    with pytest.raises(LookupError):
        prefetch.run("get_stock", '{"item": "nothing"}')
    assert shop.ran.count("get_stock nothing") == 2  # the second is the plain run's
    assert prefetch.stats.failed == 1


def test_an_error_that_passes_is_not_reported() -> None:
    errors = [TimeoutError()]

    def get() -> str:
        if errors:
            raise errors.pop()
        return "ok"

    with Prefetch({"get": get}, safe=["get"]) as prefetch:
        prefetch.start([predicted("get")])
        assert prefetch.run("get", "{}") == "ok"


def test_at_most_so_many_run_at_once_and_a_needed_call_never_waits_for_them() -> None:
    release, running = threading.Event(), threading.Semaphore(0)

    def get(n: int) -> int:
        running.release()
        assert n == 9 or release.wait(WAIT_S)
        return n

    with Prefetch({"get": get}, safe=["get"], max_running=2) as prefetch:
        prefetch.start([predicted("get", n=n) for n in range(5)])
        for _ in range(2):
            assert running.acquire(timeout=WAIT_S)
        assert (prefetch.stats.started, prefetch.stats.skipped) == (2, 3)
        assert prefetch.run("get", '{"n": 9}') == 9  # while both still run
        list(prefetch.watch([chunk(predicted("get", n=5))]))  # dropped ones still have their threads
        assert prefetch.stats.skipped == 4
        release.set()


def test_malformed_predictions_are_ignored(shop: Shop, prefetch: Prefetch) -> None:
    broken: list[Any] = [
        {},
        {"function": None},
        {"function": {"name": "get_stock"}},
        {"function": {"name": "get_stock", "arguments": "{"}},
        {"function": {"name": "get_stock", "arguments": "[]"}},
        {"function": {"name": ["x"], "arguments": "{}"}},
    ]
    list(prefetch.watch([chunk(*broken), {"predicted_tool_calls": "none"}, "text"]))
    assert shop.ran == []


def test_objects_work_as_dicts_do(shop: Shop, prefetch: Prefetch) -> None:
    function = SimpleNamespace(name="get_stock", arguments='{"item": "tea"}')
    list(prefetch.watch([SimpleNamespace(predicted_tool_calls=[SimpleNamespace(function=function)])]))
    prefetch.run("get_stock", {"item": "tea"})
    assert prefetch.stats.used == 1


def test_hints_are_read_as_mcp_and_openai_tools_have_them() -> None:
    hints = {"readOnlyHint": True}
    tools: list[Any] = [
        {"name": "mcp", "annotations": hints},
        {"type": "function", "function": {"name": "openai"}, "annotations": hints},
        {"type": "function", "function": {"name": "inside", "annotations": hints}},
        SimpleNamespace(name="object", annotations=SimpleNamespace(readOnlyHint=True)),
        {"name": "writes", "annotations": {"readOnlyHint": False}},
        {"name": "unsure", "annotations": {"readOnlyHint": "true"}},
        {"name": "silent"},
    ]
    assert read_only_tools(tools) == ["mcp", "openai", "inside", "object"]


def test_settings_that_cannot_work_are_refused(shop: Shop) -> None:
    with pytest.raises(SettingError, match="safe=\\['get'\\]"):
        Prefetch(shop.tools, safe=["get"])
    with pytest.raises(SettingError, match="max_running=0"):
        Prefetch(shop.tools, safe=[], max_running=0)


def test_requests_name_the_safe_tools(shop: Shop) -> None:
    with Prefetch(shop.tools, safe=["get_stock"], min_probability=0.5) as prefetch:
        wish = {"safe_tools": ["get_stock"], "min_probability": 0.5}
        assert prefetch.extra_body == {"predict_tool_calls": wish}


def pieces(index: int, name: str, arguments: str, choice: int = 0) -> Iterator[dict[str, Any]]:
    """A call as a chat streams it: the name, then the arguments in two pieces."""
    for part in ({"name": name, "arguments": ""}, {"arguments": arguments[:4]}, {"arguments": arguments[4:]}):
        yield {"choices": [{"index": choice, "delta": {"tool_calls": [{"index": index, "function": part}]}}]}


def item(name: str, arguments: str) -> dict[str, Any]:
    """The same as an event of /v1/responses."""
    call = {"type": "function_call", "name": name, "arguments": arguments}
    return {"type": "response.output_item.done", "item": call}


def as_objects(value: Any) -> Any:
    if isinstance(value, dict):
        return SimpleNamespace(**{name: as_objects(part) for name, part in value.items()})
    return [as_objects(part) for part in value] if isinstance(value, list) else value


TEA = '{"item": "tea"}'
STREAMS: dict[str, list[Any]] = {
    "chat": list(pieces(0, "get_stock", TEA)),
    "objects": [as_objects(chunk) for chunk in pieces(0, "get_stock", TEA)],
    "responses": [item("get_stock", TEA)],
    "nested": list(pieces(0, "get_stock", '{"item": {"a": {}}}')),
}


@pytest.mark.parametrize("kind", STREAMS)
def test_a_call_begins_once_it_is_written_and_not_before(kind: str, shop: Shop, prefetch: Prefetch) -> None:
    *before, last = STREAMS[kind]
    answer = prefetch.watch([*before, last, {"choices": []}])
    for _ in before:
        next(answer)
    assert not prefetch._ahead
    next(answer)
    ((_, arguments),) = prefetch._ahead
    wait(begun.running for begun in prefetch._ahead.values())
    assert len(shop.ran) == 1
    list(answer)
    prefetch.run("get_stock", arguments)
    assert len(shop.ran) == 1
    assert (prefetch.stats.written, prefetch.stats.started, prefetch.stats.used) == (1, 0, 0)


def test_the_calls_of_an_answer_run_side_by_side_and_no_more_than_allowed() -> None:
    together, running = threading.Barrier(2), threading.Semaphore(2)

    def get(n: int) -> int:
        assert running.acquire(blocking=False)
        together.wait(WAIT_S)
        running.release()
        return n

    with Prefetch({"get": get}, safe=["get"], max_running=2) as prefetch:
        list(prefetch.watch([part for n in range(4) for part in pieces(n, "get", f'{{"n": {n}}}')]))
        assert [prefetch.run("get", {"n": n}) for n in range(4)] == [0, 1, 2, 3]
        assert prefetch.stats.written == 4


def test_a_written_call_does_not_wait_for_predicted_ones() -> None:
    release = threading.Event()

    def get(n: int) -> int:
        assert n == 9 or release.wait(WAIT_S)
        return n

    with Prefetch({"get": get}, safe=["get"], max_running=1) as prefetch:
        list(prefetch.watch([chunk(predicted("get", n=1)), *pieces(0, "get", '{"n": 9}')]))
        assert prefetch.run("get", {"n": 9}) == 9
        assert not any(begun.running.done() for begun in prefetch._ahead.values())
        release.set()


def test_nothing_begins_behind_a_call_that_is_not_safe(shop: Shop, prefetch: Prefetch) -> None:
    milk = '{"item": "milk"}'
    answer = [*pieces(0, "get_stock", TEA), *pieces(1, "take", TEA), *pieces(2, "get_stock", milk)]
    list(prefetch.watch(answer))
    assert prefetch.run("get_stock", TEA) == "tea: 3"
    assert prefetch.run("take", TEA) == "took tea"
    assert prefetch.run("get_stock", milk) == "milk: 2"
    assert (prefetch.stats.written, prefetch.stats.dropped) == (1, 0)
    list(prefetch.watch([item("take", TEA), item("get_stock", milk)]))
    assert prefetch.stats.written == 1
    list(prefetch.watch([item("get_stock", milk)]))  # another answer
    assert prefetch.stats.written == 2


def test_a_predicted_call_does_not_begin_again_when_it_is_written(shop: Shop, prefetch: Prefetch) -> None:
    list(prefetch.watch([chunk(predicted("get_stock", item="tea")), *pieces(0, "get_stock", TEA)]))
    assert prefetch.run("get_stock", TEA) == "tea: 3"
    assert shop.ran == ["get_stock tea"]
    assert (prefetch.stats.used, prefetch.stats.written) == (1, 0)


def test_calls_of_other_choices_and_broken_ones_do_not_begin(shop: Shop, prefetch: Prefetch) -> None:
    broken: list[Any] = [
        item("get_stock", '{"item"}'),
        item("get_stock", "[]"),
        {"type": "response.output_item.done", "item": {"type": "message", "name": "get_stock"}},
        {"choices": [{"delta": None}, {"delta": {"tool_calls": [None, {"index": 0}, "text"]}}]},
    ]
    for one in ([*pieces(0, "get_stock", TEA, choice=1)], *([event] for event in broken)):
        assert list(prefetch.watch(one)) == one
    assert prefetch.stats.written == 0


def test_written_calls_that_wait_for_their_turn_do_not_begin_once_they_are_dropped() -> None:
    release, began = threading.Event(), threading.Event()
    ran: list[int] = []

    def get(n: int) -> int:
        ran.append(n)
        began.set()
        assert release.wait(WAIT_S)
        return n

    with Prefetch({"get": get}, safe=["get"], max_running=1) as prefetch:
        list(prefetch.watch([item("get", '{"n": 1}'), item("get", '{"n": 2}')]))
        assert began.wait(WAIT_S)
        prefetch.drop()
        release.set()
        list(prefetch.watch([item("get", '{"n": 3}')]))
        assert prefetch.run("get", {"n": 3}) == 3
        assert ran == [1, 3]


def test_a_call_that_is_needed_now_does_not_wait_for_its_turn() -> None:
    """The caller runs it: those before it may be of an answer that was dropped."""
    release = threading.Event()

    def get(n: int) -> int:
        assert n == 2 or release.wait(WAIT_S)
        return n

    with Prefetch({"get": get}, safe=["get"], max_running=1) as prefetch:
        list(prefetch.watch([item("get", '{"n": 1}')]))
        list(prefetch.watch([item("get", '{"n": 2}')]))
        assert prefetch.run("get", {"n": 2}) == 2
        release.set()


def test_written_calls_run_side_by_side_in_asyncio_too() -> None:
    running: list[int] = []
    most = 0

    async def get(n: int) -> int:
        nonlocal most
        running.append(n)
        most = max(most, len(running))
        await asyncio.sleep(0.001)
        running.remove(n)
        if n == 3:
            raise LookupError(n)
        return n

    async def main() -> None:
        calls = [part for n in range(4) for part in pieces(n, "get", f'{{"n": {n}}}')]
        async with AsyncPrefetch({"get": get}, safe=["get"], max_running=2) as prefetch:
            async for _ in prefetch.watch(stream(*calls)):
                pass
            assert [await prefetch.run("get", {"n": n}) for n in range(3)] == [0, 1, 2]
            with pytest.raises(LookupError):
                await prefetch.run("get", {"n": 3})
            assert most == 2
            stats = prefetch.stats
            assert (stats.written, stats.used, stats.failed) == (4, 0, 1)

    asyncio.run(main())


Step = tuple[list[dict[str, Any]], list[tuple[str, dict[str, Any]]]]  # predictions and calls of one answer


def random_steps(rng: random.Random) -> list[Step]:
    def call() -> tuple[str, dict[str, Any]]:
        return rng.choice(["get_stock", "get_stock", "take"]), {
            "item": rng.choice(["tea", "milk", "nothing"])
        }

    def one() -> Step:
        calls = [call() for _ in range(rng.randint(0, 3))]
        guesses = [c for c in calls if rng.random() < 0.7] + [call() for _ in range(rng.randint(0, 2))]
        return [predicted(name, **arguments) for name, arguments in guesses], calls

    return [one() for _ in range(12)]


def outcome(run: Callable[[], Any]) -> str:
    try:
        return str(run())
    except LookupError as error:
        return repr(error)


@pytest.mark.parametrize("seed", range(20))
def test_results_and_effects_are_those_of_the_plain_run(seed: int) -> None:
    steps = random_steps(random.Random(seed))
    plain, ahead = Shop(), Shop()
    expected = [
        outcome(lambda name=name, given=given: plain.tools[name](**given))  # type: ignore[misc]
        for _, calls in steps
        for name, given in calls
    ]
    results = []
    with Prefetch(ahead.tools, safe=["get_stock"]) as prefetch:
        for guesses, calls in steps:
            parts = [part for i, (n, g) in enumerate(calls) for part in pieces(i, n, json.dumps(g))]
            list(prefetch.watch([chunk(*guesses), *parts]))
            results += [outcome(lambda n=n, g=g: prefetch.run(n, json.dumps(g))) for n, g in calls]  # type: ignore[misc]
    assert results == expected
    takes = [ran for ran in plain.ran if ran.startswith("take")]
    assert [ran for ran in ahead.ran if ran.startswith("take")] == takes


async def stream(*chunks: Any) -> AsyncIterator[Any]:
    for one in chunks:
        yield one


def test_the_async_client_awaits_coroutines_and_runs_functions_in_threads(shop: Shop) -> None:
    async def look_up(item: str) -> str:
        await asyncio.sleep(0)
        return shop.get_stock(item)

    async def main() -> None:
        tools = {"look_up": look_up, **shop.tools}
        async with AsyncPrefetch(tools, safe=["look_up", "get_stock"]) as prefetch:
            guesses = (predicted("look_up", item="tea"), predicted("get_stock", item="milk"))
            async for _ in prefetch.watch(stream(chunk(*guesses))):
                pass
            assert await prefetch.run("get_stock", '{"item": "milk"}') == "milk: 3"
            assert await prefetch.run("look_up", '{"item": "tea"}') == "tea: 3"
            assert sorted(shop.ran) == ["get_stock milk", "get_stock tea"]
            prefetch.start([predicted("look_up", item="tea"), predicted("look_up", item="nothing")])
            with pytest.raises(LookupError):
                await prefetch.run("look_up", '{"item": "nothing"}')
            await prefetch.run("take", '{"item": "tea"}')
            assert await prefetch.run("look_up", '{"item": "tea"}') == "tea: 2"
            stats = prefetch.stats
            assert (stats.started, stats.used, stats.failed, stats.dropped) == (4, 2, 1, 1)

    asyncio.run(main())


def test_the_async_client_cancels_what_it_drops_and_bounds_what_runs() -> None:
    cancelled: list[int] = []

    async def get(n: int) -> int:
        try:
            await asyncio.sleep(WAIT_S if n else 0)
        except asyncio.CancelledError:
            cancelled.append(n)
            raise
        return n

    async def main() -> None:
        async with AsyncPrefetch({"get": get}, safe=["get"], max_running=2) as prefetch:
            prefetch.start([predicted("get", n=n) for n in (1, 2, 3)])
            await asyncio.sleep(0)
            assert prefetch.stats.skipped == 1
            assert await prefetch.run("get", {"n": 0}) == 0
            prefetch.drop()
            await asyncio.sleep(0.01)
            assert sorted(cancelled) == [1, 2]

    asyncio.run(main())


def test_the_client_needs_neither_torch_nor_the_server() -> None:
    code = "import sys, paceline.agent; sys.exit(bool({'torch', 'starlette', 'openai'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
