"""paceline edge"""

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.options import AsJson, SamplingOptions, grouped
from paceline.errors import SettingError, UsageError, unknown_name

if TYPE_CHECKING:
    from paceline.split.edge import EdgeResult, EdgeSettings, Vocabulary
    from paceline.types import Drafter

MODES = ("one-shot", "opportunistic", "patient")
DRAFTERS = ("suffix", "ngram", "model", "none")
MODEL_CACHE_MB = 256
GREY, PLAIN, CLEAR = "\033[90m", "\033[0m", "\033[J"


@dataclass(frozen=True, slots=True)
class EdgeOptions:
    """What is drafted here, and how the server waits for it."""

    drafter: Annotated[
        str, typer.Option(help="suffix, ngram, model, or several in order; none: no drafts.")
    ] = "suffix,ngram"
    draft_model: Annotated[
        str | None, typer.Option(help="For the drafter model: a small model with the server's vocabulary.")
    ] = None
    mode: Annotated[str, typer.Option(help=f"{', '.join(MODES)}: the server never waits, or a little.")] = (
        "opportunistic"
    )
    wait_ms: Annotated[int, typer.Option(help="Patient: how long the server waits for a draft.")] = 2000
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

    from paceline.split.edge import EdgeSettings
    from paceline.split.wire import Mode

    if options.mode not in MODES:
        raise SettingError("mode", options.mode, f"one of {', '.join(MODES)}")
    settings = EdgeSettings(Mode(MODES.index(options.mode)), options.wait_ms)
    _check(options)
    text = sys.stdin.read() if prompt == "-" else prompt
    result = asyncio.run(_run(url, _body(text, chat, options, sampling), settings, options, show))
    if to_json:
        print(json.dumps(result.as_json(), ensure_ascii=False))
        return
    print("" if show else result.text)
    print(_summary(result), file=sys.stderr)


def _names(options: EdgeOptions) -> list[str]:
    return [name for part in options.drafter.split(",") if (name := part.strip())]


def _check(options: EdgeOptions) -> None:
    names = _names(options)
    if unknown := [name for name in names if name not in DRAFTERS]:
        raise UsageError(unknown_name("drafter of an edge", unknown[0], DRAFTERS))
    if options.history is not None and "suffix" not in names:
        raise UsageError("--history is the memory of suffix: name it in --drafter")
    if ("model" in names) != (options.draft_model is not None):
        raise UsageError("--drafter model and --draft-model NAME belong together")


async def _run(
    url: str, body: dict[str, Any], settings: "EdgeSettings", options: EdgeOptions, show: bool
) -> "EdgeResult":
    from paceline.drafters.ngram import Ngram
    from paceline.drafters.suffix import Suffix
    from paceline.split.edge import Edge

    vocabulary = await Edge(url, [], api_key=options.api_key).vocabulary()
    history, identity, suffix = options.history, vocabulary.fingerprint.hex(), Suffix()
    if history is not None and history.exists():
        suffix.load(history, identity)
    made: dict[str, Callable[[], Drafter]] = {
        "suffix": lambda: suffix,
        "ngram": Ngram,
        "model": lambda: _model_drafter(str(options.draft_model), vocabulary),
    }
    drafters = [made[name]() for name in _names(options) if name in made]
    client = Edge(url, drafters, settings, options.api_key, vocabulary)
    result = await client.generate(body, _Screen(vocabulary).update if show else None)
    if history is not None:
        suffix.save(history, identity)
    return result


def _model_drafter(name: str, vocabulary: "Vocabulary") -> "Drafter":
    """Reads all of a prompt before its first draft: there is nobody else to serve here."""
    from paceline.config import EngineConfig
    from paceline.drafters.draft_model import ModelDrafter
    from paceline.loading import draft_model_path
    from paceline.split.wire import fingerprint
    from paceline.target.load import load_draft
    from paceline.text import Tokenizer

    path = draft_model_path(name)
    tokenizer = Tokenizer.load(path)
    if fingerprint(map(tokenizer.piece, range(tokenizer.vocab_size))) != vocabulary.fingerprint:
        raise UsageError(
            f"{name} has another vocabulary than the server's model: its drafts mean nothing there"
        )
    model = load_draft(path, EngineConfig(cache_mb=MODEL_CACHE_MB))
    return ModelDrafter(model, len(vocabulary.pieces), prefill_chunk=model.max_context)


def _body(text: str, chat: bool, options: EdgeOptions, sampling: SamplingOptions) -> dict[str, Any]:
    """A request with the parameters of `paceline generate`."""
    prompt = {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}
    params = asdict(replace(sampling, seed=sampling.params().seed))
    only = {"speculative_config": {"drafters": ["mailbox"]}} if options.only_edge else {}
    return {**prompt, **{name: value for name, value in params.items() if value is not None}, **only}


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
