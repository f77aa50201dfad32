"""Turns that every drafter answers: chats, and agents' turns whose recorded tool calls are required."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from bench import train_prompts, workload
from bench.workload import BUILT_IN, FREE_TEXT, SHARED, Prompt
from paceline.constraints import Compiler, tool_calls
from paceline.errors import ConstraintError
from paceline.text import Tokenizer
from paceline.train.data.held_out import is_held_out
from paceline.types import Cursor

REAL: Final = ("bfcl-multi", "bfcl-single", "tau-bench", "spec-bench")
AGENTS: Final = "agents"
CHAT: Final = "chat"


def _free() -> None:
    return None


@dataclass(frozen=True)
class Turn:
    prompt: Prompt
    cursor: Callable[[], Cursor | None] = _free  # at the start of an answer, one for each
    bound: bool = False  # a tool must be called
    tenant: str = ""

    @property
    def kind(self) -> str:
        return CHAT if self.prompt.workload in FREE_TEXT else AGENTS

    @property
    def name(self) -> str:
        return f"{self.prompt.workload} {self.prompt.id}"

    def of(self, tenant: str) -> "Turn":
        """The same turn of another tenant."""
        return replace(self, tenant=tenant)


def files(data: Path | None, only: Sequence[str] | None = None) -> dict[str, Path]:
    """The project's own workloads, and the recorded ones in the folder. only: those of these names."""
    found = {path.stem: path for path in sorted(BUILT_IN.glob("*.jsonl"))} | _recorded(data)
    unknown = sorted(set(only or ()) - set(found))
    if unknown or only == []:
        known = ", ".join(found)
        what = f"there is no {' and no '.join(map(repr, unknown))}" if unknown else "names nothing"
        raise SystemExit(f"--workload {what}: expected some of {known}; --data adds recorded ones")
    return {name: path for name, path in found.items() if only is None or name in only}


def _recorded(data: Path | None) -> dict[str, Path]:
    if data is None:
        return {}
    real = {name: data / SHARED[name] for name in REAL if (data / SHARED[name]).is_file()}
    if not real:
        raise SystemExit(f"{data} has no workload: expected one of {', '.join(SHARED[n] for n in REAL)}")
    return real


def never_taught(record: Mapping[str, Any]) -> bool:
    """True if no training uses it, neither that of the shipped drafter nor of one from the same files."""
    group = record.get("group") or train_prompts.group_of(record)
    return not group or is_held_out(str(group))


def gather(
    chosen: Mapping[str, Path],
    tokenizer: Tokenizer,
    compiler: Compiler,
    limit: int,
    max_prompt: int,
    seed: int = 0,
) -> tuple[list[Turn], list[str]]:
    """At most `limit` of each file, taking turns, and what could not be enforced there.

    Only of conversations that are held out when drafters are trained.
    """
    prompts = [
        prompt
        for name, path in chosen.items()
        for prompt in workload.choose(name, path, tokenizer, limit, max_prompt, seed, never_taught)
    ]
    turns, reasons = [], []
    for prompt in workload.alternating(prompts, seed):
        try:
            turns.append(_turn(prompt, tokenizer, compiler))
        except ConstraintError as error:
            turns.append(Turn(prompt))
            reasons.append(f"{prompt.workload} {prompt.id} is answered without a grammar: {error}")
    return turns, reasons


def _turn(prompt: Prompt, tokenizer: Tokenizer, compiler: Compiler) -> Turn:
    if not (prompt.calls and prompt.tools):
        return Turn(prompt)
    constraint = tool_calls(prompt.tools, "required", tokenizer.tool_format, prompt.calls > 1)
    compiler.cursor(constraint).forced()  # what cannot be enforced shows now
    return Turn(prompt, lambda: compiler.cursor(constraint), bound=True)
