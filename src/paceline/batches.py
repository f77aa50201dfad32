"""Batches: a progress bar, and answers in the order of their prompts, whatever became of some."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar, overload

from paceline.config import EngineConfig, SamplingParams
from paceline.errors import BatchError, PacelineError, SettingError
from paceline.output import Result
from paceline.text import Prompt

Outcome = Result | PacelineError
Results = TypeVar("Results")
Outcomes = TypeVar("Outcomes")


def window(config: EngineConfig) -> int:
    """Prompts in the engine at once: a full pass and as many that wait for it, or all that may wait."""
    return min(2 * config.max_batch, config.max_waiting or 2 * config.max_batch)


@dataclass(frozen=True, slots=True)
class Batch:
    """Prompts that are answered together, all with the same options."""

    prompts: Iterable[Prompt]
    options: Mapping[str, Any]  # of each request
    progress: bool
    return_exceptions: bool

    def __post_init__(self) -> None:
        if isinstance(self.prompts, str) or not isinstance(self.prompts, Iterable):
            raise SettingError("prompts", self.prompts, "a list of prompts", "for one prompt use generate")

    def progress_bar(self) -> AbstractContextManager[Callable[[Outcome], None]]:
        return _progress_bar(self.progress, self.prompts)

    def in_order(self, outcomes: Mapping[int, Outcome]) -> list[Outcome]:
        """By number of the prompt. Where all failed, nothing is lost with the first error."""
        listed = [outcomes[i] for i in range(len(outcomes))]
        failed = [outcome for outcome in listed if isinstance(outcome, PacelineError)]
        if self.return_exceptions or not failed:
            return listed
        raise failed[0] if len(failed) == len(listed) else BatchError(listed)


class Batches(ABC, Generic[Results, Outcomes]):
    """`batch` of LLM and AsyncLLM. Results, Outcomes: their lists; of AsyncLLM, coroutines of these."""

    @overload
    def batch(
        self,
        prompts: Iterable[Prompt],
        params: SamplingParams | None = None,
        *,
        progress: bool = False,
        return_exceptions: Literal[False] = False,
        **options: Any,
    ) -> Results: ...
    @overload
    def batch(
        self,
        prompts: Iterable[Prompt],
        params: SamplingParams | None = None,
        *,
        progress: bool = False,
        return_exceptions: bool,
        **options: Any,
    ) -> Outcomes: ...
    def batch(
        self,
        prompts: Iterable[Prompt],
        params: SamplingParams | None = None,
        *,
        progress: bool = False,
        return_exceptions: bool = False,
        **options: Any,
    ) -> Any:
        """Several answers, which share passes of the target, in the order of their prompts.

        Prompts are read from the iterable as places become free: it may be the lines of a large file.
        progress: a bar on standard error, in a terminal or a notebook. options as for `stream`.

        A prompt that fails does not end the others. Once all are done, a BatchError is raised whose `results`
        has all answers, and an error in place of each failed one; with return_exceptions, that list is
        returned. If all prompts failed, the first error is raised.
        """
        return self._batch(Batch(prompts, {"params": params, **options}, progress, return_exceptions))

    @abstractmethod
    def _batch(self, batch: Batch) -> Outcomes: ...


@contextmanager
def _progress_bar(shown: bool, prompts: object) -> Iterator[Callable[[Outcome], None]]:
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
