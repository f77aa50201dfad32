"""The tool loop: what is run, what the model is told, when it ends; and that drafts change none of it."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from paceline import LLM, EngineConfig, Result, Run, SpecConfig, Tool, ToolResult
from paceline.errors import ConstraintError, PacelineError, SettingError, UsageError
from paceline.text import ToolCall
from paceline.tool_loop import AsyncTurns, ToolLoop, Turns, tool_loop
from support.servers import toy_chat_model

PLAIN = SpecConfig(("none",), max_draft=0)


def answer(content: str = "", *calls: ToolCall, finish: Any = "stop", passes: int = 2) -> Result:
    return Result(
        text=content,
        token_ids=(1, 2, 3),
        sources=("target",) * 3,
        seed=0,
        content=content,
        tool_calls=calls,
        finish=finish,
        output_tokens=3,
        passes=passes,
    )


class Script:
    """A model that gives these answers and keeps what it was asked."""

    def __init__(self, *answers: Result) -> None:
        self.answers = list(answers)
        self.asked: list[tuple[list[Any], dict[str, Any]]] = []

    def __call__(self, messages: list[Any], **options: Any) -> Result:
        self.asked.append((messages, options))
        return self.answers.pop(0)

    async def awaited(self, messages: list[Any], **options: Any) -> Result:
        return self(messages, **options)


@dataclass
class Stock:
    item: str
    left: int


def stock(item: str, at_least: int = 1) -> Stock:
    """How many are left."""
    if item == "dragon":
        raise KeyError("dragon")
    return Stock(item, 40 * at_least)


async def price(item: str) -> str:
    await asyncio.sleep(0)
    return f"{item}: 32.25"


def nothing() -> None: ...


TOOLS: Sequence[Callable[..., Any]] = (stock, price, nothing)


def run(script: Script, prompt: Any = "How many?", **settings: Any) -> Run:
    loop = tool_loop(
        prompt, settings.get("tools", TOOLS), settings.get("max_turns", 8), settings.get("choice")
    )
    return Turns(loop, script).read()


def test_results_go_back_until_the_model_answers() -> None:
    script = Script(
        answer("Let me see.", ToolCall("stock", {"item": "lantern"}), ToolCall("price", {"item": "lantern"})),
        answer("", ToolCall("nothing", {})),
        answer("There are 40."),
    )
    done = run(script)
    assert (done.text, done.finish, len(done.turns)) == ("There are 40.", "stop", 3)
    assert list(done.messages) == [
        {"role": "user", "content": "How many?"},
        {
            "role": "assistant",
            "content": "Let me see.",
            "tool_calls": [
                {
                    "id": "call00000",
                    "type": "function",
                    "function": {"name": "stock", "arguments": '{"item": "lantern"}'},
                },
                {
                    "id": "call00001",
                    "type": "function",
                    "function": {"name": "price", "arguments": '{"item": "lantern"}'},
                },
            ],
        },
        {
            "role": "tool",
            "tool_call_id": "call00000",
            "name": "stock",
            "content": '{"item": "lantern", "left": 40}',
        },
        {"role": "tool", "tool_call_id": "call00001", "name": "price", "content": "lantern: 32.25"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "call00002", "type": "function", "function": {"name": "nothing", "arguments": "{}"}}
            ],
        },
        {"role": "tool", "tool_call_id": "call00002", "name": "nothing", "content": "null"},
        {"role": "assistant", "content": "There are 40."},
    ]
    assert [messages for messages, _ in script.asked] == [
        list(done.messages[:1]),
        list(done.messages[:4]),
        list(done.messages[:6]),
    ]
    assert done.calls[0].value == Stock("lantern", 40)
    assert (done.output_tokens, done.passes, done.tokens_per_pass) == (9, 6, 1.5)
    assert repr(done).startswith("Run('There are 40.', 3 turns, 3 calls, 9 tokens in 6 passes")


def only(done: Run) -> ToolResult:
    assert len(done.calls) == 1
    return done.calls[0]


@pytest.mark.parametrize(
    ("call", "kind", "told"),
    [
        (ToolCall("stock", {"item": "dragon"}), KeyError, "Error: KeyError: 'dragon'"),
        (
            ToolCall("stock", {"item": 3}),
            ConstraintError,
            "Error: the arguments of stock do not fit: item: Input should be a valid string",
        ),
        (
            ToolCall("stok", {}),
            ConstraintError,
            "Error: unknown tool 'stok'; did you mean 'stock'? Known: stock, price, nothing",
        ),
    ],
)
def test_errors_are_told_to_the_model_and_kept(call: ToolCall, kind: type[Exception], told: str) -> None:
    done = run(Script(answer("", call), answer("Sorry.")))
    failed = only(done)
    assert (done.text, done.finish) == ("Sorry.", "stop")
    assert isinstance(failed.exception, kind)
    assert failed.content == done.messages[2]["content"] == told
    assert "1 call (1 failed)" in done.summary


def test_whoever_interrupts_a_tool_interrupts_the_run() -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    loop = tool_loop("?", [interrupted], 8, None)
    turns = Turns(loop, Script(answer("", ToolCall("interrupted", {}))))
    with pytest.raises(KeyboardInterrupt):
        next(turns)


def test_a_run_ends_after_max_turns_with_its_calls_run() -> None:
    call = ToolCall("stock", {"item": "lantern"})
    script = Script(*[answer("", call)] * 5)
    done = run(script, max_turns=2)
    assert (done.finish, done.text, len(done.turns), len(script.answers)) == ("max_turns", "", 2, 3)
    assert done.messages[-1]["role"] == "tool"
    with pytest.raises(SettingError, match="max_turns=0 is not usable: expected 1 or more"):
        run(script, max_turns=0)


def test_a_run_goes_on_from_its_messages_with_other_ids() -> None:
    call = ToolCall("stock", {"item": "lantern"})
    first = run(Script(answer("", call), answer("40.")))
    question = {"role": "user", "content": "And now?"}
    second = run(Script(answer("", call), answer("40.")), [*first.messages, question])
    assert [done.id for done in (*first.calls, *second.calls)] == ["call00000", "call00001"]


def test_calls_of_an_answer_that_was_cut_off_are_not_run() -> None:
    done = run(Script(answer("", ToolCall("stock", {"item": "lantern"}), finish="length")))
    assert (done.finish, done.calls, len(done.messages)) == ("length", (), 1)


@pytest.mark.parametrize(
    ("choice", "later"),
    [
        (None, None),
        ("required", None),
        ("stock", None),
        ("none", "none"),
        (
            {"type": "allowed_tools", "mode": "required", "tools": ["x"]},
            {"type": "allowed_tools", "mode": "auto", "tools": ["x"]},
        ),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": ["x"]}},
            {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": ["x"]}},
        ),
    ],
)
def test_a_required_call_is_required_once(choice: Any, later: Any) -> None:
    script = Script(answer("", ToolCall("nothing", {})), answer("Done."))
    run(script, choice=choice)
    assert [options["tool_choice"] for _, options in script.asked] == [choice, later]


def test_turns_come_one_by_one_and_survive_an_error() -> None:
    def broken(messages: list[Any], **_: Any) -> Result:
        if len(messages) > 1:
            raise PacelineError("full")
        return answer("", ToolCall("nothing", {}))

    turns = Turns(tool_loop("?", TOOLS, 8, None), broken)
    assert next(turns).calls[0].content == "null"
    with pytest.raises(PacelineError, match="full"):
        next(turns)
    assert (len(turns.run.turns), turns.run.finish) == (1, None)


def test_a_coroutine_is_run_where_a_loop_runs_already() -> None:
    """As in a notebook."""

    async def notebook() -> Run:
        return run(Script(answer("", ToolCall("price", {"item": "cup"})), answer("Yes.")))

    assert only(asyncio.run(notebook())).content == "cup: 32.25"


def test_asynchronous_calls_of_a_turn_run_at_once_and_answer_in_order() -> None:
    both = threading.Barrier(2)
    met = asyncio.Event()

    def first() -> str:
        both.wait(60)
        return "first"

    def second() -> str:
        both.wait(60)
        return "second"

    async def third() -> str:
        await met.wait()
        return "third"

    async def fourth() -> str:
        met.set()
        return "fourth"

    names = ("third", "first", "second", "fourth")
    script = Script(answer("", *(ToolCall(name, {}) for name in names)), answer("Done."))
    loop = tool_loop("?", [first, second, third, fourth], 8, None)
    done = asyncio.run(asyncio.wait_for(AsyncTurns(loop, script.awaited).read(), 60))
    assert [result.content for result in done.calls] == list(names)
    assert done.text == "Done."


def test_asynchronous_runs_tell_errors_too() -> None:
    async def broken(item: str) -> str:
        raise ValueError(f"no {item}")

    def empty() -> str:
        return next(iter(()))

    calls = ToolCall("broken", {"item": "cup"}), ToolCall("stok", {}), ToolCall("empty", {})
    script = Script(answer("", *calls), answer("Sorry."))
    loop = tool_loop("?", [broken, stock, empty], 8, None)
    done = asyncio.run(asyncio.wait_for(AsyncTurns(loop, script.awaited).read(), 120))
    assert [result.content[:24] for result in done.calls] == [
        "Error: ValueError: no cup"[:24],
        "Error: unknown tool 'sto",
        "Error: RuntimeError: the function raised StopIteration"[:24],
    ]


@pytest.mark.parametrize(
    ("prompt", "tools", "error", "reason"),
    [
        ([], [stock], UsageError, "give a text, or a list of messages"),
        ("", [stock], UsageError, "give a text, or a list of messages"),
        ([1, 2], [stock], UsageError, "give a text, or a list of messages"),
        ("?", [Tool(stock).schema], ConstraintError, "has no function that could be run"),
        ("?", [stock, Tool(price, name="stock")], ConstraintError, "two tools are called stock"),
        ("?", stock, ConstraintError, "expected a list of tools"),
    ],
)
def test_what_cannot_be_run_is_refused(prompt: Any, tools: Any, error: type[Exception], reason: str) -> None:
    with pytest.raises(error, match=reason):
        tool_loop(prompt, tools, 8, None)


def test_html_of_a_run_is_escaped() -> None:
    def evil() -> str:
        return "<script>alert(1)</script>"

    done = run(Script(answer("", ToolCall("evil", {})), answer("<img src=x onerror=alert(1)>")), tools=[evil])
    html = done._repr_html_()
    assert "<script" not in html
    assert "<img" not in html
    assert "&lt;script&gt;" in html
    assert "2 turns, 1 call" in html


def look(where: Literal["north", "south", "east"], floor: Literal[1, 2, 3] = 1) -> dict[str, Any]:
    """Looks somewhere.

    Args:
        where: the direction
    """
    return {"seen": [f"{where} {floor}"] * 3}


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    path: Path = toy_chat_model(tmp_path_factory.mktemp("toy"))
    return LLM(str(path), config=EngineConfig("cpu", cache_mb=64))


def whole_run(llm: LLM, spec: SpecConfig, temperature: float) -> list[Run]:
    """Two runs, the second of which goes on from the first."""
    runs: list[Run] = []
    for question in ("What is in the north?", "And in the south?"):
        messages = [*(runs[-1].messages if runs else ()), {"role": "user", "content": question}]
        settings: dict[str, Any] = {"temperature": temperature, "seed": 5, "max_tokens": 80, "spec": spec}
        settings |= {"tenant": f"{spec.drafters}{temperature}", "parallel_tool_calls": False}
        runs.append(llm.run(messages, tools=[look], tool_choice="required", **settings))
    return runs


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_change_nothing_of_a_run(toy: LLM, temperature: float) -> None:
    plain = whole_run(toy, PLAIN, temperature)
    drafted = whole_run(toy, SpecConfig(("grammar", "suffix", "ngram"), adaptive=False), temperature)
    assert plain[-1].messages == drafted[-1].messages
    for one, other in zip(plain, drafted, strict=True):
        assert [t.result.token_ids for t in one.turns] == [t.result.token_ids for t in other.turns]
        assert one.calls
        assert all(done.value["seen"] for done in one.calls)
    assert sum(r.passes for r in drafted) < sum(r.passes for r in plain)
    assert sum(t.result.accepted_tokens for r in drafted for t in r.turns) > 0


def test_the_loop_gives_the_answer_a_type(toy: LLM) -> None:
    done = toy.run("Where?", tools=[look], tool_choice="none", output=Literal["here", "there"], seed=1)
    assert done.value in ("here", "there")
    assert done.text == done.value


def test_a_loop_has_no_model_of_its_own() -> None:
    loop = ToolLoop([{"role": "user", "content": "?"}], {"stock": Tool(stock)})
    assert loop.take(answer("Yes."), ()).result.content == "Yes."
    assert loop.run.finish == "stop"
