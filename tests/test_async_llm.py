"""AsyncLLM: the text of LLM, passes that tasks share, cancelled tasks, an end that everybody hears of."""

import asyncio
import gc
import inspect
import threading
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from paceline import LLM, AsyncLLM, BatchError, EngineConfig, Result
from paceline.errors import PromptTooLong, SettingError, ShuttingDown, UsageError
from paceline.types import Round, Seq
from support.servers import toy_chat_model

T = TypeVar("T")

LIMIT_S = 120  # for what takes milliseconds
LONG: dict[str, Any] = {"max_tokens": 300, "ignore_eos": True}  # longer than a shut gate lets it become
PROMPTS = ["a b c d", "the cat sat", "one two three", "x y z x y z x y"]
CHAT = [{"role": "user", "content": "Where?"}]


class Gate:
    """A sink that stops the engine after some rounds, until it is opened."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._open.set()
        self._left = 0
        self.reached = threading.Event()  # the engine waits
        self.ended: list[str] = []  # why requests ended, since it was shut

    def shut_after(self, rounds: int) -> None:
        self.ended.clear()
        self.reached.clear()
        self._left = rounds
        self._open.clear()

    def open(self) -> None:
        self._open.set()

    def round(self, r: Round) -> None:
        if self._left:
            self._left -= 1
        elif not self._open.is_set():
            self.reached.set()
            self._open.wait(LIMIT_S)

    def finish(self, seq: Seq, reason: str) -> None:
        self.ended.append(reason)


@pytest.fixture(scope="module")
def gate() -> Gate:
    return Gate()


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory, gate: Gate) -> LLM:
    path: Path = toy_chat_model(tmp_path_factory.mktemp("toy"))
    return LLM(str(path), config=EngineConfig("cpu", cache_mb=64, max_batch=4), sinks=[gate])


def during(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(work, LIMIT_S))


async def until(holds: Any) -> None:
    """Bounded by `during`."""
    while not holds():
        await asyncio.sleep(0.001)


async def submitted_together(llm: AsyncLLM, *work: Coroutine[Any, Any, T]) -> list[asyncio.Task[T]]:
    """Tasks whose requests all come before the next pass."""
    held, go = threading.Event(), threading.Event()

    def hold() -> None:
        held.set()
        go.wait(LIMIT_S)

    llm._thread.between_passes(hold)
    await until(held.is_set)
    tasks = [asyncio.create_task(one) for one in work]
    await until(lambda: llm._thread.waiting >= len(tasks))
    go.set()
    return tasks


def test_answers_are_those_of_the_llm(toy: LLM) -> None:
    settings: dict[str, Any] = {"max_tokens": 24, "temperature": 1.0, "seed": 3}
    expected = [toy.generate(prompt, **settings) for prompt in PROMPTS]

    async def ask() -> list[Result]:
        async with AsyncLLM(toy) as llm:
            together = await asyncio.gather(*(llm.generate(prompt, **settings) for prompt in PROMPTS))
            stream = llm.stream(PROMPTS[0], **settings)
            pieces = [piece async for piece in stream]
            assert [piece.token_id for piece in pieces] == list(expected[0].token_ids)
            assert "".join(piece.text for piece in pieces) == stream.result.text == expected[0].text
            assert sum(len(r.tokens) for r in stream.rounds) == 24
            return together

    assert [r.token_ids for r in during(ask())] == [r.token_ids for r in expected]
    assert toy.generate(PROMPTS[1], **settings).token_ids == expected[1].token_ids  # it is ours again


def test_tasks_share_passes(toy: LLM) -> None:
    async def ask() -> int:
        async with AsyncLLM(toy) as llm:
            streams = [llm.stream(prompt, max_tokens=8, ignore_eos=True) for prompt in PROMPTS]
            await asyncio.gather(*await submitted_together(llm, *(stream.read() for stream in streams)))
            return max(r.batch for stream in streams for r in stream.rounds)

    assert during(ask()) == len(PROMPTS)


def test_a_cancelled_task_cancels_its_request_and_no_other(toy: LLM, gate: Gate) -> None:
    async def ask() -> None:
        async with AsyncLLM(toy) as llm:
            stream, other = llm.stream("a b c", **LONG), llm.stream("x y z", **LONG)
            gate.shut_after(6)
            await asyncio.gather(*await submitted_together(llm, stream.__anext__(), other.__anext__()))
            task = asyncio.create_task(stream.read())
            await asyncio.sleep(0)  # it waits for a piece
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert (stream.result.finish, other.result.finish) == ("cancelled", None)
            gate.open()
            await until(lambda: gate.ended)
            assert [piece async for piece in stream] == []
            assert (await other.read()).output_tokens == LONG["max_tokens"]
            assert gate.ended == ["cancelled", "length"]

    during(ask())


def test_a_task_that_is_cancelled_before_its_admission_leaves_nothing_behind(toy: LLM, gate: Gate) -> None:
    async def ask() -> None:
        async with AsyncLLM(toy) as llm:
            gate.shut_after(0)
            first = llm.stream("a b c", **LONG)
            task = asyncio.create_task(first.read())
            await until(gate.reached.is_set)
            late = asyncio.create_task(llm.generate("a b c", **LONG))
            await until(lambda: llm._thread.waiting)
            for one in (late, task):
                one.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await one
            gate.open()
            await until(lambda: len(gate.ended) == 2)
            assert gate.ended == ["cancelled"] * 2

    during(ask())


@pytest.mark.parametrize("leave", ["break", "async with", "forget"])
def test_a_stream_that_is_left_cancels_its_request(toy: LLM, gate: Gate, leave: str) -> None:
    async def ask() -> None:
        async with AsyncLLM(toy) as llm:
            gate.shut_after(3)
            if leave == "async with":
                async with llm.stream("a b c", **LONG) as stream:
                    await anext(stream)
                assert stream.result.finish == "cancelled"
            elif leave == "break":
                async for _ in llm.stream("a b c", **LONG):
                    break
            else:
                await anext(llm.stream("a b c", **LONG))
            gc.collect()
            gate.open()
            await until(lambda: gate.ended)
            assert gate.ended == ["cancelled"]

    during(ask())


def test_closing_ends_what_runs_and_refuses_what_comes(toy: LLM, gate: Gate) -> None:
    async def ask() -> None:
        llm = AsyncLLM(toy)
        gate.shut_after(3)
        stream = llm.stream("a b c", **LONG)
        await anext(stream)
        await until(gate.reached.is_set)
        reading, closing = asyncio.create_task(stream.read()), asyncio.create_task(llm.close())
        await until(lambda: llm._thread.waiting)  # the thread has been told
        gate.open()
        await closing
        for late in (reading, llm.generate("x")):
            with pytest.raises(ShuttingDown, match="the AsyncLLM was closed"):
                await late
        assert stream.result.finish == "error"
        await llm.close()

    during(ask())
    assert toy.generate("a b c", max_tokens=2).output_tokens == 2


def test_a_model_that_nobody_refers_to_ends_its_thread(toy: LLM) -> None:
    llm = AsyncLLM(toy)
    thread = llm._thread
    assert thread.alive
    del llm
    gc.collect()
    thread._thread.join(LIMIT_S)
    assert not thread.alive


def test_a_stream_keeps_its_model(toy: LLM) -> None:
    async def ask() -> Result:
        stream = AsyncLLM(toy).stream(PROMPTS[0], max_tokens=4, ignore_eos=True)
        gc.collect()
        return await stream.read()

    assert during(ask()).output_tokens == 4
    gc.collect()
    if (thread := toy.thread) is not None:  # it ends by itself, and other tests use the model
        thread._thread.join(LIMIT_S)


def test_errors_come_to_whoever_asked(toy: LLM) -> None:
    async def ask() -> None:
        async with AsyncLLM(toy) as llm:
            with pytest.raises(SettingError, match="expected a text"):
                await llm.generate("")
            with pytest.raises(PromptTooLong):
                await llm.generate([5] * 9000)
            with pytest.raises(UsageError, match="the stream has not begun"):
                llm.stream("a").result  # noqa: B018
            assert (await llm.generate("a b c", max_tokens=2)).output_tokens == 2

    during(ask())
    with pytest.raises(UsageError, match="settings belong to the LLM"):
        AsyncLLM(toy, tool_format="hermes")


def test_a_batch_keeps_the_order_and_loses_nothing(toy: LLM) -> None:
    settings: dict[str, Any] = {"max_tokens": 6, "seed": 1}
    expected = [toy.generate(prompt, **settings).token_ids for prompt in PROMPTS]
    given = [*PROMPTS, ""] * 4
    taken = 0

    def prompts() -> Iterator[str]:
        nonlocal taken
        for prompt in given:
            taken += 1
            yield prompt

    async def ask() -> None:
        async with AsyncLLM(toy) as llm:
            outcomes = await llm.batch(prompts(), return_exceptions=True, **settings)
            assert [r.token_ids if isinstance(r, Result) else () for r in outcomes] == [*expected, ()] * 4
            with pytest.raises(BatchError, match="1 of 2 prompts failed") as caught:
                await llm.batch(["", "a"], **settings)
            assert isinstance(caught.value.results[0], SettingError)
            assert isinstance(caught.value.results[1], Result)
            assert await llm.batch([], **settings) == []

    during(ask())
    assert taken == len(given)


def test_an_iterable_that_fails_ends_its_batch(toy: LLM, gate: Gate) -> None:
    def prompts() -> Iterator[str]:
        yield "a b c"
        raise ValueError("the file ends here")

    async def ask() -> None:
        async with AsyncLLM(toy) as llm:
            gate.shut_after(0)
            with pytest.raises(ValueError, match="the file ends here"):
                await llm.batch(prompts(), **LONG)
            gate.open()
            await until(lambda: not toy.engine.busy)
            assert gate.ended in ([], ["cancelled"])  # its only request may not have come that far

    during(ask())


def test_tools_run_beside_the_loop(toy: LLM) -> None:
    async def look(floor: int = 1) -> str:
        await asyncio.sleep(0)
        return "nothing"

    async def ask() -> None:
        async with AsyncLLM(toy) as llm:
            settings: dict[str, Any] = {"max_tokens": 96, "seed": 5, "parallel_tool_calls": False}
            turns = [turn async for turn in llm.turns(CHAT, tools=[look], tool_choice="required", **settings)]
            done = await llm.run(CHAT, tools=[look], tool_choice="required", **settings)
            assert [turn.result.token_ids for turn in turns] == [t.result.token_ids for t in done.turns]
            assert done.calls[0].content == "nothing"

    during(ask())


def test_run_and_batch_are_coroutine_functions_whose_errors_come_when_they_are_awaited(toy: LLM) -> None:
    assert inspect.iscoroutinefunction(AsyncLLM.run)
    assert inspect.iscoroutinefunction(AsyncLLM.batch)
    assert inspect.signature(AsyncLLM.run) == inspect.signature(LLM.run)
    assert AsyncLLM.batch.__doc__ == LLM.batch.__doc__

    async def story() -> None:
        async with AsyncLLM(toy) as llm:
            run, batch = llm.run([], tools=[]), llm.batch("one prompt")
            with pytest.raises(UsageError, match="tools need a chat"):
                await run
            with pytest.raises(SettingError, match="prompts"):
                await batch

    during(story())


def test_a_prefill_is_found_by_the_next_turn(toy: LLM) -> None:
    async def ask() -> None:
        async with AsyncLLM(toy) as llm:
            read = await llm.prefill(CHAT, tenant="prefill")
            assert (read.text, read.finish) == ("", "length")
            answer = await llm.generate(CHAT, tenant="prefill", max_tokens=1)
            assert answer.cached_tokens >= read.prompt_tokens > 0

    during(ask())


def test_embeddings_are_those_of_the_llm(toy: LLM) -> None:
    expected = toy.embed(PROMPTS)

    async def embed() -> None:
        async with AsyncLLM(toy) as llm:
            assert await llm.embed(PROMPTS) == expected
            assert await llm.embed(PROMPTS[0]) == expected[:1]
            with pytest.raises(SettingError, match="texts=5 is not usable: expected a text, or a list of"):
                await llm.embed(5)  # type: ignore[arg-type]

    during(embed())


def test_an_llm_that_an_async_one_uses_is_nobody_elses(toy: LLM) -> None:
    async def use_both() -> None:
        async with AsyncLLM(toy):
            for use in (toy.generate, toy.embed, lambda _: AsyncLLM(toy)):
                with pytest.raises(UsageError, match="in use by an AsyncLLM: use that one, or close it"):
                    use("a b")

    during(use_both())
    assert toy.generate("a b", max_tokens=1).output_tokens == 1
