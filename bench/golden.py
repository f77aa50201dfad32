"""python -m bench golden: the token ids of a fixed set of requests, recorded and compared.

A change that must not touch the text runs it before with --write and after without. Requests are plain,
speculative, sampled, constrained and with tools, from Python and over HTTP. It needs only what users import,
so that it runs against any version of the package: PYTHONPATH says which.
"""

import argparse
import http.client
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from paceline import LLM, Regex, SpecConfig

HERE: Final = Path(__file__).parent
MODELS: Final = ("smollm2-135m", "qwen2.5-coder-1.5b")
COUNT: Final = "Count: one, two, three, one, two, three, one,"
PLAIN: Final = SpecConfig(max_draft=0)
CITY: Final = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "people": {"type": "integer"}, "capital": {"type": "boolean"}},
    "required": ["name", "people", "capital"],
    "additionalProperties": False,
}
START_S: Final = 300.0


def conversations() -> list[dict[str, Any]]:
    return [json.loads(line) for line in (HERE / "workloads" / "agent.jsonl").read_text().splitlines()]


def chats() -> list[list[dict[str, Any]]]:
    lines = (HERE / "workloads" / "chat.jsonl").read_text().splitlines()
    return [json.loads(line)["messages"] for line in lines]


def requests() -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Name, prompt and options of each request; every one has a seed."""
    warm = {"temperature": 0.8, "top_p": 0.95, "top_k": 50}
    for name, spec in (("plain", PLAIN), ("default", None), ("tree", SpecConfig(("suffix", "ngram"), 8, 4))):
        yield f"count-{name}", COUNT, {"spec": spec, "max_tokens": 48, "temperature": 0}
        for i, chat in enumerate(chats()):
            yield f"chat-{i}-{name}", chat, {"spec": spec, "max_tokens": 48, "temperature": 0}
            yield f"chat-{i}-{name}-sampled", chat, {"spec": spec, "max_tokens": 48, "seed": 5 + i, **warm}
    for accept in ("residual", "block"):
        spec = SpecConfig(("suffix", "ngram"), 6, accept=accept)
        yield f"count-{accept}", COUNT, {"spec": spec, "max_tokens": 48, "seed": 3, "temperature": 0.7}
    pressed = {"presence_penalty": 0.6, "frequency_penalty": 0.4, "temperature": 0.9, "seed": 8}
    yield "penalties", chats()[0], {"max_tokens": 48, **pressed}
    yield "stops", chats()[3], {"max_tokens": 64, "temperature": 0, "stop": (".", "\n")}
    yield "regex", "In which year? ", {"output": Regex(r"[12]\d{3}"), "temperature": 0.7, "seed": 4}
    schema = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}
    for name, spec in (("plain", PLAIN), ("default", None)):
        told = [{"role": "user", "content": "Lyon has 520,000 people. As JSON."}]
        yield f"schema-{name}", told, {"response_format": schema, "spec": spec, "seed": 2, "max_tokens": 64}
        for one in conversations():
            tools = {"tools": one["tools"], "spec": spec, "max_tokens": 48, "temperature": 0}
            for end in (2, len(one["messages"]) - 1):
                messages = one["messages"][:end]
                yield f"{one['id']}-{end}-{name}", messages, tools
                required = {**tools, "tool_choice": "required", "temperature": 0.7, "seed": end}
                yield f"{one['id']}-{end}-{name}-required", messages, required


def in_process(model: str) -> dict[str, Any]:
    llm = LLM(model)
    found: dict[str, Any] = {}
    for name, prompt, options in requests():
        result = llm.generate(prompt, **{"seed": 0, **options})
        found[name] = [list(result.token_ids), result.text]
    found["batch"] = [
        [list(one.token_ids), one.text] for one in llm.batch(chats(), seed=1, max_tokens=32, temperature=0.5)
    ]
    return found


def over_http(model: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    one = conversations()[0]
    chat = {"messages": one["messages"][:2], "tools": one["tools"], "seed": 3, "max_tokens": 48}
    bodies = {
        "chat": ("/v1/chat/completions", {**chat, "temperature": 0}),
        "required": ("/v1/chat/completions", {**chat, "temperature": 0.7, "tool_choice": "required"}),
        "two": ("/v1/chat/completions", {"messages": chats()[1], "n": 2, "seed": 4, "max_tokens": 32}),
        "completion": ("/v1/completions", {"prompt": COUNT, "max_tokens": 32, "seed": 1, "temperature": 0.6}),
        "responses": ("/v1/responses", {"input": "Name a river.", "max_output_tokens": 24, "seed": 1}),
    }
    with _server(model) as port:
        for name, (path, body) in bodies.items():
            found[f"http-{name}"] = answer(_post(port, path, {"model": model, **body}))
        for name in ("chat", "required", "completion"):
            path, body = bodies[name]
            found[f"http-{name}-stream"] = stream_text(
                _post(port, path, {"model": model, **body, "stream": True})
            )
    return found


def answer(text: str) -> Any:
    """The answer without what differs each time: ids, times and counts of the cache."""
    body = json.loads(text)
    return without_ids(body.get("choices") or body.get("output") or body)


def without_ids(value: Any) -> Any:
    if isinstance(value, list):
        return [without_ids(one) for one in value]
    if isinstance(value, dict):
        return {k: without_ids(v) for k, v in value.items() if k not in ("id", "call_id", "created", "usage")}
    return value


def stream_text(text: str) -> Any:
    """Content and calls of all chunks put together: how the text was cut depends on the drafts."""
    content, finish = "", None
    calls: dict[int, tuple[str, str]] = {}
    for line in text.splitlines():
        if not line.startswith("data: {"):
            continue
        for choice in json.loads(line[6:]).get("choices", ()):
            delta = choice.get("delta", {})
            content += delta.get("content") or choice.get("text") or ""
            for call in delta.get("tool_calls", ()):
                function = call.get("function", {})
                name, arguments = calls.get(call["index"], ("", ""))
                calls[call["index"]] = (
                    name + (function.get("name") or ""),
                    arguments + (function.get("arguments") or ""),
                )
            finish = choice.get("finish_reason") or finish
    return [content, [list(calls[i]) for i in sorted(calls)], finish]


@contextmanager
def _server(model: str) -> Iterator[int]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "paceline", "serve", model, "--served-model-name", model]
    command += ["--port", str(port), "--store", "none", "--no-save-estimates", "--cache-disk-mb", "0"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + START_S
        while True:
            try:
                _ask(port, "GET", "/health")
                break
            except OSError as error:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(f"the server did not start: {error}") from error
                time.sleep(0.2)
        yield port
    finally:
        process.terminate()
        process.wait(30)


def _ask(port: int, method: str, path: str, body: bytes | None = None) -> str:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=START_S)
    try:
        connection.request(method, path, body, {"Content-Type": "application/json"})
        reply = connection.getresponse()
        text = reply.read().decode()
        if reply.status != 200:
            raise SystemExit(f"{path}: {reply.status} {text[:300]}")
        return text
    finally:
        connection.close()


def _post(port: int, path: str, body: dict[str, Any]) -> str:
    return _ask(port, "POST", path, json.dumps(body).encode())


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench golden", description=__doc__)
    parser.add_argument("--model", action="append", help="both by default")
    parser.add_argument("--folder", type=Path, default=Path("golden"), help="where the records are")
    parser.add_argument("--write", action="store_true", help="record instead of comparing")
    options = parser.parse_args(arguments)
    different = 0
    for model in options.model or MODELS:
        file = options.folder / f"{model}.json"
        found = json.loads(json.dumps(in_process(model) | over_http(model)))
        if options.write:
            options.folder.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(found, indent=0, ensure_ascii=False) + "\n")
            print(f"{model}: {len(found)} requests recorded in {file}")
            continue
        recorded = json.loads(file.read_text())
        changed = [name for name in recorded if found.get(name) != recorded[name]]
        different += len(changed)
        print(f"{model}: {len(recorded) - len(changed)} of {len(recorded)} requests as recorded")
        for name in changed:
            print(f"  {name}\n    recorded {recorded[name]}\n    now      {found.get(name)}")
    sys.exit(1 if different else 0)


if __name__ == "__main__":
    main()
