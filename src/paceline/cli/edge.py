"""paceline edge"""

import json
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.options import AsJson, SamplingOptions, grouped
from paceline.errors import SettingError, UsageError, unknown_name

if TYPE_CHECKING:
    from paceline.split.edge import EdgeResult, Vocabulary
    from paceline.types import Drafter

MODES = ("one-shot", "opportunistic", "patient")
DRAFTERS = ("ngram", "suffix", "none")
GREY, PLAIN, CLEAR = "\033[90m", "\033[0m", "\033[J"


@dataclass(frozen=True, slots=True)
class EdgeOptions:
    """What is drafted here, and how the server waits for it."""

    drafter: Annotated[str, typer.Option(help="ngram, suffix, or both in order; none: no drafts.")] = (
        "ngram,suffix"
    )
    mode: Annotated[str, typer.Option(help=f"{', '.join(MODES)}: the server never waits, or a little.")] = (
        "opportunistic"
    )
    wait_ms: Annotated[int, typer.Option(help="Patient: how long the server waits for a draft.")] = 500
    only_edge: Annotated[bool, typer.Option("--only-edge", help="The server drafts nothing itself.")] = False
    history: Annotated[
        Path | None, typer.Option(help="A file in which suffix remembers answers from run to run.")
    ] = None
    api_key: Annotated[str | None, typer.Option(envvar="PACELINE_API_KEY", help="Key of the server.")] = None


@grouped
def edge(
    url: Annotated[str, typer.Argument(help="A server of `paceline serve --split`: http://HOST:PORT.")],
    prompt: Annotated[str, typer.Option(help="Plain text; - reads it from standard input.")],
    options: EdgeOptions,
    sampling: SamplingOptions,
    chat: Annotated[bool, typer.Option("--chat", help="Use the model's chat template.")] = False,
    show: Annotated[
        bool, typer.Option("--show", help="Show drafts in grey before they are verified.")
    ] = False,
    to_json: AsJson = False,
) -> None:
    """Draft here, verify on a server: its text, with fewer passes."""
    import asyncio

    from paceline.split.edge import Edge, EdgeSettings
    from paceline.split.wire import Mode

    if options.mode not in MODES:
        raise SettingError("mode", options.mode, f"one of {', '.join(MODES)}")
    settings = EdgeSettings(Mode(MODES.index(options.mode)), options.wait_ms)
    text = sys.stdin.read() if prompt == "-" else prompt
    drafters = _drafters(options)
    client = Edge(url, list(drafters.values()), settings, options.api_key)
    result = asyncio.run(_run(client, _body(text, chat, options, sampling), drafters, options, show))
    if to_json:
        print(json.dumps(result.as_json(), ensure_ascii=False))
        return
    print("" if show else result.text)
    print(_summary(result), file=sys.stderr)


def _drafters(options: EdgeOptions) -> "dict[str, Drafter]":
    from paceline.drafters.ngram import Ngram
    from paceline.drafters.suffix import Suffix

    names = [name.strip() for name in options.drafter.split(",") if name.strip()]
    if unknown := [name for name in names if name not in DRAFTERS]:
        raise UsageError(unknown_name("drafter of an edge", unknown[0], DRAFTERS))
    made: dict[str, Drafter] = {"ngram": Ngram(), "suffix": Suffix()}
    if options.history is not None and "suffix" not in names:
        raise UsageError("--history is the memory of suffix: name it in --drafter")
    return {name: made[name] for name in names if name != "none"}


def _body(text: str, chat: bool, options: EdgeOptions, sampling: SamplingOptions) -> dict[str, Any]:
    """A request with the parameters of `paceline generate`."""
    prompt = {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}
    params = asdict(replace(sampling, seed=sampling.params().seed))
    only = {"speculative_config": {"drafters": ["mailbox"]}} if options.only_edge else {}
    return {**prompt, **{name: value for name, value in params.items() if value is not None}, **only}


async def _run(
    client: Any, body: dict[str, Any], drafters: Any, options: EdgeOptions, show: bool
) -> "EdgeResult":
    vocabulary = await client.vocabulary()
    history, suffix = options.history, drafters.get("suffix")
    if history is not None and history.exists():
        suffix.load(history, vocabulary.fingerprint.hex())
    result: EdgeResult = await client.generate(body, _Screen(vocabulary).update if show else None)
    if history is not None:
        suffix.save(history, vocabulary.fingerprint.hex())
    return result


class _Screen:
    """Provisional text in grey, which turns solid when it is verified, or goes."""

    def __init__(self, vocabulary: "Vocabulary") -> None:
        self._vocabulary = vocabulary
        self._written = 0  # characters that are solid

    def update(self, committed: tuple[int, ...], provisional: tuple[int, ...]) -> None:
        text = self._vocabulary.text(committed)
        solid = len(text) - 1 if text.endswith("\ufffd") else len(text)  # a character may be incomplete
        ahead = self._vocabulary.text(provisional).partition("\n")[0][:60]  # of one line: it is taken back
        back = f"\033[{len(ahead)}D" if ahead else ""
        sys.stdout.write(f"{CLEAR}{text[self._written : solid]}{GREY}{ahead}{PLAIN}{back}")
        sys.stdout.flush()
        self._written = solid


def _summary(result: "EdgeResult") -> str:
    facts = result.as_json()
    return (
        f"{len(result.token_ids)} tokens in {result.passes} passes · {facts['tokens_per_pass']} per pass · "
        f"{facts['accepted_tokens']} of {facts['drafted_tokens']} drafted tokens accepted · "
        f"{facts['bytes_up_per_token']} bytes up and {facts['bytes_down_per_token']} down per token · "
        f"round trip {facts['rtt_ms']:.1f} ms · seed {facts['seed']}"
    )
