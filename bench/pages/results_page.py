"""bench/results/README.md: every kept result as a table."""

from collections.abc import Callable
from typing import Any, Final

from bench import advise, control, prefetch, results_folder, split
from bench.compare import table as compare_table
from bench.constraints import auto_calls, schema_rows, tool_rows
from bench.drafters import draft_pass
from bench.drafters import rows as drafter_rows
from bench.gate import served as gate_served
from bench.own import divergence as own_divergence
from bench.own import experts as own_experts
from bench.own import passes as own_passes
from bench.own import reading as own_reading
from bench.pages import gpu
from bench.peers.systems import precision
from bench.results_folder import Result
from bench.runs import rows as run_rows
from bench.runs import tool_waits
from bench.serve.tables import tables
from bench.table import Table
from bench.vllm import command as vllm_command

PATH: Final = results_folder.FOLDER / "README.md"
NOT_FIGURES: Final = ("what", "runs", "precision")
Lines = list[str]


def page() -> str:
    lines = [
        "# Results",
        "",
        "Written by `python -m bench pages` from the JSON files in this folder. [Numbers]"
        "(../../docs/numbers.md) has the short answers. A spread is median (lowest to highest).",
        "",
    ]
    return "\n".join(lines + own(results_folder.read_one("cpu")) + sections())


def own(result: Result) -> Lines:
    """The tables of `python -m bench own`."""
    facts = [[name, str(value)] for name, value in result["machine"].items()]
    lines = Table(["machine", ""], facts).markdown()
    for name, values in result["results"].items():
        figures = [[key, str(value)] for key, value in values.items() if key not in NOT_FIGURES]
        about = _without_dtype(values["what"]) if name == "plain decoding" else values["what"]
        lines += [f"## {name}", "", about, "", *Table(["figure", "value"], figures).markdown()]
        if name == "plain decoding":
            lines += [decoding_precision(values), ""]
    return lines


def _without_dtype(what: str) -> str:
    """Results before 16 November call both sides float32, which is true of one of them."""
    return what.removesuffix(", float32")


def decoding_precision(values: dict[str, Any]) -> str:
    """The arithmetic of each side of the comparison with Transformers."""
    runs = values.get("precision", {name: precision(name, {}) for name in ("paceline", "transformers")})
    return "What ran: " + "; ".join(f"{name}: {what}" for name, what in runs.items()) + "."


def sections() -> Lines:
    """A section for each kept file, those of the drafters last."""
    lines = [line for kind, write in KINDS.items() for r in results_folder.read(kind) for line in write(r)]
    return lines + drafters()


def drafters() -> Lines:
    """A section for each model, whatever its name where it was measured, with its machines side by side."""
    by_model: dict[str, list[Result]] = {}
    for result in results_folder.read("drafters"):
        by_model.setdefault(result["machine"]["fingerprint"], []).append(result)
    return [line for results in by_model.values() for line in drafter_rows.section(results)]


def measured(result: Result, title: str) -> Lines:
    machine = result["machine"]
    device = (
        machine["gpu"] if machine.get("device") == "cuda" else f"{machine['cpu']}, {machine['cores']} cores"
    )
    where = f"{machine['date']}, commit {machine['commit']}, {device}"
    return [f"## {title}: {machine['model']}", "", f"`{result['command']}`, {where}", ""]


def passes(result: Result) -> Lines:
    floor = result["floor"]
    return [
        *measured(result, "cost of a pass"),
        *own_passes.table(result["rows"]).markdown(),
        f"Reading the weights once takes {floor['floor_ms']} ms at {floor['gb_per_s']} GB/s.",
        "",
    ]


def reading(result: Result) -> Lines:
    return [*measured(result, "cost of a prompt token"), *own_reading.table(result["rows"]).markdown()]


def experts(result: Result) -> Lines:
    return [*measured(result, "cost of experts"), *own_experts.table(result["rows"]).markdown()]


def draft_passes(result: Result) -> Lines:
    return [
        *measured(result, "cost of a draft"),
        *Table.of(draft_pass.COLUMNS, result["rows"]).markdown(),
        "Medians of the rounds of a repeat; spreads over repeats. The drafter's pass fills its block and "
        "chooses its chain. The whole draft is everything between a token and the next pass of the target, "
        "including the engine's and the drafter's Python, which takes the same time for every model.",
        "",
    ]


def divergence(result: Result) -> Lines:
    return [*measured(result, "divergence from float32"), *own_divergence.table(result["rows"]).markdown()]


def tools(result: Result) -> Lines:
    masks = result["masks"]
    return [
        *measured(result, "tool calls"),
        *Table.of(tool_rows.COLUMNS, result["rows"]).markdown(),
        "Temperature 0, tool_choice required; unconstrained: the same prompt without a grammar. Each list of "
        "drafters saw the same turns in the same order, with its own suffix memory. Prompt passes are not "
        "counted. As recorded: every argument equals the reference, an underestimate, since the data has "
        "one of several right answers; except optional: optional arguments may be added.",
        "",
        f"Masks of a round, {masks['positions']} positions at {masks['vocab']:,} tokens: mean "
        f"{masks['mean_ms']} ms, median {masks['p50_ms']} ms, p99 {masks['p99_ms']} ms over "
        f"{masks['rounds']} rounds.",
        "",
    ]


def unaided_calls(result: Result) -> Lines:
    return [
        *measured(result, "tool calls under auto"),
        *Table.of(auto_calls.COLUMNS, result["rows"]).markdown(),
        f"Temperature 0, at most {result['max_tokens']} tokens. Free: without a grammar; auto: with "
        "`tool_choice: auto`. Written: answers that hold a JSON object with a name and arguments, wherever "
        "and of whatever tool. Read: answers of which calls were read; of these, tool recorded: calls of no "
        "other tools than the recorded ones; as recorded: the recorded calls, optional arguments aside; not "
        "valid: a tool that was not offered, or arguments that its schema refuses. In the irrelevance turns "
        "no tool helps, and nothing should be called. vLLM's parsers are those of its repository, on the "
        "same texts; llama3_json cannot be chosen without the token that it needs. llama.cpp's server wrote "
        "its own answers.",
        "",
    ]


def inside_vllm(result: Result) -> Lines:
    return [
        *measured(result, "drafters inside vLLM"),
        *Table.of(vllm_command.COLUMNS, result["rows"]).markdown(),
        f"{result['vllm']} as a server, float32, temperature 0, one request at a time, drafts of at most "
        f"{result['length']} tokens; turns follow one another as in their conversations. Recorded tool calls "
        "are required by their schema. Counts are vLLM's own counters; no time was measured.",
        "",
        *(f"- {line}" for line in result["ratios"]),
        "",
    ]


def advice(result: Result) -> Lines:
    return [
        *measured(result, "advice"),
        *Table.of(advise.COLUMNS, result["rows"]).markdown(),
        f"Predicted / measured: {result['summary']}. Advice is from half of the conversations; the engine "
        f"then answered others, plain and as advised in turns, {_at_once(result['at_once'])} at a time. "
        "In brackets: 90 % intervals over conversations. Other text: answers that differ between the two.",
        "",
    ]


def _at_once(number: int) -> str:
    return "one" if number == 1 else str(number)


def schemas(result: Result) -> Lines:
    return [
        *measured(result, "JSON Schemas"),
        *Table.of(schema_rows.COLUMNS, result["rows"]).markdown(),
        "Each accepted schema has two answers, plain and speculative, with one seed. Reasons for refusal:",
        "",
        *(f"- {count}: {reason}" for reason, count in result["reasons"]),
        "",
        *(f"- {problem}" for problem in result["problems"]),
        "",
    ]


def serve(result: Result) -> Lines:
    settings = result["settings"]
    return [
        *measured(result, "the server"),
        f"Over HTTP, streaming, timed by the client. Prompts are the last {settings['context']} tokens of "
        f"recorded agent turns; answers have exactly {settings['max_tokens']} tokens at temperature 0; there "
        "are as many slots as agents. No cache has seen a first turn; a next turn is the first, its answer "
        "and another message. Tokens/s run from the first request to the last token, prompts included; "
        "spreads are over rounds.",
        "",
        *(line for table in tables(result) for line in table.markdown()),
    ]


def split_modes(result: Result) -> Lines:
    settings = result["settings"]
    return [
        *measured(result, "split deployment"),
        *Table.of(split.COLUMNS, result["rows"]).markdown(),
        f"{settings['prompts']} prompts of the workload `{settings['workload']}`, at most "
        f"{settings['max_tokens']} tokens each, temperature {settings['temperature']:g}, connections warm, "
        "the round trip injected by a proxy. Split modes have drafts of the client alone: suffix and n-gram; "
        "one-shot has the answer with every tenth token replaced. Bytes are those of a committed token.",
        "",
    ]


def verdicts(result: Result) -> Lines:
    settings = result["settings"]
    return [
        *measured(result, "verdicts of the gate"),
        *Table.of(gate_served.COLUMNS, result["rows"]).markdown(),
        "`paceline gate run` between plain decoding and the candidate, on turns of "
        f"`{settings['traces']}` with at most {settings['max_characters']:,} characters of messages, answers "
        f"of at most {settings['max_tokens']} tokens. A proxy spoils all but `speculative` and `plain`.",
        "",
    ]


def whole_runs(result: Result) -> Lines:
    settings, equal = result["settings"], result["texts"]
    history = "recorded" if settings["history"] == "recorded" else "each server's own"
    lines = [
        *measured(result, "whole agent runs"),
        f"{result['opening']}, over HTTP, streaming, one request at a time, temperature 0, answers of at "
        f"most {settings['max_tokens']} tokens. The assistant's messages in the history are {history}. Cold: "
        "new processes, whose caches fill as the runs go on. Seen: new processes, after an earlier one has "
        "read the system prompts and tools, and nothing else; llama.cpp's slot is saved and restored by the "
        "client, and the time counts. Spreads are over rounds.",
        "",
        *(line for table in run_rows.tables(result) for line in table.markdown()),
        f"Text equal to plain decoding: {equal['equal']} of {equal['compared']} turns.",
        "",
    ]
    if result["tried"]:
        tried = ", ".join(f"{name} {seconds} s" for name, seconds in result["tried"].items())
        lines += [f"Settings tried on the shortest conversation: {tried}.", ""]
    lines += [f"- {name}: `{command}`" for name, command in result["commands"].items()]
    return [*lines, *(f"- left out: {name}: {why}" for name, why in result["failed"].items()), ""]


def soak(result: Result) -> Lines:
    lines = [line for table in tables(result) for line in table.markdown()]
    return [*measured(result, "soak"), *lines, *(f"- {problem}" for problem in result["problems"]), ""]


def controlled(result: Result) -> Lines:
    return [
        *measured(result, control.title(result["machine"])),
        *Table.of(control.COLUMNS, result["rows"]).markdown(),
        *(line for text in control.earlier_runs(result["rows"]) for line in (text, "")),
        "Times plain decoding, all agents together, from cached prompts "
        f"{'on, ' + result['timed'] if 'timed' in result else 'to the last token'}; medians over "
        "repeats. Hindsight is the best of plain decoding and the fixed lengths for that row, where "
        "these ran. Holds: adaptive is at least so many times as fast as plain decoding, or not.",
        "",
    ]


def slow_tools(result: Result) -> Lines:
    return [
        f"## Runs with slow tools, {result['machine']['model']}",
        "",
        tool_waits.about(result),
        "",
        *Table.of(tool_waits.COLUMNS, result["rows"]).markdown(),
    ]


def predicted_calls(result: Result) -> Lines:
    return [
        "## predicted tool calls",
        "",
        prefetch.about(result),
        "",
        *(line for table in prefetch.tables(result["rows"]) for line in table.markdown()),
    ]


KINDS: Final[dict[str, Callable[[Result], Lines]]] = {
    "runs": whole_runs,
    "peers": compare_table.section,
    "passes": passes,
    "reading": reading,
    "experts": experts,
    "draft_pass": draft_passes,
    "control": controlled,
    "divergence": divergence,
    "tools": tools,
    "tool_calls": unaided_calls,
    "schemas": schemas,
    "serve": serve,
    "soak": soak,
    "advise": advice,
    "prefetch": predicted_calls,
    "tool_waits": slow_tools,
    "hostile": soak,
    "split": split_modes,
    "gate": verdicts,
    "vllm": inside_vllm,
    "gpu": gpu.section,
}
