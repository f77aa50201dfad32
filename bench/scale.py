"""python -m bench scale: what speculation gains as load rises, by a queueing simulation of one engine.

Requests arrive at random times (Poisson) at an engine with continuous batching, as vLLM's: each pass takes a
row for every running sequence, one more for every token drafted, and a chunk of waiting prompts. Its time is
a roofline of the hardware: reading weights and KV cache, or computing rows, whichever is slower, and a fixed
cost. Speculation trades rows for passes, so it gains while passes are bound by memory and loses once they are
bound by arithmetic. Of three arms the last plans the draft length by the sequences in the pass, as vLLM's
num_speculative_tokens_per_batch_size does. Nothing is measured: the same seed gives the same table anywhere.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import ceil, inf
from typing import Any, Final

import numpy as np
from rich.console import Console

from bench import pages, results_folder
from bench.table import Column, Table, number

ARMS: Final = ("plain", "fixed", "by batch")
SHARES: Final = (0.05, 0.25, 0.5, 0.75, 0.9, 1.1)  # of the load that plain decoding can bear
FLEETS: Final = (10, 1_000, 100_000)  # requests per second
TPOT_MS, TTFT_P99_MS = 10.0, 500.0  # what a fleet promises: the median and the 99th percentile
BISECTIONS: Final = 7
RESULT: Final = "scale-h200"
COLUMNS: Final = (
    Column("requests/s per GPU", lambda r: number(r["rate"], 1)),
    Column("of plain's limit", lambda r: f"{100 * r['share']:.0f} %"),
    Column("arm", "arm"),
    Column("sequences in a pass", lambda r: number(r["batch"], 1)),
    Column("drafted", lambda r: number(r["length"], 1)),
    Column("ms per token, p50", lambda r: number(r["tpot_ms"])),
    Column("first token ms, p50 / p99", lambda r: f"{r['ttft_ms']:.0f} / {r['ttft_p99_ms']:.0f}"),
    Column("whole answer s, p50 / p99", lambda r: f"{r['answer_s']:.2f} / {r['answer_p99_s']:.2f}"),
    Column("x plain", lambda r: number(r["gain"])),
)
FLEET_COLUMNS: Final = (
    Column("requests/s", lambda r: f"{r['rate']:,}"),
    Column("arm", "arm"),
    Column("GPUs", lambda r: f"{r['gpus']:,}"),
    Column("requests/s per GPU", lambda r: number(r["per_gpu"], 1)),
    Column("requests in flight", lambda r: f"{r['in_flight']:,}"),
)


@dataclass(frozen=True, slots=True)
class Engine:
    """One replica. Defaults: an 8B model in bfloat16 on one H200, as vLLM runs it."""

    weight_bytes: float = 15.0e9
    kv_bytes_per_token: float = 131_072.0
    bandwidth: float = 4.3e12  # bytes per second
    flops_per_row: float = 16.0e9
    flops: float = 600e12  # per second, as reached
    fixed_s: float = 0.0013  # of a pass: launches, sampling, host
    # The same with a drafter on the host, which switches vLLM's asynchronous scheduling off.
    unhidden_s: float = 0.0030
    draft_s: float = 50e-6  # per sequence, of such a drafter
    max_batch: int = 256
    chunk: int = 2048  # prompt tokens of a pass, at most

    def pass_s(self, work: "Work", length: int | None) -> float:
        """length: of the drafts, which may be 0; None: plain decoding."""
        rows = work.sequences * (1 + (length or 0)) + work.prompt_rows
        memory = (self.weight_bytes + self.kv_bytes_per_token * work.context) / self.bandwidth
        seconds = max(memory, rows * self.flops_per_row / self.flops)
        if length is None:
            return seconds + self.fixed_s
        return seconds + self.unhidden_s + (self.draft_s * work.sequences if length else 0.0)


@dataclass(frozen=True, slots=True)
class Work:
    """Of a pass, without its drafts."""

    sequences: int
    context: int  # tokens in the cache, of all sequences together
    prompt_rows: int = 0


@dataclass(frozen=True, slots=True)
class Traffic:
    """Agents' turns: long prompts, mostly in the prefix cache already, and short answers."""

    prompt: int = 3000  # tokens, of which so many are new:
    new: int = 600
    answer: float = 180.0  # tokens, geometric
    acceptance: float = 0.75  # P(a drafted token is accepted | those before it were)


def expected_tokens(acceptance: float, length: int) -> float:
    """Of a pass (Leviathan et al., arXiv 2211.17192)."""
    return sum(acceptance**i for i in range(length + 1))


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of the requests that arrived after the first tenth of the time."""

    batch: float
    length: float
    tpot_ms: float
    ttft_ms: float
    ttft_p99_ms: float
    answer_s: float
    answer_p99_s: float
    answer_mean_s: float
    served: float  # requests per second
    backlog: int  # requests that had not begun at the end


def simulate(
    engine: Engine, traffic: Traffic, arm: str, rate: float, seconds: float, longest: int, seed: int
) -> Outcome:
    """Every arm sees the same arrivals and answer lengths."""
    rng, luck = np.random.default_rng([seed, int(1000 * rate)]), np.random.default_rng([seed, 7])
    count = max(1, int(rate * seconds))
    arrivals = np.cumsum(rng.exponential(1 / rate, count))
    lengths = rng.geometric(1 / traffic.answer, count)
    left, first, end = lengths.astype(np.int64), np.full(count, inf), np.full(count, inf)
    unread = np.full(count, traffic.new)
    running = np.empty(0, np.int64)  # requests whose prompt is read
    reading: list[int] = []
    now, coming, horizon = 0.0, 0, float(arrivals[-1])
    passes = batches = drafted = 0
    while now < horizon or running.size or reading:
        while coming < count and arrivals[coming] <= now and len(reading) + running.size < engine.max_batch:
            reading.append(coming)
            coming += 1
        if not reading and not running.size:
            if coming == count:
                break
            now = float(arrivals[coming])
            continue
        budget, read = engine.chunk, []
        for request in reading:
            taken = min(budget, int(unread[request]))
            unread[request] -= taken
            budget -= taken
            if not unread[request]:
                read.append(request)
            if not budget:
                break
        sequences = int(running.size)
        context = traffic.prompt * sequences + int((lengths[running] - left[running]).sum())
        work = Work(sequences, context, engine.chunk - budget)
        planned = draft_length(engine, traffic, arm, sequences, longest)
        length = planned or 0
        now += engine.pass_s(work, planned)
        if sequences:
            accepted = np.minimum(luck.geometric(1 - traffic.acceptance, sequences) - 1, length)
            left[running] -= 1 + accepted
            done = running[left[running] <= 0]
            end[done] = now
            running = running[left[running] > 0]
        for request in read:  # the pass that reads the end of a prompt writes the first token
            reading.remove(request)
            first[request] = now
            left[request] -= 1
            if left[request] <= 0:
                end[request] = now
        running = np.concatenate([running, [r for r in read if left[r] > 0]]).astype(np.int64)
        passes, batches, drafted = passes + 1, batches + sequences, drafted + length * sequences
        if now > 3 * horizon:  # overloaded: the queue only grows
            break
    seen = np.flatnonzero((end < inf) & (arrivals > horizon / 10))
    if not seen.size:
        return Outcome(batches / passes, 0.0, inf, inf, inf, inf, inf, inf, 0.0, count)
    ttft, whole = first[seen] - arrivals[seen], end[seen] - arrivals[seen]
    tpot = (end[seen] - first[seen]) / np.maximum(1, lengths[seen] - 1)
    return Outcome(
        batches / passes,
        drafted / max(1, batches),
        1000 * float(np.median(tpot)),
        1000 * float(np.median(ttft)),
        1000 * float(np.quantile(ttft, 0.99)),
        float(np.median(whole)),
        float(np.quantile(whole, 0.99)),
        float(whole.mean()),
        len(np.flatnonzero(end < inf)) / now,
        count - coming,
    )


def request_rate(engine: Engine, traffic: Traffic, sequences: int, length: int | None) -> float:
    """Requests per second with a steady batch: as many prompts are read as answers end."""
    requests = sequences * expected_tokens(traffic.acceptance, length or 0) / traffic.answer  # of a pass
    context = int(sequences * (traffic.prompt + traffic.answer / 2))
    return requests / engine.pass_s(Work(sequences, context, int(requests * traffic.new)), length)


@cache
def draft_length(engine: Engine, traffic: Traffic, arm: str, sequences: int, longest: int) -> int | None:
    """By batch: a table from the number of sequences to the best length, as vLLM takes one."""
    if arm == "by batch":
        return max(range(longest + 1), key=lambda n: request_rate(engine, traffic, max(1, sequences), n))
    return None if arm == "plain" else longest


def limit(engine: Engine, traffic: Traffic, arm: str, longest: int) -> float:
    """The highest rate that an engine bears, over all batch sizes."""
    return max(
        request_rate(engine, traffic, n, draft_length(engine, traffic, arm, n, longest))
        for n in range(1, engine.max_batch + 1)
    )


def bearable(
    engine: Engine, traffic: Traffic, arm: str, seconds: float, longest: int, seed: int
) -> tuple[float, Outcome]:
    """The highest rate, by bisection, at which answers are as quick as TPOT_MS and TTFT_P99_MS demand."""
    low, high = 0.1, limit(engine, traffic, arm, longest)
    kept = simulate(engine, traffic, arm, low, seconds, longest, seed)
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        outcome = simulate(engine, traffic, arm, middle, seconds, longest, seed)
        if outcome.tpot_ms <= TPOT_MS and outcome.ttft_p99_ms <= TTFT_P99_MS:
            low, kept = middle, outcome
        else:
            high = middle
    return low, kept


def rows(engine: Engine, traffic: Traffic, seconds: float, longest: int, seed: int) -> list[dict[str, Any]]:
    plain_limit = limit(engine, traffic, "plain", longest)
    found = []
    for share in SHARES:
        rate, plain = share * plain_limit, inf
        for arm in ARMS:
            outcome = simulate(engine, traffic, arm, rate, seconds, longest, seed)
            plain = outcome.answer_s if arm == "plain" else plain
            figures = {name: getattr(outcome, name) for name in Outcome.__slots__}
            found.append(
                {"rate": rate, "share": share, "arm": arm, **figures, "gain": plain / outcome.answer_s}
            )
    return found


def fleets(engine: Engine, traffic: Traffic, seconds: float, longest: int, seed: int) -> list[dict[str, Any]]:
    """GPUs for a rate, at the same promise to users."""
    found = []
    per_arm = {arm: bearable(engine, traffic, arm, seconds, longest, seed) for arm in ARMS}
    for rate in FLEETS:
        for arm, (per_gpu, outcome) in per_arm.items():
            in_flight = round(rate * outcome.answer_mean_s)  # Little's law
            gpus = ceil(rate / per_gpu)
            found.append({"rate": rate, "arm": arm, "gpus": gpus, "per_gpu": per_gpu, "in_flight": in_flight})
    return found


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(prog="python -m bench scale", description=__doc__)
    found.add_argument("--seconds", type=float, default=60.0, help="of arrivals")
    found.add_argument("--acceptance", type=float, default=Traffic().acceptance)
    found.add_argument("--length", type=int, default=8, help="drafted tokens of a pass, at most")
    found.add_argument("--seed", type=int, default=0)
    found.add_argument("--write", action="store_true", help="write bench/results")
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    given = sys.argv[1:] if arguments is None else list(arguments)
    options = parser().parse_args(given)
    engine, traffic = Engine(), replace(Traffic(), acceptance=options.acceptance)
    loads = rows(engine, traffic, options.seconds, options.length, options.seed)
    fleet = fleets(engine, traffic, options.seconds, options.length, options.seed)
    console = Console()
    console.print(Table.of(COLUMNS, loads, "One engine as load rises (simulated)").terminal(1))
    console.print(Table.of(FLEET_COLUMNS, fleet, "Fleets (simulated)").terminal(1))
    if options.write:
        print(results_folder.write({"loads": loads, "fleets": fleet}, RESULT))
        pages.write()
