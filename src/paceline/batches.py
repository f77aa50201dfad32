"""Batches: a progress bar, and answers in the order of their prompts, whatever became of some."""

from collections.abc import Callable, Iterator, Mapping, Sized
from contextlib import contextmanager

from paceline.config import EngineConfig
from paceline.errors import BatchError, PacelineError
from paceline.output import Result

Outcome = Result | PacelineError


def window(config: EngineConfig) -> int:
    """Prompts in the engine at once: a full pass and as many that wait for it, or all that may wait."""
    return min(2 * config.max_batch, config.max_waiting or 2 * config.max_batch)


def in_order(outcomes: Mapping[int, Outcome], return_exceptions: bool) -> list[Outcome]:
    """By number of the prompt. Where all failed, nothing is lost with the first error."""
    listed = [outcomes[i] for i in range(len(outcomes))]
    failed = [outcome for outcome in listed if isinstance(outcome, PacelineError)]
    if return_exceptions or not failed:
        return listed
    raise failed[0] if len(failed) == len(listed) else BatchError(listed)


@contextmanager
def progress_bar(shown: bool, prompts: object) -> Iterator[Callable[[Outcome], None]]:
    """On standard error, in a terminal or a notebook; elsewhere nothing. Called with every outcome."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    hidden = not shown or not (console.is_terminal or console.is_jupyter)
    tokens = passes = failed = 0
    with Progress(*columns, console=console, disable=hidden) as progress:
        task = progress.add_task("", total=len(prompts) if isinstance(prompts, Sized) else None)

        def report(outcome: Outcome) -> None:
            nonlocal tokens, passes, failed
            if isinstance(outcome, Result):
                tokens, passes = tokens + outcome.output_tokens, passes + outcome.passes
            else:
                failed += 1
            figures = f"{tokens} tokens, {tokens / max(1, passes):.2f} per pass"
            progress.update(task, advance=1, description=f"{figures}, {failed} failed" if failed else figures)

        yield report
