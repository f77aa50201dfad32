"""python -m bench soak --hostile: attacks, one after another, beside ordinary clients of the same server.

A calm stretch lies between two attacks, so that gaps with and without attack come from the same minutes.
Other clients send pairs of all drafters and endpoints (pairs.py), and the server's wall clock jumps. Slow
drafters lengthen everybody's gaps: pairs are sent while warming up, in every second series of attacks and at
the end, and gaps of those times do not count.
Exit code 1 for a wrong text, a stuck request, an unexpected answer, longer gaps, or memory that stays.
"""

import argparse
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from bench.serve import pair_drafters, servers
from bench.serve.hostile import ATTACKS, Attack, Target, cold_prompt
from bench.serve.pairs import PairClients, PairRecords
from bench.serve.victims import Records, Span, Victims, during, memory_between, milliseconds, resident_mb

WARM_UP_S: Final = 20.0
FILL_TOKENS: Final = 4000  # of a prompt that fills the cache
FILL_ROUNDS: Final = 24  # until a draft model has read such a prompt
MAX_FILL: Final = 40  # such prompts
FULL_MB: Final = 8.0  # a prompt that adds less has found the cache full
CALM_S: Final = 4.0  # between two attacks
ECHO_S: Final = 0.5  # after an answer, still counted as attack
SETTLE_S: Final = 60.0  # after the last attack, for memory to return
MEMORY_S: Final = 5.0  # over which memory is averaged in a run of few series
WARM_SERIES: Final = 2  # of attacks: every attack, every list of drafters and endpoint has been met once
MAX_GAP_GROWTH_MS: Final = 50.0
MAX_HEALTH_MS: Final = 200.0
MAX_GROWTH: Final = 0.05


@dataclass(slots=True)
class AttackRecord:
    """The answers to one attack."""

    attack: Attack
    windows: list[Span] = field(default_factory=list)
    statuses: Counter[int] = field(default_factory=Counter)
    stuck: int = 0

    @property
    def unexpected(self) -> list[int]:
        return sorted(set(self.statuses) - self.attack.expected)


def run_attacks(
    chosen: Sequence[Attack],
    server: Target,
    seconds: float,
    calm_s: float,
    rng: random.Random,
    alive: Callable[[], bool],
    say: Callable[[str], None],
    pairs: PairClients,
) -> tuple[list[AttackRecord], list[Span]]:
    """Each at least once, in random order, and again until the time is up, in turn without and with pairs.

    Also the times of the series: each attack once.
    """
    records, until = {one.name: AttackRecord(one) for one in chosen}, time.monotonic() + seconds
    first, beside_pairs = True, False
    series: list[Span] = []
    while first or time.monotonic() < until:
        pairs.resume() if beside_pairs else pairs.pause()
        beside_pairs = not beside_pairs
        start = time.monotonic()
        for one in rng.sample(list(chosen), len(chosen)):
            if not alive() or (not first and time.monotonic() > until):
                break
            time.sleep(calm_s)
            _run(records[one.name], server)
            last = records[one.name]
            say(f"{one.name}: {dict(last.statuses)} after {last.windows[-1].seconds - ECHO_S:.1f} s")
        series.append(Span(start, time.monotonic() - start))
        say(pairs.records.short())
        first = False
        if not alive():
            break
    return list(records.values()), series


def resident_before_and_after(
    records: Records, series: Sequence[Span], warm: float, last: float
) -> tuple[float, float]:
    """Resident MB after warm-up and at the end: medians over two series of attacks, without and with pairs.

    Until every kind of request has been met once, code is loaded and heaps grow to what the largest needs.
    A run of fewer than six series compares the last seconds before the attacks with the last of all.
    """
    if len(series) < 3 * WARM_SERIES:
        return memory_between(records, warm - MEMORY_S, warm), memory_between(records, last - MEMORY_S, last)
    after_warm_up, final = series[WARM_SERIES : 2 * WARM_SERIES], series[-WARM_SERIES:]
    return _resident_during(records, after_warm_up), _resident_during(records, final)


def _resident_during(records: Records, series: Sequence[Span]) -> float:
    return memory_between(records, series[0].start, series[-1].end)


def _run(record: AttackRecord, server: Target) -> None:
    start = time.monotonic()
    try:
        record.statuses[record.attack.run(server)] += 1
    except TimeoutError:
        record.stuck += 1
    except OSError:
        record.statuses[0] += 1
    record.windows.append(Span(start, time.monotonic() - start + ECHO_S))


def rows(attacks: Sequence[AttackRecord], records: Records) -> list[dict[str, Any]]:
    """One for each attack."""
    return [
        {
            "attack": one.attack.name,
            "runs": sum(one.statuses.values()) + one.stuck,
            "answers": ", ".join(f"{status} x {count}" for status, count in sorted(one.statuses.items())),
            "expected": ", ".join(map(str, sorted(one.attack.expected))),
            "seconds": round(max((w.seconds - ECHO_S for w in one.windows), default=0.0), 2),
            "gap_ms": milliseconds(during(records.gaps, one.windows), 1),
            "health_ms": milliseconds(during(records.health, one.windows), 1),
        }
        for one in attacks
    ]


def figures(
    attacks: Sequence[AttackRecord], records: Records, pairs: PairRecords, memory: tuple[float, float]
) -> dict[str, Any]:
    """records.gaps: those that count. memory: resident MB after warm-up and at the end."""
    windows = [window for one in attacks for window in one.windows]
    hit, calm = during(records.gaps, windows), during(records.gaps, windows, inside=False)
    result: dict[str, Any] = {
        "attacks": sum(sum(one.statuses.values()) + one.stuck for one in attacks),
        "pairs compared": records.pairs + pairs.total,
        "choices compared in pairs of all drafters": pairs.choices,
        "wrong texts": len(records.wrong) + len(pairs.wrong),
        "stuck requests": len(records.stuck) + len(pairs.stuck) + sum(one.stuck for one in attacks),
        "unexpected answers to attacks": sum(one.statuses[s] for one in attacks for s in one.unexpected),
        "ordinary requests refused": len(records.refused) + len(pairs.refused),
    }
    for name, share in (("p50", 0.5), ("p99", 0.99), ("max", 1.0)):
        result[f"gap {name}, calm, ms"] = milliseconds(calm, share)
        result[f"gap {name}, attacked, ms"] = milliseconds(hit, share)
    health = during(records.health, windows)
    for name, share in (("p99", 0.99), ("max", 1.0)):
        result[f"/health {name}, attacked, ms"] = milliseconds(health, share)
    before, after = memory
    result |= {
        "resident MB after warm-up": before,
        "resident MB, highest": round(max((mb for _, mb in records.memory), default=0.0), 1),
        "resident MB at the end": after,
        "growth": round(after / before - 1, 4) if before else 0.0,
    }
    return result


def faults(result: dict[str, Any], alive: bool) -> list[str]:
    """The reasons why the run failed."""
    counted = ("wrong texts", "stuck requests", "unexpected answers to attacks", "ordinary requests refused")
    bad = [f"{result[name]} {name}" for name in counted if result[name]]
    longer = result["gap p99, attacked, ms"] - result["gap p99, calm, ms"]
    if longer > MAX_GAP_GROWTH_MS:
        bad.append(f"p99 of the gaps {longer:.0f} ms longer under attack: at most {MAX_GAP_GROWTH_MS:.0f}")
    if result["/health p99, attacked, ms"] > MAX_HEALTH_MS:
        bad.append(f"/health took {result['/health p99, attacked, ms']:.0f} ms: at most {MAX_HEALTH_MS:.0f}")
    if result["growth"] > MAX_GROWTH:
        bad.append(f"memory grew by {result['growth']:.1%}")
    return bad if alive else [*bad, "the server ended"]


def fill_cache(server: Target, pid: int, drafters: Sequence[str], first: int) -> int:
    """Cold prompts until all of the KV cache is in use, and those of these drafters; their number.

    Its memory is set aside by a setting and becomes resident as it is first written: it is no leak.
    first: of the prompts' seeds.
    """
    spec = {"drafters": list(drafters), "adaptive": False}
    for i in range(MAX_FILL):
        before = resident_mb(pid)
        body = {"prompt": cold_prompt(FILL_TOKENS, first + i), "user": f"user-{i % 4}"}
        status = server.completion(**body, max_tokens=FILL_ROUNDS, ignore_eos=True, speculative_config=spec)
        if status != 200:
            raise RuntimeError(f"filling the cache got {status}: give --no-fill or more --cache-mb")
        if i and resident_mb(pid) - before < FULL_MB:
            return i + 1
    return MAX_FILL


def fill_caches(server: Target, pid: int, lists: Sequence[pair_drafters.List]) -> int:
    """Those of the model and of drafters that have caches of their own; the number of prompts."""
    alone = [pair_drafters.DEFAULT, *(names for names in lists if names in pair_drafters.CACHING)]
    return sum(fill_cache(server, pid, names, 1000 * (1 + i)) for i, names in enumerate(alone))


def measure(options: argparse.Namespace, say: Callable[[str], None]) -> dict[str, Any]:
    chosen = [ATTACKS[name] for name in options.attacks or ATTACKS]
    server, lists = pair_drafters.start_server(options, say)
    try:
        return _measure(options, chosen, server, lists, say)
    finally:
        server.close()


def _measure(
    options: argparse.Namespace,
    chosen: Sequence[Attack],
    server: servers.RunningServer,
    lists: Sequence[pair_drafters.List],
    say: Callable[[str], None],
) -> dict[str, Any]:
    rng, target = random.Random(options.seed), Target(server.port, options.model)
    victims = Victims(server.port, server.process.pid, options.model, options.clients, options.seed)
    clients = PairClients(server.port, options.model, lists, options.pair_clients, options.seed)
    ended = threading.Event()
    if options.fill:
        say(f"{fill_caches(target, server.process.pid, lists)} prompts have filled the KV caches")
    with victims, clients:
        clients.resume()
        say(f"{options.clients} ordinary streams, {len(chosen)} attacks, {len(lists)} lists of drafters")
        target.chat(structured_outputs={"choice": [f"a large constraint {i}" for i in range(1000)]})
        time.sleep(options.warm_up)
        warm = time.monotonic()
        attacks, series = run_attacks(
            chosen,
            target,
            60 * options.minutes,
            options.calm,
            rng,
            lambda: server.process.poll() is None,
            say,
            clients,
        )
        clients.resume()
        say(f"attacks are over; {options.settle:.0f} s for memory to return")
        ended.wait(options.settle)
        last = time.monotonic()
        clients.pause()
        alive = server.process.poll() is None
        drafted = pair_drafters.accepted(server.port) if alive else {}
    records, pairs = victims.records, clients.records
    records.gaps = during(records.gaps, clients.spans, inside=False)
    result = figures(attacks, records, pairs, resident_before_and_after(records, series, warm, last))
    bad = [*faults(result, alive), *pairs.faults(lists, drafted)]
    unexpected = [f"{one.attack.name}: answered {one.unexpected}" for one in attacks if one.unexpected]
    stuck = [*records.stuck, *pairs.stuck][:10]
    refused = [
        f"ordinary request: {status} {text[:300]}" for status, text in [*records.refused, *pairs.refused][:10]
    ]
    return {
        "figures": result,
        "hostile": rows(attacks, records),
        "pairs": pairs.rows(lists, drafted),
        "problems": [*bad, *unexpected, *records.wrong[:10], *pairs.wrong[:10], *stuck, *refused],
        "failed": bool(bad),
        "log": [line for line in server.log.splitlines() if line.strip()][-20:],
    }
