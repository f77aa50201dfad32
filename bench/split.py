"""python -m bench split: a split deployment against plain streaming, as the round trip grows.

A server of `paceline serve --split` runs in a process of its own; a proxy delays every byte by half the round
trip each way. For each prompt and round trip all ways are measured in turn, in one run: plain streaming over
HTTP, streaming where the server drafts for itself, and the split modes with drafts of this side only (suffix
and n-gram, which remember the answers before). One-shot gets the answer itself with every tenth token
replaced, as for an edit. All connections are warm, HTTP's and WebSockets': a round trip that is not counted
goes before each answer. All texts must be equal. Times are ratios to plain streaming of the same prompts;
bytes are those of messages after the opening, for each token.
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Final

import aiohttp
from rich.console import Console

from bench import machine, results_folder, workload
from bench.network import Network, network
from bench.serve.http_client import get
from bench.table import Column, Table, number
from paceline import hub
from paceline.drafters.ngram import Ngram
from paceline.drafters.suffix import Suffix
from paceline.split.edge import Edge, EdgeResult, EdgeSettings
from paceline.split.wire import Mode
from paceline.text import Tokenizer

RESULT: Final = "split"
ROUND_TRIPS_MS: Final = (0, 20, 80, 200)
WRONG: Final = 10  # one-shot: every so many tokens of the prediction one is wrong
PLAIN: Final = {"speculative_config": {"disabled": True}}
PLAIN_WAY, SERVER_WAY = "plain streaming", "the server drafts"
WAYS: Final = {
    "one-shot": (Mode.ONE_SHOT, {"speculative_config": {"drafters": ["prediction"]}}),
    "opportunistic": (Mode.OPPORTUNISTIC, {"speculative_config": {"drafters": ["mailbox"]}}),
    "patient": (Mode.PATIENT, {"speculative_config": {"drafters": ["mailbox"]}}),
}


@dataclass(frozen=True)
class Sample:
    """One answer. tokens and bytes are 0 where they are not counted."""

    way: str
    text: str
    seconds: float
    first_s: float
    passes: int
    tokens: int
    token_ids: tuple[int, ...] = ()
    up: int = 0  # bytes after the opening
    down: int = 0


async def streamed(session: aiohttp.ClientSession, url: str, way: str, body: dict[str, Any]) -> Sample:
    """An answer over HTTP, as any client reads it."""
    async with session.get(f"{url}/health") as warmed:
        await warmed.read()
    started, first, parts, passes, tokens = time.perf_counter(), 0.0, list[str](), 0, 0
    request = {**body, "stream": True, "stream_options": {"include_usage": True}, "metrics": "summary"}
    async with session.post(f"{url}/v1/completions", json=request) as got:
        got.raise_for_status()
        async for line in got.content:
            if not line.startswith(b"data: {"):
                continue
            chunk = json.loads(line[6:])
            for choice in chunk["choices"]:
                first = first or (time.perf_counter() - started if choice["text"] else 0.0)
                parts.append(choice["text"])
            if chunk.get("usage"):
                tokens, passes = chunk["usage"]["completion_tokens"], chunk["metrics"]["passes"]
    return Sample(way, "".join(parts), time.perf_counter() - started, first, passes, tokens)


async def split(edge: Edge, way: str, body: dict[str, Any], prediction: Sequence[int] = ()) -> Sample:
    await edge.round_trips_s(1)
    result: EdgeResult = await edge.generate(body, prediction=prediction)
    return Sample(
        way,
        result.text,
        result.seconds,
        result.first_token_s,
        result.passes,
        len(result.token_ids),
        result.token_ids,
        result.bytes_up - result.opening_bytes_up,
        result.bytes_down - result.opening_bytes_down,
    )


async def measure(
    port: int, prompts: Sequence[Sequence[int]], max_tokens: int, temperature: float, rtt_ms: int
) -> list[list[Sample]]:
    """By prompt: the samples of all ways. Drafters keep what they learned, as on a device."""
    async with network(Network(port, rtt_ms / 2000)) as between, AsyncExitStack() as stack:
        session = await stack.enter_async_context(aiohttp.ClientSession())
        edges = dict[str, Edge]()
        for way, (mode, _) in WAYS.items():
            edge = Edge(between.url, [Suffix(), Ngram()], EdgeSettings(mode))
            edges[way] = await stack.enter_async_context(edge)
        measured = list[list[Sample]]()
        for seed, prompt in enumerate(prompts):
            body = {
                "prompt": list(prompt),
                "max_tokens": max_tokens,
                "temperature": temperature,
                "seed": seed,
                "remember": False,  # the same prompts come again
            }
            samples = [
                await streamed(session, between.url, PLAIN_WAY, body | PLAIN),
                await streamed(session, between.url, SERVER_WAY, body),
            ]
            for way in ("opportunistic", "patient", "one-shot"):
                known = _edited(samples[-1].token_ids) if way == "one-shot" else ()
                samples.append(await split(edges[way], way, body | WAYS[way][1], known))
            measured.append(samples)
    return measured


def _edited(tokens: Sequence[int]) -> tuple[int, ...]:
    return tuple(token ^ 1 if i % WRONG == WRONG - 1 else token for i, token in enumerate(tokens))


def rows(measured: Sequence[Sequence[Sample]], rtt_ms: int) -> Iterator[dict[str, Any]]:
    for way in (PLAIN_WAY, SERVER_WAY, *WAYS):
        own = [next(s for s in samples if s.way == way) for samples in measured]
        plain = [next(s for s in samples if s.way == PLAIN_WAY) for samples in measured]
        tokens, passes = sum(s.tokens for s in own), sum(s.passes for s in own)
        yield {
            "rtt_ms": rtt_ms,
            "way": way,
            "equal": all(a.text == b.text for a, b in zip(own, plain, strict=True)),
            "answers": len(own),
            "tokens": tokens,
            "passes": passes,
            "passes_saved": sum(s.passes for s in plain) / passes,
            "time": statistics.median(a.seconds / b.seconds for a, b in zip(own, plain, strict=True)),
            "total_time": sum(s.seconds for s in own) / sum(s.seconds for s in plain),
            "ms_per_token": 1000 * sum(s.seconds for s in own) / max(1, tokens),
            "first_ms": 1000 * statistics.median(s.first_s for s in own),
            "bytes_up": sum(s.up for s in own) / max(1, tokens),
            "bytes_down": sum(s.down for s in own) / max(1, tokens),
        }


COLUMNS: Final = (
    Column("round trip", lambda row: f"{row['rtt_ms']} ms"),
    Column("", "way"),
    Column("text equal", lambda row: "yes" if row["equal"] else "NO"),
    Column("passes saved", lambda row: f"{number(row['passes_saved'])} x"),
    Column("time, of plain", lambda row: number(row["total_time"])),
    Column("median", lambda row: number(row["time"])),
    Column("ms per token", lambda row: number(row["ms_per_token"])),
    Column("first token", lambda row: f"{number(row['first_ms'], 0)} ms"),
    Column("bytes up", lambda row: number(row["bytes_up"] or None, 1)),
    Column("bytes down", lambda row: number(row["bytes_down"] or None, 1)),
)


@contextmanager
def server(model: str, port: int, threads: int, *more: str) -> Iterator[int]:
    options = ["--split", "--port", str(port), "--store", "none", "--no-save-estimates", *more]
    options += ["--log-level", "warning", "--single-user"]
    options += ["--threads", str(threads)] if threads else []
    command = [sys.executable, "-m", "paceline", "serve", model, *options]
    running = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 300
        while True:
            try:
                get(port, "/ready")
                break
            except OSError:
                if running.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit("the server did not start") from None
                time.sleep(0.2)
        yield port
    finally:
        running.terminate()
        running.wait(30)


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench split", description=__doc__)
    parser.add_argument("--model", default=hub.DEFAULT_MODEL)
    parser.add_argument("--workload", default="agent", help="a name of bench.workload, or a file")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--max-prompt", type=int, default=1024)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--rtt", type=int, nargs="+", default=list(ROUND_TRIPS_MS), help="milliseconds")
    parser.add_argument("--port", type=int, default=8123)
    parser.add_argument("--threads", type=int, default=0, help="of the server; 0: its default")
    parser.add_argument("--write", action="store_true", help="write bench/results and its page")
    given = parser.parse_args(arguments)
    path = workload.known().get(given.workload) or workload.BUILT_IN / f"{given.workload}.jsonl"
    tokenizer = Tokenizer.load(hub.resolve(given.model))
    chosen = workload.choose(given.workload, path, tokenizer, given.prompts, given.max_prompt)
    prompts = [prompt.tokens for prompt in chosen]
    found: list[dict[str, Any]] = []
    with server(given.model, given.port, given.threads) as port:
        run = (port, prompts, given.max_tokens, given.temperature)
        asyncio.run(measure(port, prompts, 8, 0.0, 0))  # for warming
        for rtt_ms in given.rtt:
            found += rows(asyncio.run(measure(*run, rtt_ms)), rtt_ms)
    Console().print(Table.of(COLUMNS, found).terminal(sections=1))
    if given.write:
        from bench import pages

        facts = {"model": given.model, **machine.facts()}
        command = machine.command("split", arguments)
        result = {"machine": facts, "command": command, "settings": vars(given), "rows": found}
        results_folder.write(result, f"{RESULT}-{given.model}")
        pages.write()
    if not all(row["equal"] for row in found):
        raise SystemExit("a text differs from plain streaming")
