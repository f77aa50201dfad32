"""docs/numbers.md: questions about speed and their short answers, from the stored results."""

import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from bench import results_folder
from bench.compare.rows import OURS
from bench.compare.table import faster
from bench.drafters.arms import PLAIN
from bench.drafters.rows import machine_name, verdicts
from bench.pages import gpu
from bench.pages.readme import best_peer, of_mode, pooled, throughput
from bench.peers.systems import precision
from bench.results_folder import Result
from bench.runs.arms import LLAMA
from bench.runs.arms import OURS as RUNS_OURS
from bench.table import Table, number, spread

PATH: Final = Path(__file__).parent.parent.parent / "docs" / "numbers.md"
FULL: Final = "../bench/results/README.md"
PEER_READERS: Final = {  # whose answers and who reads them: a short name
    ("the model, free", "paceline, declared format"): "as declared",
    ("the model, free", "vLLM, hermes"): "vLLM's parser",
    ("llama.cpp, auto", "llama.cpp"): "llama.cpp",
}
Lines = list[str]
WORKLOADS: Final = {"agents": "agents' turns", "chat": "chats", "mixed": "both mixed"}  # of `bench control`
FULL_LOADS: Final = (16, 32)  # answers at once, for the advice about full passes


def page() -> str:
    lines = [
        "# Numbers",
        "",
        f"Written by `python -m bench pages` from [the stored results]({FULL}), which have every table, its "
        "command and its raw file. A spread is median (lowest to highest).",
        "",
    ]
    parts = (whole_runs, is_it_faster, for_whom, against_whom, on_a_gpu, when_not, same_text, which_machine)
    return "\n".join([*lines, *(line for part in parts for line in part())])


def whole_runs() -> Lines:
    """Nothing where none was measured."""
    results = list(reversed(results_folder.read("runs")))
    if not results:
        return []
    openings = [
        f"{result['machine']['model']}: {result['opening']}, {result['texts']['equal']} of "
        f"{result['texts']['compared']} answers equal plain decoding."
        for result in results
    ]
    head = ["model", "caches", "seconds of all runs", "against", "times faster"]
    return [
        "## How long does an agent's run take?",
        "",
        "Recorded conversations replayed turn by turn over HTTP, on the same GGUF file. Cold: new processes. "
        "Seen: new processes, after an earlier one has read the system prompts and tools; "
        f"llama.cpp's client saves and restores its slots (else: {_unsaved(results)} times longer). "
        + " ".join(openings),
        "",
        *Table(head, [row for result in results for row in _against_servers(result)]).markdown(),
    ]


def _unsaved(results: Sequence[Result]) -> str:
    """A restarted llama.cpp whose client saves nothing is as slow as a new one: over paceline, by model."""
    found = []
    for result in results:
        seconds = {(row["state"], row["arm"]): row["run_s"]["median"] for row in result["rows"]}
        cold = [s for (state, arm), s in seconds.items() if state == "cold" and arm.startswith(LLAMA)]
        if cold and ("seen", RUNS_OURS) in seconds:
            found.append(f"{min(cold) / seconds['seen', RUNS_OURS]:.1f}")
    return " and ".join(found)


def _against_servers(result: Result) -> list[list[str]]:
    """A row for each state of the caches and each other server."""
    seconds = {(row["state"], row["arm"]): row["run_s"] for row in result["rows"]}
    return [
        [
            result["machine"]["model"],
            ratio["state"],
            spread(seconds[ratio["state"], RUNS_OURS], 1),
            f"{ratio['arm']}: {spread(seconds[ratio['state'], ratio['arm']], 1)}",
            spread(ratio),
        ]
        for ratio in result["ratios"]
    ]


def is_it_faster() -> Lines:
    rows = []
    for result in reversed(results_folder.read("peers")):
        found = pooled(result)
        plain = of_mode(found, "plain")
        for row in [r for r in found if r["system"] == OURS]:
            times = plain["tpot_ms"] / row["tpot_ms"]
            rows.append(
                [
                    result["machine"]["model"],
                    row["mode"],
                    number(row["tpot_ms"], 1),
                    number(row["tokens_per_pass"]),
                    "" if row is plain else number(times),
                    number(row["identical_to_plain"]),
                    str(row["n"]),
                ]
            )
    head = ["model", "drafters", "ms per token", "tokens per pass", "x plain", "text = plain", "answers"]
    return [
        "## Is it faster?",
        "",
        "For agents, yes: recorded agent turns, one at a time, temperature 0, on two CPU cores. `+learned` "
        "has seen other conversations of the same workloads before.",
        "",
        *Table(head, rows).markdown(),
    ]


def for_whom() -> Lines:
    rows = []
    for result in results_folder.read("drafters"):
        if result["settings"]["repeats"] < 2:
            continue  # cannot tell a gain from noise
        for row in result["rows"]:
            if row["drafters"] == "default":
                prompts = f"{row['prompts']}, {_workload(result)}"
                cells = [result["machine"]["model"], machine_name(result), prompts]
                cells += [f"{row['temperature']:g}", spread(row["times_plain"]), str(row["turns"])]
                rows.append(cells)
    head = ["model", "machine", "prompts", "T", "x plain", "turns"]
    lines = [
        "## For whom?",
        "",
        "Most for agents: tool calls, JSON, copied ids and code repeat what was there before. Least for free "
        "chat. The default list (`grammar`, `suffix`, `ngram`) against plain decoding in the same run:",
        "",
        *Table(head, rows).markdown(),
        "The H200 rows ran on torch without the CUDA kernels.",
        "",
    ]
    for result in results_folder.read("tools"):
        lines += _tools(result)
    for result in results_folder.read("tool_calls"):
        lines += _unaided_calls(result)
    return lines


def _workload(result: Result) -> str:
    """The one that was chosen, as the command has it."""
    words = shlex.split(result["command"])
    return words[words.index("--workload") + 1] if "--workload" in words else "all workloads"


def _tools(result: Result) -> Lines:
    rows = {(r["workload"], r["drafters"]): r for r in result["rows"]}
    told = [
        f"{r['times_plain_pooled']:.2f} on {name} ({r['n']} calls)"
        for (name, drafters), r in rows.items()
        if drafters == "grammar,suffix"
    ]
    model = result["machine"]["model"]
    return [f"Tool calls under their schemas, {model}, `grammar,suffix`, x plain: {', '.join(told)}.", ""]


def _unaided_calls(result: Result) -> Lines:
    """Of the turns in which a call was recorded; of those where none was written there is nothing to say."""
    told = []
    for name in ("bfcl", "tau-bench airline"):
        rows = {(r["answers"], r["reader"]): r for r in result["rows"] if r["workload"] == name}
        auto = rows["the model, auto", "paceline"]
        found = {peer: rows[key] for key, peer in PEER_READERS.items() if key in rows}
        other = ", ".join(f"{peer} {r['read']} of {r['n']}" for peer, r in found.items())
        told += [f"{auto['read']} of {auto['n']} on {name} ({other})"] if auto["written"] else []
    model = result["machine"]["model"]
    return [f"Tool calls found under `auto`, {model}: {'; '.join(told)}.", ""] if told else []


def against_whom() -> Lines:
    lines = [
        "## Against whom?",
        "",
        "Engines that run on a CPU, each in its fastest mode of this run, on the same prompts in the same "
        "rounds. The column `runs` says which arithmetic each of them did: only rows with the same entry do "
        "the same work for a token.",
        "",
    ]
    rows = [row for result in reversed(results_folder.read("peers")) for row in _fastest(result)]
    head = ["model", "engine", "mode", "runs", "ms per token", "first ms", "peak MB", "n", "times faster"]
    return [
        *lines,
        *Table(head, rows).markdown(),
        "n: answers. times faster: paceline against this engine, over the prompts that both answered, "
        "where this was recorded; other rows answered other prompts too.",
        "",
    ]


def _fastest(result: Result) -> Iterable[list[str]]:
    """The fastest mode of each system; paceline's without what it learned from other conversations."""
    found = pooled(result)
    ours = of_mode(found, "suffix+ngram")
    paired = {found["peer"]: faster(found) for found in (ours["vs_plain_peer"], ours["vs_speculative_peer"])}
    for system in dict.fromkeys(r["system"] for r in found):
        fastest = ours if system == OURS else best_peer([r for r in found if r["system"] == system])
        yield [
            result["machine"]["model"],
            system,
            fastest["mode"],
            precision(system, result),
            number(fastest["tpot_ms"], 1),
            number(fastest["ttft_ms"], 0),
            number(fastest["peak_mb"], 0),
            str(fastest["n"]),
            paired.get(f"{system} {fastest['mode']}", ""),
        ]


def on_a_gpu() -> Lines:
    lines = []
    for result in results_folder.read("gpu"):
        lines += [
            f"## On a GPU ({result['machine']['gpu']})?",
            "",
            "A pass of the CUDA kernels, ms, and its share of the memory-bandwidth floor:",
            "",
            *gpu.passes(result, contexts=(300,), kinds=("bf16", "int8")),
            "SmolLM2 in recorded turns of agents, one request at a time, greedy, Python included: the median "
            "of three, and their range. Rows with the same first column had the same prompts and lengths:",
            "",
            *gpu.rounds(result, short=True),
        ]
    return lines


def when_not() -> Lines:
    lines = ["## When not?", ""]
    lines += under_load(results_folder.read("control"))
    for result in results_folder.read("serve"):
        lines += _many_agents(result)
    for result in results_folder.read("drafters"):
        if result["settings"]["repeats"] > 1:
            where = (
                f"{result['machine']['model']} on {machine_name(result)}, {result['settings']['turns']} turns"
            )
            lines += [f"- {where}: {line}" for line in verdicts(result) if "nowhere" in line]
    lines += [
        "- Memory: paceline holds more than llama.cpp (peak MB above).",
        "",
    ]
    return lines


def under_load(results: Sequence[Result]) -> Lines:
    """Of controllers alone, not of those with a trained drafter: decoding, where passes are full."""
    found: dict[tuple[str, int], list[str]] = {}
    for result in results:
        if not any(row["against_untrained"] for row in result["rows"]):
            for load in FULL_LOADS:
                if shown := _gains(result, load):
                    found.setdefault((result["machine"]["model"], load), []).append(shown)
    lines = [
        f"- **{load} answers at once** ({model}), x plain: {'; '.join(sorted(shown))}."
        for (model, load), shown in found.items()
    ]
    advice = "- The fuller a pass, the less tokens/s the default list gains. Below 1: `drafters: [none]`."
    return [*lines, advice] if lines else []


def _gains(result: Result, load: int) -> str:
    """Of the default list by workload; nothing where this load was not measured."""
    gains: dict[str, list[float]] = {}
    for row in result["rows"]:
        if row["workload"] in WORKLOADS and row["load"] == load:
            gain = row["against_plain"]["adaptive"]["median"]
            gains.setdefault(WORKLOADS[row["workload"]], []).append(gain)
    machine = result["machine"]
    where = machine["gpu"].removeprefix("NVIDIA ") if machine.get("device") == "cuda" else "CPU"
    shown = ", ".join(f"{_range(found)} on {workload}" for workload, found in gains.items())
    return f"{where} {shown}" if shown else ""


def _range(found: Sequence[float]) -> str:
    low, high = f"{min(found):.2f}", f"{max(found):.2f}"
    return low if low == high else f"{low} to {high}"


def _many_agents(result: Result) -> Lines:
    agents, model = result["settings"]["agents"], result["machine"]["model"]
    shown, loses = list[str](), False
    for turn in ("first", "next"):
        rates = throughput(result, turn, agents)
        drafts, plain = rates["paceline default"], rates["paceline plain"]
        word = "fewer" if drafts < plain else "more"
        shown.append(f"{word} tokens/s than plain on {turn} turns, {drafts:.0f} against {plain:.0f}")
        loses = loses or drafts < plain
    advice = " Compare with `--drafters none` where throughput is what counts." if loses else ""
    return [
        f"- **{agents} agents at once** over HTTP, prompts included ({model}): the default list gives "
        f"{', and '.join(shown)}.{advice}"
    ]


def same_text() -> Lines:
    results = results_folder.read("drafters")
    drafted = [row for result in results for row in result["rows"] if row["drafters"] != PLAIN]
    equal, compared = (sum(row[key] for row in drafted) for key in ("equal", "compared"))
    lines = [
        "## Is the text the same?",
        "",
        f"{equal} of {compared} answers with drafts had the token ids of plain decoding "
        "([why](lossless.md)). The model that is served differs from the float32 model by its rounding:",
        "",
    ]
    rows = [
        [result["machine"]["model"], name, f"{row['mean_kl']:.1e}", f"{row['same_first_choice']:.3f}"]
        for result in results_folder.read("divergence")
        for name, row in result["rows"].items()
    ]
    return [*lines, *Table(["model", "engine", "mean KL", "same first choice"], rows).markdown()]


def which_machine() -> Lines:
    machine = results_folder.read_one("cpu")["machine"]
    facts = ("cpu", "cpu features", "cores", "memory", "torch", "date")
    gpus = {r["machine"]["gpu"] for r in results_folder.read("drafters") if r["machine"]["device"] == "cuda"}
    return [
        "## On which machine?",
        "",
        "; ".join(f"{name}: {machine[name]}" for name in facts) + f". GPU rows: {', '.join(sorted(gpus))}.",
        "",
        "Measure your own, in a clone: `make bench-peers` installs the other engines, `make bench` compares "
        "them (half an hour), `python -m bench drafters` measures every drafter, `python -m bench serve` "
        "a server under load, `python -m bench runs` whole agent runs. `--write` keeps the results and "
        "writes this page anew.",
        "",
    ]
