"""A model that writes channels (gpt-oss), whole: its template, its marks, grammars, endpoints.

The weights are random. Grammars and biases decide what it writes, so that every channel is seen.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from paceline import LLM, EngineConfig
from paceline.text import Tokenizer
from support.native_targets import tiny_model
from support.servers import Running, running
from support.tiny_gguf import Sizes
from support.tokenizers import byte_level_facts

SPECIAL = (
    *("<|startoftext|>", "<|endoftext|>", "<|channel|>", "<|start|>", "<|end|>", "<|message|>"),
    *("<|constrain|>", "<|call|>", "<|return|>"),
)
# As that of gpt-oss writes messages; its developer message and the tools are left out.
TEMPLATE = """{%- for message in messages -%}
{%- if message.role == 'assistant' -%}
{%- if message.thinking -%}
<|start|>assistant<|channel|>analysis<|message|>{{ message.thinking }}<|end|>
{%- endif -%}
{%- if message.tool_calls -%}
<|start|>assistant to=functions.{{ message.tool_calls[0].function.name }}<|channel|>commentary json<|message|>
{{- message.tool_calls[0].function.arguments|tojson }}<|call|>
{%- else -%}<|start|>assistant<|channel|>final<|message|>{{ message.content }}<|end|>{%- endif -%}
{%- else -%}<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>{%- endif -%}
{%- endfor -%}
{%- if tools %}{{ tools|tojson }}{% endif -%}
{%- if add_generation_prompt %}<|start|>assistant{% endif -%}"""
ENGINE = EngineConfig("cpu", cache_mb=32, threads=1)
CHAT = [{"role": "user", "content": "What is 2 + 2?"}]
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"n": {"enum": [1, 22]}}, "required": ["n"]},
    },
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    facts = byte_level_facts("gpt-4o", SPECIAL)
    facts["eot_token_id"] = facts["tokens"].index("<|end|>")  # as converters have it
    sizes = Sizes(2, 256, 4, 2, 64, 256, len(facts["tokens"]), 2048)
    path = tmp_path_factory.mktemp("harmony") / "toy.gguf"
    return tiny_model(path, kind="Q8_0", sizes=sizes, tied=False, tokenizer=facts, template=TEMPLATE)


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Running]:
    with running(str(model), ENGINE) as found:
        yield found


@pytest.fixture(scope="module")
def no_reasoning(model: Path) -> dict[str, int]:
    """A bias against the tokens with which the channel `analysis` begins."""
    tokenizer = Tokenizer.load(model)
    pieces = {token: tokenizer.piece(token) for token in range(tokenizer.vocab_size)}
    return {str(token): -100 for token, piece in pieces.items() if piece[:1] == b"a"}


@pytest.fixture(scope="module")
def only_reasoning(model: Path) -> dict[str, int]:
    """A bias against the tokens with which the channel `commentary` begins: with it, no call can be."""
    tokenizer = Tokenizer.load(model)
    pieces = {token: tokenizer.piece(token) for token in range(tokenizer.vocab_size)}
    return {str(token): -100 for token, piece in pieces.items() if piece[:1] == b"c"}


def ask(server: Running, path: str = "/v1/chat/completions", **body: Any) -> dict[str, Any]:
    given = {"messages": CHAT, "temperature": 0, "max_tokens": 60, **body}
    given = {name: value for name, value in given.items() if value is not None}
    answer = httpx.post(f"{server.url}{path}", json=given, trust_env=False, timeout=60)
    assert answer.status_code == 200, answer.text
    told: dict[str, Any] = answer.json()
    return told


def streamed(server: Running, **body: Any) -> dict[str, Any]:
    """The message that the deltas of a stream add up to, as `_choice` has it."""
    given = {"messages": CHAT, "temperature": 0, "max_tokens": 60, "stream": True, **body}
    message: dict[str, Any] = {}
    url = f"{server.url}/v1/chat/completions"
    with httpx.stream("POST", url, json=given, trust_env=False, timeout=60) as answer:
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            for choice in json.loads(line[6:])["choices"]:
                for name in ("content", "reasoning_content"):
                    message[name] = message.get(name, "") + (choice["delta"].get(name) or "")
                for call in choice["delta"].get("tool_calls", ()):
                    function = message.setdefault("tool_calls", {"name": "", "arguments": ""})
                    for name, text in call["function"].items():
                        function[name] += text
                message["finish_reason"] = choice["finish_reason"] or message.get("finish_reason")
    return message


def test_the_tokens_that_end_an_answer(model: Path) -> None:
    tokenizer = Tokenizer.load(model)
    assert {tokenizer.piece(token) for token in tokenizer.eos_ids} == {
        b"<|return|>",
        b"<|call|>",
        b"<|endoftext|>",
    }
    assert b"<|end|>" in {tokenizer.piece(token) for token in tokenizer.tool_marks}


@pytest.mark.parametrize("spec", [{"disabled": True}, {"drafters": ["grammar", "ngram"], "adaptive": False}])
def test_a_schema_holds_for_the_final_message(
    server: Running, no_reasoning: dict[str, int], spec: dict[str, Any]
) -> None:
    schema: dict[str, Any] = {"type": "object", "properties": {"sum": {"enum": [4, 44]}}, "required": ["sum"]}
    schema["additionalProperties"] = False
    form = {"type": "json_schema", "json_schema": {"name": "sum", "schema": schema}}
    body: dict[str, Any] = {
        "response_format": form,
        "logit_bias": no_reasoning,
        "speculative_config": spec,
    }
    (choice,) = ask(server, **body)["choices"]
    assert json.loads(choice["message"]["content"])["sum"] in (4, 44)
    assert "reasoning_content" not in choice["message"]
    assert choice["finish_reason"] == "stop"
    assert streamed(server, **body) == {
        "content": choice["message"]["content"],
        "reasoning_content": "",
        "finish_reason": "stop",
    }


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
def test_a_call_is_enforced_after_reasoning(
    server: Running, no_reasoning: dict[str, int], choice: Any
) -> None:
    body: dict[str, Any] = {"tools": [TOOL], "tool_choice": choice, "logit_bias": no_reasoning}
    (answer,) = ask(server, **body)["choices"]
    (call,) = answer["message"]["tool_calls"]
    assert call["function"]["name"] == "add"
    assert json.loads(call["function"]["arguments"])["n"] in (1, 22)
    assert (answer["finish_reason"], answer["message"]["content"]) == ("tool_calls", None)
    assert streamed(server, **body)["tool_calls"] == call["function"]


def test_reasoning_is_free_and_told_apart(server: Running, only_reasoning: dict[str, int]) -> None:
    body: dict[str, Any] = {"tools": [TOOL], "tool_choice": "required", "logit_bias": only_reasoning}
    told = ask(server, logprobs=True, **body)
    (answer,) = told["choices"]
    assert (answer["finish_reason"], answer["message"]["content"]) == ("length", "")
    assert len(answer["message"]["reasoning_content"]) > 20
    assert "<|" not in answer["message"]["reasoning_content"]
    assert streamed(server, **body)["reasoning_content"] == answer["message"]["reasoning_content"]
    tokens = [entry["token"] for entry in answer["logprobs"]["content"]]
    thought = tokens[tokens.index("<|message|>") + 1 :]
    assert told["usage"]["completion_tokens_details"]["reasoning_tokens"] == len(thought) > 20


def test_a_call_that_the_model_begins_is_held_to_its_schema(model: Path) -> None:
    """tool_choice auto: free text up to the header of a call; what follows has one form."""
    llm = LLM(str(model), config=ENGINE)

    def allows(text: str) -> bool:
        cursor = llm.request(CHAT, tools=[TOOL], max_tokens=8).seq.cursor
        assert cursor is not None
        return all(cursor.advance(token) for token in llm.tokenizer.encode(text, bos=False))

    begun = "<|channel|>analysis<|message|>to=functions. <|end|><|start|>assistant"
    begun += "<|channel|>commentary to=functions."
    for head in ("add <|constrain|>json<|message|>", "add<|constrain|>json<|message|>"):
        assert allows(f'{begun}{head}{{"n": 22}}')
        assert not allows(f'{begun}{head}{{"n": 3}}')
    assert not allows(f"{begun}sub")
    assert not allows(f"{begun}add<|message|>")
    assert allows("<|channel|>final<|message|>free")


def test_responses_have_an_item_for_the_reasoning(server: Running, only_reasoning: dict[str, int]) -> None:
    given: dict[str, Any] = {"input": "What is 2 + 2?", "max_output_tokens": 60, "temperature": 0}
    given |= {"tools": [{"type": "function", **TOOL["function"]}], "tool_choice": "required"}
    given["logit_bias"] = only_reasoning
    url = f"{server.url}/v1/responses"
    whole = httpx.post(url, json=given, trust_env=False, timeout=60).json()
    (item,) = whole["output"]
    assert item["type"] == "reasoning"
    assert len(item["content"][0]["text"]) > 20
    assert 20 < whole["usage"]["output_tokens_details"]["reasoning_tokens"] < 60
    with httpx.stream("POST", url, json={**given, "stream": True}, trust_env=False, timeout=60) as answer:
        events = [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: ")]
    deltas = [event["delta"] for event in events if event["type"] == "response.reasoning_text.delta"]
    last = events[-1]["response"]
    assert last["output"][0]["type"] == "reasoning"
    assert "".join(deltas) == last["output"][0]["content"][0]["text"] == item["content"][0]["text"]
    assert last["usage"] == whole["usage"]


def test_reasoning_goes_back_into_the_template(model: Path) -> None:
    tokenizer = Tokenizer.load(model)
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"n": 1}'}}
    said = {"role": "assistant", "content": None, "reasoning_content": "Hm.", "tool_calls": [call]}
    assert tokenizer.render([*CHAT, said]).endswith(
        "<|end|><|start|>assistant<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant to=functions.add"
        '<|channel|>commentary json<|message|>{"n": 1}<|call|><|start|>assistant'
    )
    both = tokenizer.render([*CHAT, {**said, "content": "I add."}])
    assert "<|message|>Hm.\n\nI add.<|end|>" in both


def test_a_plain_prompt_gets_plain_text(server: Running) -> None:
    told = ask(server, "/v1/completions", messages=None, prompt="2 + 2 =", max_tokens=8)
    assert "<|" not in told["choices"][0]["text"]
