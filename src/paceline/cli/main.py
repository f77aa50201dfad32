"""The commands: generate, chat, serve, train, drafters, layers, schema, routes, keys, trace, pull, ..."""

import json
import secrets
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from paceline import __version__, hub
from paceline.cli.doctor import model_report, report
from paceline.cli.drafters import drafters_app
from paceline.cli.keys import keys_app
from paceline.cli.layers import layers
from paceline.cli.options import answer_options
from paceline.cli.render import bar, write
from paceline.cli.routes import routes_app
from paceline.cli.schema import schema_app
from paceline.cli.serve import serve
from paceline.cli.trace import trace_app
from paceline.cli.train import train
from paceline.config import EngineConfig, SamplingParams, SpecConfig
from paceline.errors import PacelineError, UsageError

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)
app.add_typer(schema_app, name="schema")
app.add_typer(routes_app, name="routes")
app.add_typer(keys_app, name="keys")
app.add_typer(trace_app, name="trace")
app.add_typer(drafters_app, name="drafters")
app.command()(serve)
app.command()(train)
app.command()(layers)
out = Console(highlight=False, soft_wrap=True)

Model = Annotated[str, typer.Option(help="A name from `paceline models`, a folder or a GGUF file.")]
DraftModel = Annotated[str | None, typer.Option(help="A smaller model for the drafter `model`.")]
Drafters = Annotated[
    str, typer.Option(help="Names from `paceline drafters`, asked in this order; none: plain.")
]
TrainedNames = Annotated[
    list[str] | None, typer.Option("--trained", help="A trained drafter's name or folder; give several.")
]
MaxDraft = Annotated[int, typer.Option(help="Most guesses in one pass.")]
TreeWidth = Annotated[int, typer.Option(help="Most guesses for one position.")]
Adaptive = Annotated[bool, typer.Option(help="Let the controller guess less where it does not pay.")]
Accept = Annotated[str, typer.Option(help="match, residual, block, or typical (lossy).")]
MaxTokens = Annotated[int, typer.Option(help="Most tokens of an answer.")]
Temperature = Annotated[float, typer.Option(help="0: greedy.")]
TopK = Annotated[int, typer.Option(help="0: off.")]
TopP = Annotated[float, typer.Option(help="Choose among the likeliest tokens that have this share; 1: off.")]
MinP = Annotated[float, typer.Option(help="Least probability, as a share of the likeliest token's.")]
Penalty = Annotated[float, typer.Option(help="-2 to 2, on tokens the answer holds already; 0: off.")]
Seed = Annotated[int | None, typer.Option(help="Same seed, same text. Without one, a seed is drawn.")]
Stop = Annotated[list[str] | None, typer.Option(help="End before this text; may be given several times.")]
Show = Annotated[bool, typer.Option("--show", help="Colour each token by who guessed it.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda.")]
Threads = Annotated[int, typer.Option(help="CPU threads; 0: all cores.")]
CacheMb = Annotated[int, typer.Option(help="Memory for the KV cache; draft models have their own.")]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16, float16.")]


def _version(wanted: bool) -> None:
    if wanted:
        print(f"paceline {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True)] = False,
) -> None:
    """Faster agents, word for word."""


@app.command()
def generate(
    prompt: Annotated[str, typer.Option(help="Plain text; - reads it from standard input.")],
    model: Model = hub.DEFAULT_MODEL,
    draft_model: DraftModel = None,
    trained: TrainedNames = None,
    drafters: Drafters = "auto",
    max_draft: MaxDraft = 8,
    tree_width: TreeWidth = 1,
    adaptive: Adaptive = True,
    accept: Accept = "match",
    max_tokens: MaxTokens = 256,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="On tokens of prompt and answer; 1: off.")] = 1.0,
    presence_penalty: Penalty = 0.0,
    frequency_penalty: Penalty = 0.0,
    seed: Seed = None,
    stop: Stop = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Wrap the prompt in the model's chat template.")
    ] = False,
    prediction: Annotated[str, typer.Option(help="Text the answer may resemble; drafters: prediction.")] = "",
    tools: Annotated[str | None, typer.Option(help="A file of OpenAI tools; implies --chat.")] = None,
    tool_choice: Annotated[str, typer.Option(help="auto, required, none, or a tool's name.")] = "auto",
    schema: Annotated[str | None, typer.Option(help="A file: answer with JSON of this schema.")] = None,
    regex: Annotated[str | None, typer.Option(help="Answer with what this pattern matches.")] = None,
    lark: Annotated[str | None, typer.Option(help="A file: answer with a text of this grammar.")] = None,
    choice: Annotated[list[str] | None, typer.Option(help="Answer with one of these; give several.")] = None,
    whitespace: Annotated[str, typer.Option(help="In JSON: fixed, compact or flexible.")] = "fixed",
    show: Show = False,
    to_json: Annotated[bool, typer.Option("--json", help="Print one machine-readable object.")] = False,
    device: Device = "auto",
    dtype: Dtype = "auto",
    threads: Threads = 0,
    cache_mb: CacheMb = 1024,
) -> None:
    """Write what follows a prompt."""
    params = SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        seed=secrets.randbits(32) if seed is None else seed,
        max_tokens=max_tokens,
        stop=tuple(stop or ()),
    )
    spec = SpecConfig((), max_draft, tree_width, adaptive, accept)  # type: ignore[arg-type]  # checked there
    config = EngineConfig(device=device, dtype=dtype, threads=threads, cache_mb=cache_mb)
    heads = _heads(trained, drafters, model, config)
    spec = replace(spec, drafters=_names(drafters, draft_model, heads, prediction))
    if prompt == "-" and "-" in (schema, tools):
        raise UsageError("standard input can be read once: give the prompt or the file another way")
    text = sys.stdin.read() if prompt == "-" else prompt
    wanted = answer_options(tools, tool_choice, schema, regex, lark, choice or (), whitespace)  # type: ignore[arg-type]  # checked there
    from paceline.llm import LLM
    from paceline.output import as_json

    llm = LLM(model, draft_model=draft_model, trained=heads, spec=spec, config=config)
    messages = [{"role": "user", "content": text}]
    chatting = chat or tools is not None
    stream = llm.stream(messages if chatting else text, params, prediction=prediction, **wanted)
    if to_json:
        print(json.dumps(as_json(stream.read()), ensure_ascii=False))
    else:
        write(stream, show)


@app.command()
def chat(
    model: Model = hub.DEFAULT_MODEL,
    draft_model: DraftModel = None,
    trained: TrainedNames = None,
    drafters: Drafters = "auto",
    max_tokens: MaxTokens = 512,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    seed: Seed = None,
    system: Annotated[str, typer.Option(help="System message.")] = "",
    show: Show = False,
    device: Device = "auto",
    dtype: Dtype = "auto",
    threads: Threads = 0,
    cache_mb: CacheMb = 1024,
) -> None:
    """Talk with a model. An empty line or Ctrl-D ends it."""
    options: dict[str, Any] = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p}
    SamplingParams(**options)
    config = EngineConfig(device=device, dtype=dtype, threads=threads, cache_mb=cache_mb)
    heads = _heads(trained, drafters, model, config)
    spec = SpecConfig(_names(drafters, draft_model, heads))
    from paceline.llm import LLM

    llm = LLM(model, draft_model=draft_model, trained=heads, spec=spec, config=config)
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    while line := _ask():
        messages.append({"role": "user", "content": line})
        stream = llm.stream(messages, seed=seed, **options)
        write(stream, show)
        messages.append({"role": "assistant", "content": stream.result.text})


@app.command()
def pull(
    name: Annotated[str, typer.Argument(help="A name from `paceline models`, or owner/name on a hub.")],
) -> None:
    """Download a model, check it, keep it."""
    with bar() as progress:
        path = hub.pull(name, progress)
    out.print(f"{name} is at {path}")


@app.command("models")
def list_models(as_json: Annotated[bool, typer.Option("--json")] = False) -> None:
    """What can be pulled, and what has been."""
    found = hub.installed()
    if as_json:
        print(json.dumps([{**asdict(m), "path": str(m.path)} for m in found]))
        return
    table = Table("name", "size", "licence", "pulled")
    for m in found:
        table.add_row(m.name, f"{m.size / 1e6:,.0f} MB", m.licence, "yes" if m.pulled else "no")
    out.print(table)


@app.command()
def doctor(
    model: Annotated[str | None, typer.Option(help="Also say how this model runs and what it costs.")] = None,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """What this machine is and how paceline will use it."""
    facts = report() | (model_report(model) if model else {})
    if as_json:
        print(json.dumps(facts))
        return
    for name, value in facts.items():
        if name == "cost_curve":  # shown for every context instead
            continue
        if isinstance(value, dict):
            for context, row in value.items():
                shown = ", ".join(f"{rows} rows {ms} ms" for rows, ms in row.items())
                out.print(f"{'cost of a pass':<16} after {context} tokens: {shown}")
        else:
            out.print(f"{name:<16} {value}")


def main(argv: Sequence[str] | None = None) -> None:
    """Runs a command. Errors of ours become one line and exit code 2."""
    try:
        app(args=None if argv is None else list(argv), prog_name="paceline")
    except PacelineError as error:
        Console(stderr=True, highlight=False, soft_wrap=True).print(f"paceline: {error}", markup=False)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


def _heads(trained: Sequence[str] | None, drafters: str, model: str, config: EngineConfig) -> Sequence[str]:
    """Those given, or else the usual ones; none where the drafters were named without."""
    if trained or drafters != "auto":
        return trained or ()
    from paceline.loading import usual

    return usual(hub.resolve(model), config)


def _names(
    drafters: str, draft_model: str | None, trained: Sequence[str], prediction: str = ""
) -> tuple[str, ...]:
    if drafters != "auto":
        return tuple(name.strip() for name in drafters.split(",") if name.strip())
    first, last = ("prediction",) if prediction else (), ("model",) if draft_model else ()
    return (*first, *SpecConfig().drafters, *_kinds(trained), *last)


def _kinds(trained: Sequence[str]) -> list[str]:
    if not trained:
        return []
    from paceline.loading import find_trained

    return [one.kind for one in find_trained(trained)]


def _ask() -> str:
    try:
        return input("> ").strip()
    except EOFError:
        return ""
