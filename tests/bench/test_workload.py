"""Prompts are chosen the same way every time, fit the cap, and end where the assistant speaks."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from bench import workload
from bench.workload import Chat, Prompt, alternating, chats, choose, known, shorter


class Words:
    """A tokenizer whose tokens are words."""

    def render(self, messages: Any, tools: Any = None) -> str:
        named = [f"<{tool['function']['name']}>" for tool in tools or ()]
        return " ".join([*named, *(f"{m['role']}: {m['content']}" for m in messages)])

    def encode(self, text: str, special: bool = True, bos: bool | None = None) -> list[int]:
        return [sum(map(ord, word)) for word in text.split()]


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {}}}


def record(name: str, turns: int = 3) -> dict[str, Any]:
    messages: list[dict[str, Any]] = [{"role": "system", "content": "be brief " * 20}]
    for i in range(turns):
        messages.append({"role": "user", "content": f"question {i} of {name}"})
        messages.append({"role": "assistant", "content": f"answer {i}"})
    messages[-1]["tool_calls"] = [{"id": "1", "function": {"name": "find", "arguments": "{}"}}]
    return {"id": name, "messages": messages, "tools": [tool("find"), tool("never_called")]}


def write(path: Path, count: int = 30) -> Path:
    text = "".join(json.dumps(record(f"c{i}")) + "\n" for i in range(count))
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return path


def test_a_prompt_is_everything_before_an_assistants_turn() -> None:
    found = chats(record("x"), 0)
    assert [chat.messages[-1]["role"] for chat in found] == ["user"] * 3
    assert [len(chat.messages) for chat in found] == [2, 4, 6]
    assert found[0].called == {"find"}


def test_spec_bench_questions_and_open_conversations() -> None:
    asked = chats({"question_id": 81, "turns": ["first?", "second?"]}, 0)
    assert [m["content"] for m in asked[0].messages] == ["first?"]
    (still_open,) = chats({"messages": [{"role": "user", "content": "hello"}]}, 7)
    assert still_open.id == "7#1"


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_the_choice_depends_on_nothing_but_the_seed(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name)
    once, again = (choose("a", path, Words(), 5, 100) for _ in "12")
    assert once == again
    assert len({prompt.id.partition("#")[0] for prompt in once}) == 5
    assert once != choose("a", path, Words(), 5, 100, seed=1)


def test_prompts_fit_the_cap_or_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workload, "POLICY", 20)
    path = write(tmp_path / "a.jsonl")
    for cap in (200, 30, 12):
        found = choose("a", path, Words(), 5, cap)
        assert len(found) == 5
        assert all(len(prompt.tokens) <= cap for prompt in found)
        assert all(prompt.shortened for prompt in found) == (cap < 50)
    assert choose("a", path, Words(), 5, 3) == []


def test_shortening_keeps_the_question_and_the_tools_in_use() -> None:
    chat = chats(record("x"), 0)[-1]
    ways = list(shorter(chat))
    assert ways[0] == chat
    assert [t["function"]["name"] for t in ways[1].tools] == ["find"]
    assert all(way.messages[-1] == chat.messages[-1] for way in ways)
    lengths = [len(way.messages) for way in ways[1:]]
    assert lengths == sorted(lengths, reverse=True)


def test_workloads_take_turns() -> None:
    prompts = [Prompt(w, str(i), (i,)) for w in ("x", "y", "z") for i in range(3)]
    order = alternating(prompts, seed=4)
    assert sorted(order, key=str) == sorted(prompts, key=str)
    assert all({p.workload for p in order[i : i + 3]} == {"x", "y", "z"} for i in (0, 3, 6))
    assert order == alternating(prompts, seed=4) != alternating(prompts, seed=5)


def test_a_fresh_clone_has_a_workload_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_DATA", "/nowhere")
    found = known()
    assert set(found) == {"agent", "chat"}
    for path in found.values():
        every = [chat for n, line in enumerate(workload.lines(path)) for chat in chats(line, n)]
        assert every
        assert all(isinstance(chat, Chat) and chat.messages for chat in every)


def test_a_prompt_knows_the_tools_and_whether_the_recorded_turn_calls_them(tmp_path: Path) -> None:
    chosen = choose("x", write(tmp_path / "t.jsonl"), Words(), 30, 4000)
    calling = [prompt for prompt in chosen if prompt.calls]
    assert 0 < len(calling) < len(chosen)
    assert {prompt.id.partition("#")[2] for prompt in calling} == {"6"}
    assert all([t["function"]["name"] for t in p.tools] == ["find", "never_called"] for p in chosen)
