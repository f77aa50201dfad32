"""python -m bench soak: a running server under a random mix of good, bad and broken requests.

Every answer that is completed must be the plain one, which is written beforehand without a server and without
drafts. Other clients send pairs, with drafts and without, of all drafters and endpoints (pairs.py), and the
server's wall clock jumps.
Exit code 1 for a wrong text, a stuck request, an answer of 500 or more, or memory that grows.
--hostile: attacks beside ordinary clients, as hostile_soak.py describes.
"""

import argparse
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from rich.console import Console

from bench import machine, pages, results_folder
from bench.serve import hostile_soak, pair_drafters, servers
from bench.serve.hostile import ATTACKS, Target
from bench.serve.http_client import get
from bench.serve.pairs import PairClients, PairRecords
from bench.serve.servers import RunningServer
from bench.serve.soak_load import Load, Tally
from bench.serve.soak_requests import Expected, expectations
from bench.serve.tables import tables
from paceline import hub, limits
from paceline.errors import unknown_name

MODEL: Final = "smollm2-135m"
EARLY: Final = 0.1  # of the time: from here on memory must be flat
MAX_GROWTH: Final = 0.05
DRAIN_S: Final = 60.0
GAUGES: Final = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")


def gauges(port: int) -> dict[str, float]:
    found = {}
    for line in get(port, "/metrics")[1].splitlines():
        name = line.partition("{")[0]
        if name in GAUGES:
            found[name] = float(line.rpartition(" ")[2])
    return found


def drained(port: int) -> dict[str, float]:
    """The gauges once nothing runs or waits, or when patience ends."""
    until = time.monotonic() + DRAIN_S
    while True:
        now = gauges(port)
        if now[GAUGES[0]] == now[GAUGES[1]] == 0 or time.monotonic() > until:
            return now
        time.sleep(0.2)


def watch(
    server: RunningServer, load: Load, pairs: PairClients, seconds: float, say: Callable[[str], None]
) -> list[tuple[float, float]]:
    """Lets the load run for so long; seconds and resident MB, once a second or so."""
    started, samples, told = time.monotonic(), list[tuple[float, float]](), 0.0
    with load, pairs:
        pairs.resume()
        while (now := time.monotonic() - started) < seconds and server.process.poll() is None:
            samples.append((round(now, 1), round(server.resident_mb, 1)))
            if now - told > 30:
                told = now
                say(f"{now:.0f} s: {samples[-1][1]:.0f} MB, {load.tally.short()}; {pairs.records.short()}")
            time.sleep(min(1.0, seconds / 100))
    return samples


def figures(
    tally: Tally,
    pairs: PairRecords,
    samples: Sequence[tuple[float, float]],
    last: float,
    left: dict[str, float],
) -> Any:
    total = samples[-1][0]
    early = next(mb for at, mb in samples if at >= EARLY * total)
    stuck = tally.counts["timed out"] + int(left[GAUGES[0]] + left[GAUGES[1]]) + len(pairs.stuck)
    return {
        "minutes": round(total / 60, 2),
        "requests": sum(tally.requests.values()),
        **{f"asked: {name}": n for name, n in sorted(tally.requests.items())},
        **{f"ended: {name}": n for name, n in sorted(tally.counts.items())},
        "completed answers compared": tally.compared,
        "pairs compared": pairs.total,
        "choices compared in pairs": pairs.choices,
        "wrong texts": len(tally.wrong) + len(pairs.wrong),
        "pairs refused": len(pairs.refused),
        "answers of 500 and more": tally.server_errors + sum(status >= 500 for status, _ in pairs.refused),
        "bad bodies answered otherwise than 4xx": len(tally.misjudged),
        "stuck requests": stuck,
        "running, waiting at the end": f"{left[GAUGES[0]]:.0f}, {left[GAUGES[1]]:.0f}",
        "cache use at the end": round(left[GAUGES[2]], 4),
        "resident MB at 10 %": early,
        "resident MB at the end": round(last, 1),
        "growth": round(last / early - 1, 4),
    }


def faults(found: dict[str, Any], alive: bool) -> list[str]:
    """The reasons why the run failed."""
    bad = [f"{found[name]} {name}" for name in ("wrong texts", "stuck requests") if found[name]]
    if found["answers of 500 and more"]:
        bad.append(f"{found['answers of 500 and more']} answers of 500 and more")
    if found["growth"] > MAX_GROWTH:
        bad.append(f"memory grew by {found['growth']:.1%}")
    return bad if alive else [*bad, "the server ended"]


def measure(options: argparse.Namespace, say: Callable[[str], None]) -> dict[str, Any]:
    expected: list[Expected] = expectations(options.model, options.threads, options.prompts, options.seed)
    say(f"{len(expected)} requests with their plain answers")
    server, lists = pair_drafters.start_server(options, say)
    pairs = PairClients(server.port, options.model, lists, options.pair_clients, options.seed)
    try:
        if options.fill:
            target = Target(server.port, options.model)
            filled = hostile_soak.fill_caches(target, server.process.pid, lists)
            say(f"{filled} prompts have filled the KV caches")
        load = Load(server.port, options.model, expected, options.clients, options.seed)
        samples = watch(server, load, pairs, 60 * options.minutes, say)
        alive = server.process.poll() is None
        left = drained(server.port) if alive else dict.fromkeys(GAUGES, 0.0)
        last = server.resident_mb if alive else 0.0
        drafted = pair_drafters.accepted(server.port) if alive else {}
        log = [line for line in server.log.splitlines() if line.strip()][-20:]
    finally:
        server.close()
    tally, both = load.tally, pairs.records
    found = figures(tally, both, samples, last, left)
    bad = [*faults(found, alive), *both.faults(lists, drafted)]
    details = (tally.wrong, both.wrong, tally.misjudged, tally.errors, [text for _, text in both.refused])
    return {
        "figures": found,
        "pairs": both.rows(lists, drafted),
        "problems": [*bad, *(text for texts in details for text in texts[:10])],
        "failed": bool(bad),
        "resident_mb": samples[:: max(1, len(samples) // 60)],
        "log": log,
    }


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(prog="python -m bench soak", description=__doc__)
    found.add_argument("--model", default=MODEL)
    found.add_argument("--minutes", type=float, default=5.0)
    found.add_argument("--clients", type=int, help="at the same time (2 with --hostile)")
    found.add_argument("--prompts", type=int, default=24, help="different prompts, of all kinds together")
    found.add_argument("--slots", type=int, default=8, help="requests in one pass; more must wait")
    found.add_argument("--cache-mb", type=int, default=256, help="small, so that it is soon full")
    found.add_argument("--threads", type=int, default=limits.cores())
    found.add_argument("--seed", type=int, default=0)
    found.add_argument("--hostile", action="store_true", help="attacks beside ordinary streams")
    found.add_argument("--attacks", type=_names, default=[], help="names, with commas; all if none is given")
    found.add_argument("--warm-up", type=float, default=hostile_soak.WARM_UP_S, help="seconds before attacks")
    found.add_argument("--calm", type=float, default=hostile_soak.CALM_S, help="seconds between attacks")
    found.add_argument("--settle", type=float, default=hostile_soak.SETTLE_S, help="seconds after attacks")
    found.add_argument(
        "--fill", action=argparse.BooleanOptionalAction, default=True, help="fill all caches first"
    )
    pair_drafters.add_options(found)
    found.add_argument("--write", action="store_true", help="write bench/results and docs/numbers.md")
    return found


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if unknown := set(names) - set(ATTACKS):
        raise argparse.ArgumentTypeError(unknown_name("attack", min(unknown), sorted(ATTACKS)))
    return names


def main(arguments: Sequence[str] | None = None) -> None:
    given = list(arguments) if arguments is not None else []
    options = parser().parse_args(given)
    if options.clients is None:
        options.clients = 2 if options.hostile else 12
    hub.resolve(options.model)
    servers.end_with_this_process()
    console = Console(width=None if Console().is_terminal else 140)
    run = hostile_soak.measure if options.hostile else measure
    found = run(options, lambda text: console.print(text, markup=False, highlight=False))
    result = {
        "machine": {"model": options.model, **machine.facts()},
        "command": shlex.join(["python", "-m", "bench", "soak", *given]),
        "settings": {k: v for k, v in vars(options).items() if k not in ("model", "write")},
        **found,
    }
    for table in tables(result):
        console.print(table.terminal())
    for problem in result["problems"]:
        console.print(f"- {problem}", markup=False, highlight=False)
    if options.write:
        results_folder.write(result, f"{'hostile' if options.hostile else 'soak'}-{options.model}")
        pages.write()
    sys.exit(1 if result["failed"] else 0)
