"""python -m bench serve: a running paceline server over HTTP, and llama.cpp's with as many slots.

Many agents at once, the next turn of a long conversation, and what the server costs over the bare engine.
"""

import argparse
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from bench import machine, pages, results_folder
from bench.serve import concurrency, cut_prompts, next_turn, overhead, servers
from bench.serve.http_client import read
from bench.serve.servers import COMPLETIONS, RunningServer, ServerMode
from bench.serve.tables import tables
from paceline import hub, limits
from paceline.text import Tokenizer

MODEL: Final = "smollm2-135m"
LLAMA_MODES: Final = ("plain", "ngram-short", "ngram-cache")
PARTS: Final = ("agents", "turns", "cost")
NO_GUESSES: Final = {"speculative_config": {"disabled": True}}
ROOM: Final = 128  # tokens of a slot beyond the prompt and two answers
LONGER: Final = 256  # how much longer the other conversations are cut


def own_ways(server: RunningServer, model: str) -> list[ServerMode]:
    return [
        ServerMode("paceline", "default", server, {"model": model}),
        ServerMode("paceline", "plain", server, {"model": model, **NO_GUESSES}),
    ]


def peers(
    model: Path, modes: Sequence[str], options: argparse.Namespace, context: int, say: Callable[[str], None]
) -> Iterator[ServerMode]:
    """llama.cpp's server in each mode that starts."""
    for mode in modes:
        try:
            server = servers.llama(model, mode, options.threads, options.agents, context)
        except RuntimeError as problem:
            say(f"left out: llama.cpp {mode}: {problem}")
            continue
        if server is None:
            say("left out: llama.cpp: not installed; run `make bench-peers`")
            return
        say(f"llama.cpp {mode}: {server.version}")
        yield ServerMode("llama.cpp", mode, server, {"model": options.model})


def many_agents(
    ways: Sequence[ServerMode], tokenizer: Tokenizer, options: argparse.Namespace, say: Any
) -> Any:
    prompts = cut_prompts.cut(tokenizer, options.context, options.agents, options.seed)
    rounds = concurrency.Rounds(tokenizer, prompts, options.max_tokens, options.agents, say)
    samples = rounds.run(ways, options.repeats, options.seed)
    own, others = [w for w in ways if w.ours], [w for w in ways if not w.ours]
    return {
        "rows": concurrency.rows(samples, ways, options.agents),
        "scaling": [
            {"way": w.name, "turn": t, **asdict(concurrency.scaling(samples, w, t, options.agents))}
            for t in concurrency.TURNS
            for w in ways
        ],
        "against": [
            {"way": w.name, "turn": t, "agents": n, **found}
            for t in concurrency.TURNS
            for n in (1, options.agents)
            for w in own
            if (found := concurrency.against(samples, w, others, t, n))
        ],
    }


def turns(
    ways: Sequence[ServerMode], tokenizer: Tokenizer, options: argparse.Namespace
) -> list[dict[str, Any]]:
    length, count = options.conversation, options.turn_repeats
    found = cut_prompts.cut(tokenizer, length + LONGER, 2 * count, options.seed)
    prompts = [prompt[-length:] for prompt in found[:count]]
    return [next_turn.measure(way, tokenizer, prompts, found[count:]) for way in ways]


def measure(options: argparse.Namespace, say: Callable[[str], None]) -> dict[str, Any]:
    path, result = hub.resolve(options.model), dict[str, Any]()
    tokenizer = Tokenizer.load(path)
    with ExitStack() as ended:
        server = servers.paceline(options.model, options.threads, options.agents)
        ended.callback(server.close)
        own = own_ways(server, options.model)
        if "cost" in options.parts:
            prompts = cut_prompts.cut(tokenizer, options.context, options.cost_prompts, options.seed)
            result["cost"] = overhead.measure(
                own, tokenizer, path, options.threads, prompts, options.max_tokens
            )
            say("server and bare engine: done")
        modes = options.llama if set(options.parts) & {"agents", "turns"} else []
        room = options.context + 2 * options.max_tokens + ROOM
        with ExitStack() as first:
            others = list(peers(path, modes if "agents" in options.parts else [], options, room, say))
            for way in others:
                first.callback(way.served.close)
            for way in own:  # for warming
                read(server.port, COMPLETIONS, way.body(range(100, 356), 16, "warm", 0, 0))
            if "agents" in options.parts:
                result["agents"] = many_agents([*own, *others], tokenizer, options, say)
        if "turns" in options.parts:
            narrow = argparse.Namespace(**{**vars(options), "agents": 2})
            room = options.conversation + LONGER + ROOM
            peer = list(peers(path, modes[:1], narrow, room, say))
            for way in peer:
                ended.callback(way.served.close)
            result["turns"] = turns([own[0], *peer], tokenizer, options)
    return result


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(prog="python -m bench serve", description=__doc__)
    found.add_argument("--model", default=MODEL)
    found.add_argument("--agents", type=int, default=16, help="at once; as many slots")
    found.add_argument("--context", type=int, default=512, help="tokens of an agent's prompt")
    found.add_argument("--max-tokens", type=int, default=64, help="of every answer, exactly")
    found.add_argument("--repeats", type=int, default=3, help="rounds of all agents")
    found.add_argument("--conversation", type=int, default=2000, help="tokens of the long conversation")
    found.add_argument("--turn-repeats", type=int, default=5)
    found.add_argument("--cost-prompts", type=int, default=16)
    found.add_argument("--llama", type=_names, default=list(LLAMA_MODES), help="modes of llama.cpp's server")
    found.add_argument("--parts", type=_names, default=list(PARTS), help=",".join(PARTS))
    found.add_argument("--threads", type=int, default=limits.cores())
    found.add_argument("--seed", type=int, default=0)
    found.add_argument("--write", action="store_true", help="write bench/results and docs/numbers.md")
    return found


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def main(arguments: Sequence[str] | None = None) -> None:
    given = list(arguments) if arguments is not None else []
    options = parser().parse_args(given)
    if unknown := set(options.parts) - set(PARTS):
        raise SystemExit(f"no part is called {unknown.pop()!r}; there are {', '.join(PARTS)}")
    servers.end_with_this_process()
    console = Console(width=None if Console().is_terminal else 180)
    found = measure(options, lambda text: console.print(text, markup=False, highlight=False))
    result = {
        "machine": {"model": options.model, **machine.facts()},
        "command": shlex.join(["python", "-m", "bench", "serve", *given]),
        "settings": {k: v for k, v in vars(options).items() if k not in ("model", "write")},
        **found,
    }
    for table in tables(result):
        console.print(table.terminal())
    if options.write:
        results_folder.write(result, f"serve-{options.model}")
        pages.write()
