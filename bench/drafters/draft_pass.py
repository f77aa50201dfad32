"""python -m bench draft-pass: what a draft costs beside a pass of the target, as the text grows.

The drafter fills its block before every pass, whether that pays or not. Its pass is that of its network; the
draft is all that happens between the last token and the next pass of the target, the engine's bookkeeping
included. Beside them, in the same run and after the same text, a pass of plain decoding.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from itertools import product
from statistics import median
from time import perf_counter
from typing import Any, Final, cast

from rich.console import Console

from bench import machine, pages, results_folder
from bench.serve import cut_prompts
from bench.spread import Spread
from bench.table import Column, number, spread
from paceline import LLM, EngineConfig, SamplingParams, SpecConfig, hub
from paceline.drafters.heads.block import BlockDrafter
from paceline.heads.runner import BlockRunner
from paceline.types import Round

CONTEXTS: Final = (128, 512, 1024, 2048, 4096)
NEW_TOKENS: Final = 48
Case = tuple[int, float, int]  # tokens before the answer, temperature, draft length
FIRST: Final = 2  # rounds of an answer that are not looked at: the prompt's, and one that warms up
PLAIN: Final = SpecConfig(("none",), max_draft=0)
COLUMNS: Final = (
    Column("after", lambda r: f"{r['context']} tokens"),
    Column("T", lambda r: f"{r['temperature']:g}"),
    Column("drafted", "guesses"),
    Column("target's pass, ms", lambda r: spread(r["target_ms"])),
    Column("drafter's pass, ms", lambda r: spread(r["own_ms"])),
    Column("of the target's", lambda r: f"{spread(r['own_share'], 1)} %"),
    Column("whole draft, ms", lambda r: spread(r["draft_ms"])),
    Column("of the target's", lambda r: f"{spread(r['draft_share'], 1)} %"),
    Column("tokens per pass", lambda r: number(r["tokens_per_pass"]["median"])),
)


class TimedRunner:
    """Stands before a drafter's runner and notes how long it computes."""

    def __init__(self, runner: BlockRunner) -> None:
        self._runner, self._ms = runner, 0.0

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._runner, name)
        return self._noted(found) if callable(found) else found

    def _noted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*given: Any) -> Any:
            started = perf_counter()
            made = call(*given)
            self._ms += 1000 * (perf_counter() - started)
            return made

        return noted

    def since(self) -> float:
        """Milliseconds since it was asked before."""
        spent, self._ms = self._ms, 0.0
        return spent


def rounds(
    llm: LLM, timed: TimedRunner, prompt: Sequence[int], temperature: float, seed: int, spec: SpecConfig
) -> list[tuple[Round, float]]:
    """Each with the milliseconds that the drafter computed."""
    params = SamplingParams(temperature=temperature, seed=seed, max_tokens=NEW_TOKENS, ignore_eos=True)
    stream = llm.stream(prompt, params, spec=spec, tenant="bench")
    found: list[tuple[Round, float]] = []
    while llm.engine.busy:
        timed.since()
        found += [(r, timed.since()) for r in llm.engine.step() if r.tokens]
    stream.close()
    return found[FIRST:]


def measure(llm: LLM, cases: Sequence[Case], prompts: int, repeats: int) -> Iterator[dict[str, Any]]:
    """The medians of one repeat's rounds."""
    drafter = llm.drafters.get("block")
    if not isinstance(drafter, BlockDrafter):
        raise SystemExit(f"{', '.join(llm.trained)} fills no blocks: give a drafter of kind block")
    timed = TimedRunner(drafter.runner)
    drafter.runner = cast(BlockRunner, timed)
    for length, temperature, guesses in cases:
        texts = cut_prompts.cut(llm.tokenizer, length, prompts)
        spec = SpecConfig(("block",), guesses, adaptive=False)
        every = [_repeat(llm, timed, texts, temperature, seed, spec) for seed in range(repeats + 1)]
        warm = every[1:]
        yield {
            "context": length,
            "temperature": temperature,
            "guesses": guesses,
            **{key: asdict(Spread.of([one[key] for one in warm])) for key in warm[0]},
        }


def _repeat(
    llm: LLM, timed: TimedRunner, texts: Sequence[list[int]], temperature: float, seed: int, spec: SpecConfig
) -> dict[str, float]:
    guessed = [one for text in texts for one in rounds(llm, timed, text, temperature, seed, spec)]
    plain = [r for text in texts for r, _ in rounds(llm, timed, text, temperature, seed, PLAIN)]
    whole, own = median(r.target_us for r in plain) / 1000, median(ms for _, ms in guessed)
    draft = median(r.draft_us for r, _ in guessed) / 1000
    return {
        "target_ms": whole,
        "own_ms": own,
        "own_share": 100 * own / whole,
        "draft_ms": draft,
        "draft_share": 100 * draft / whole,
        "tokens_per_pass": sum(len(r.tokens) for r, _ in guessed) / len(guessed),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    given = sys.argv[1:] if arguments is None else list(arguments)
    parser = argparse.ArgumentParser(prog="python -m bench draft-pass", description=__doc__)
    parser.add_argument("--model", default=hub.DEFAULT_MODEL)
    parser.add_argument(
        "--trained", default=f"{hub.DEFAULT_MODEL}-block", help="a block drafter's name or folder"
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--contexts", default=",".join(map(str, CONTEXTS)))
    parser.add_argument("--temperatures", default="0,0.7")
    parser.add_argument("--draft-lengths", "--guesses", default="5,8", help="--guesses is the old name")
    parser.add_argument("--prompts", type=int, default=2, help="of each length")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--write", action="store_true", help="write bench/results and docs/numbers.md")
    options = parser.parse_args(given)
    config = EngineConfig(device=options.device, threads=options.threads)
    llm = LLM(options.model, trained=[options.trained], config=config)
    cases = list(
        product(
            map(int, options.contexts.split(",")),
            map(float, options.temperatures.split(",")),
            map(int, options.draft_lengths.split(",")),
        )
    )
    console, rows = Console(width=160, highlight=False), []
    console.print("  ".join(column.title for column in COLUMNS))
    for row in measure(llm, cases, options.prompts, options.repeats):
        console.print("  ".join(column.cell(row) for column in COLUMNS))
        rows.append(row)
    if options.write:
        name = machine.called(llm.name)
        about = {"model": name, "where": llm.target.describe(), **machine.facts()}
        result = {"machine": about, "command": machine.command("draft-pass", given), "rows": rows}
        results_folder.write(result, f"draft_pass-{name}")
        pages.write()


if __name__ == "__main__":
    main()
