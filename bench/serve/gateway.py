"""python -m bench gateway: the latency that the gate adds to a stream, with 1 and with 200 streams at once.

An upstream writes the time of its clock into every event; all processes of a machine share that clock
(CLOCK_MONOTONIC). Rounds go to the upstream directly and through the gate in turn. Added latency is the
difference of the quantiles: of the time from request to first event, and of the age of each event as it
arrives. A second pair of rows mirrors every request to a candidate that never answers: its queue is full, and
users must not notice. `--streams 1 --rounds 2` and `--streams 200` take two minutes each.
"""

import argparse
import asyncio
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from rich.console import Console
from rich.table import Table
from starlette.types import Receive, Scope, Send

from bench import machine, results_folder
from bench.serve.http_client import get
from paceline.web.streaming import DONE

EVENTS: Final = 40
PAUSE_S: Final = 0.05  # between two events of a stream: 20 a second, 4,000 with 200 streams
PROMPT: Final = "word " * 1600  # 8 kB
QUANTILES: Final = (0.5, 0.99)
MIRRORS: Final = ("off", "blocked")  # models of the requests, by which routes tell them apart
_HOST: Final = "127.0.0.1"


async def upstream(scope: Scope, receive: Receive, send: Send) -> None:
    """An ASGI application: events with the time in them."""
    if scope["type"] != "http":
        return
    while (await receive()).get("more_body"):
        pass
    if any(name == b"x-paceline-mirror" for name, _ in scope["headers"]):
        await receive()  # a second answer never comes
        return
    if scope["method"] == "GET":
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})
        return
    headers = [(b"content-type", b"text/event-stream")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    for number in range(EVENTS):
        chunk = {
            "id": "chatcmpl-1",
            "object": "chat.completion.chunk",
            "created": 1,
            "model": "m",
            "choices": [{"index": 0, "delta": {"content": f" word{number}"}, "finish_reason": None}],
            "sent_ns": time.perf_counter_ns(),
        }
        body = b"data: " + json.dumps(chunk).encode() + b"\n\n"
        await send({"type": "http.response.body", "body": body, "more_body": True})
        await asyncio.sleep(PAUSE_S)
    await send({"type": "http.response.body", "body": DONE})


async def stream(port: int, model: str, begin_s: float) -> tuple[float, list[float]]:
    """Milliseconds to the first event, and the age of each event as it arrives."""
    await asyncio.sleep(begin_s)
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": PROMPT}], "stream": True})
    reader, writer = await asyncio.open_connection(_HOST, port)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {_HOST}\r\ncontent-type: application/json\r\n"
    started, first, ages = time.perf_counter(), 0.0, list[float]()
    writer.write(f"{head}content-length: {len(body)}\r\nconnection: close\r\n\r\n{body}".encode())
    seen = b""
    while data := await reader.read(65536):
        now = time.perf_counter_ns()
        first = first or 1000 * (time.perf_counter() - started)
        seen += data
        *whole, seen = seen.split(b"\n\n")
        ages += [(now - int(sent)) / 1e6 for part in whole for sent in re.findall(rb'"sent_ns": (\d+)', part)]
    writer.close()
    assert len(ages) == EVENTS, f"{len(ages)} events of {EVENTS}"
    return first, ages


async def round_of(port: int, model: str, streams: int) -> tuple[list[float], list[float]]:
    """Streams begin evenly over the length of one: the last when the first ends."""
    begin = [EVENTS * PAUSE_S * i / streams for i in range(streams)]
    done = await asyncio.gather(*(stream(port, model, seconds) for seconds in begin))
    return [first for first, _ in done], [age for _, ages in done for age in ages]


def quantile(values: Sequence[float], share: float) -> float:
    return sorted(values)[round(share * (len(values) - 1))]


def measure(direct: int, through: int, mirror: str, streams: int, rounds: int) -> dict[str, Any]:
    firsts: dict[int, list[float]] = {direct: [], through: []}
    ages: dict[int, list[float]] = {direct: [], through: []}
    for number in range(rounds + 1):
        for port in (direct, through):
            first, age = asyncio.run(round_of(port, mirror, streams))
            if number:  # the first is for warming
                firsts[port] += first
                ages[port] += age
    row: dict[str, Any] = {
        "mirror": mirror,
        "streams": streams,
        "rounds": rounds,
        "events": len(ages[through]),
    }
    for name, values in (("first_event", firsts), ("event", ages)):
        for share in QUANTILES:
            here, there = quantile(values[direct], share), quantile(values[through], share)
            percent = f"p{share * 100:g}"
            row |= {f"{name}_{percent}_direct_ms": here, f"{name}_{percent}_gate_ms": there}
            row[f"{name}_{percent}_added_ms"] = there - here
    return row


@contextmanager
def process(port: int, path: str, *command: str) -> Iterator[int]:
    running = subprocess.Popen([sys.executable, *command])
    try:
        for _ in range(600):
            try:
                get(port, path)
                break
            except OSError:
                time.sleep(0.1)
        yield port
    finally:
        running.terminate()
        running.wait(20)


def table(rows: Sequence[dict[str, Any]]) -> Table:
    shown = Table("mirror", "streams", "what", "direct ms", "through the gate ms", "added ms")
    for row in rows:
        for name in ("first_event", "event"):
            for share in QUANTILES:
                key = f"{name}_p{share * 100:g}"
                cells = [f"{row[f'{key}_{end}']:.2f}" for end in ("direct_ms", "gate_ms", "added_ms")]
                shown.add_row(row["mirror"], str(row["streams"]), key.replace("_", " "), *cells)
    return shown


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench gateway", description=__doc__)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 200])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--port", type=int, default=9610, help="and the next one")
    parser.add_argument(
        "--write", action="store_true", help="keep the result in bench/results, beside other --streams"
    )
    options = parser.parse_args(arguments)
    port = options.port
    with TemporaryDirectory() as folder:
        config = Path(folder) / "gate.yaml"
        servers = [{"name": "one", "url": f"http://{_HOST}:{port}"}]
        blocked = {"candidate": "one", "share": 1.0, "order": "concurrent"}
        routes = [
            {"name": "blocked", "match": {"model": "blocked"}, "upstreams": {"one": 1}, "mirror": blocked},
            {"name": "all", "upstreams": {"one": 1}},
        ]
        config.write_text(json.dumps({"upstreams": servers, "routes": routes}))
        uvicorn = ("-m", "uvicorn", "bench.serve.gateway:upstream", "--log-level", "warning")
        gate = ("-m", "paceline", "gate", "serve", "--config", str(config), "--log-level", "warning")
        store = ("--store", str(Path(folder) / "gate.db"))
        with (
            process(port, "/", *uvicorn, "--port", str(port)) as direct,
            process(port + 1, "/ready", *gate, *store, "--port", str(port + 1)) as through,
        ):
            rounds = {streams: options.rounds * (8 if streams == 1 else 1) for streams in options.streams}
            rows = [
                measure(direct, through, mirror, streams, count)
                for mirror in MIRRORS
                for streams, count in rounds.items()
            ]
    Console().print(table(rows))
    if options.write:
        others = [row for row in results_folder.read_one("gateway")["rows"] if row["streams"] not in rounds]
        rows = sorted([*others, *rows], key=lambda row: (MIRRORS.index(row["mirror"]), row["streams"]))
        results_folder.write({"machine": machine.facts(), "rows": rows}, "gateway")
