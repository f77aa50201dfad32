"""The table in README.md: what a user can expect, from the stored results."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from bench import results_folder
from bench.compare.rows import AGENT_TURNS, OURS, Row
from bench.results_folder import Result
from bench.runs.arms import PLAIN
from bench.table import Table, number

PATH: Final = Path(__file__).parent.parent.parent / "README.md"
BEGIN: Final = "<!-- numbers: written by `python -m bench pages` from bench/results -->"
END: Final = "<!-- /numbers -->"


def section() -> str:
    runs = [row for result in reversed(results_folder.read("runs")) for row in whole_runs(result)]
    peers = [agent_turns(result) for result in reversed(results_folder.read("peers"))]
    tools = [tool_calls(result) for result in results_folder.read("tools")]
    served = [row for result in results_folder.read("serve") for row in server_rows(result)]
    cores = results_folder.read_one("cpu")["machine"]["cores"]
    head = [f"{cores} CPU cores, temperature 0, the same GGUF file", "with drafts", "plain", "fastest other"]
    lines = Table(head, [*runs, *peers, *tools, *served]).markdown()
    return "\n".join([BEGIN, *lines[:-1], END])


def update() -> None:
    text = PATH.read_text()
    PATH.write_text(text[: text.index(BEGIN)] + section() + text[text.index(END) + len(END) :])


def pooled(result: Result, temperature: float = 0.0) -> list[Row]:
    """Rows of all agents' turns together that have an answer."""
    rows = [r for r in result["rows"] if r["temperature"] == temperature and r["n"]]
    return [r for r in rows if r["workload"] == AGENT_TURNS] or rows


def best_peer(rows: Sequence[Row]) -> Row:
    return min((r for r in rows if r["system"] != OURS and r["tpot_ms"]), key=lambda r: float(r["tpot_ms"]))


def of_mode(rows: Sequence[Row], mode: str) -> Row:
    return next(r for r in rows if r["system"] == OURS and r["mode"] == mode)


def agent_turns(result: Result) -> list[str]:
    rows = pooled(result)
    plain, drafts, peer = of_mode(rows, "plain"), of_mode(rows, "suffix+ngram"), best_peer(rows)
    return [
        f"{result['machine']['model']}, {drafts['n']} agent turns, ms per token",
        *_better(drafts["tpot_ms"], plain["tpot_ms"], min, 1),
        f"{number(peer['tpot_ms'], 1)} ({_shown(peer)}; {peer['n']} turns)",
    ]


def whole_runs(result: Result) -> list[list[str]]:
    """Whole runs with empty caches, and after a restart with tools and system prompt seen before."""
    names = {"cold": "", "seen": ", tools and system prompt seen before a restart"}
    lines, tried = [], result["tried"]
    for state, which in names.items():
        rows = {row["arm"]: row for row in result["rows"] if row["state"] == state}
        others = {row["arm"]: row for row in result["ratios"] if row["state"] == state}
        fastest = min(
            (r for r in others.values() if not r["arm"].startswith(OURS)), key=_median, default=None
        )
        if OURS not in rows or fastest is None:
            continue
        ours, plain, peer = rows[OURS], rows.get(PLAIN), rows[fastest["arm"]]
        turns = f"{ours['conversations']} agent runs, {ours['turns']} turns over HTTP{which}, s"
        if ours["rounds"] > 1:
            turns += f" (median of {ours['rounds']} rounds)"
        slower = "-" if plain is None else number(plain["run_s"]["median"], 1)
        arm = fastest["arm"] + (f", fastest of {len(tried)} settings" if len(tried) > 1 else "")
        shown = f"{number(peer['run_s']['median'], 1)} ({arm}), {fastest['median']:.1f} times"
        name = f"{result['machine']['model']}, {turns}"
        lines.append([name, f"**{number(ours['run_s']['median'], 1)}**", slower, shown])
    return lines


def _median(row: Mapping[str, Any]) -> float:
    return float(row["median"])


def tool_calls(result: Result) -> list[str]:
    """Under their schemas, with the default list: grammar and suffix."""
    rows = {(r["workload"], r["drafters"]): r for r in result["rows"]}
    workload = result["rows"][0]["workload"]
    drafts, plain = rows[workload, "grammar,suffix"], rows[workload, "none"]
    calls = f"{drafts['n']} tool calls of {workload.upper()}"
    name = f"{result['machine']['model']}, {calls} under their schemas, ms per token"
    return [name, *_better(drafts["ms_per_token"], plain["ms_per_token"], min, 1), "-"]


def server_rows(result: Result) -> list[list[str]]:
    """The first token of a next turn, and many agents at once."""
    model, settings = result["machine"]["model"], result["settings"]
    first = {r["system"]: r["next_ms"]["median"] for r in result["turns"]}
    peer = next(name for name in first if name != OURS)
    length = settings["conversation"]
    repeats = next(r["repeats"] for r in result["turns"] if r["system"] == OURS)
    turn = f"{model}, next turn of {length} tokens, first token, ms (median of {repeats})"
    rows = [[turn, f"**{first[OURS]:.0f}**", "-", f"{first[peer]:.0f} ({peer} plain)"]]
    agents, rates = settings["agents"], throughput(result, "next", settings["agents"])
    best = max((way for way in rates if not way.startswith(OURS)), key=lambda way: rates[way])
    many = f"{model}, {agents} agents at once, next turns, tokens/s"
    ours = _better(rates[f"{OURS} default"], rates[f"{OURS} plain"], max, 0)
    return [*rows, [many, *ours, f"{rates[best]:.0f} ({best})"]]


def _better(drafts: float, plain: float, better: Callable[[float, float], float], digits: int) -> list[str]:
    """Both numbers, the better one in bold."""
    best = better(drafts, plain)
    return [f"**{number(x, digits)}**" if x == best else number(x, digits) for x in (drafts, plain)]


def _shown(peer: Row) -> str:
    """A mode such as "plain (python)" without its brackets."""
    return f"{peer['system']} {peer['mode']}".replace(" (", ", ").replace(")", "")


def throughput(result: Mapping[str, Any], turn: str, agents: int) -> dict[str, float]:
    """Tokens per second by system and mode."""
    rows = [r for r in result["agents"]["rows"] if (r["turn"], r["agents"]) == (turn, agents)]
    return {f"{r['system']} {r['mode']}": r["tokens_per_s"]["median"] for r in rows}
