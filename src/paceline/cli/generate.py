"""paceline generate, paceline chat"""

import json
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.models import require_models
from paceline.cli.options import (
    AsJson,
    DiskEngineOptions,
    DrafterOptions,
    ModelChoice,
    OutputOptions,
    Pull,
    SamplingOptions,
    SpecOptions,
    TemplateOptions,
    grouped,
)
from paceline.config import SamplingParams
from paceline.errors import UsageError

if TYPE_CHECKING:
    from paceline.llm import LLM
    from paceline.output import Stream

Show = Annotated[bool, typer.Option("--show", help="Colour each token by the drafter that proposed it.")]


@dataclass(frozen=True, slots=True)
class PromptOptions:
    """The request of `paceline generate`."""

    prompt: Annotated[str, typer.Option(help="Plain text; - reads it from standard input.")]
    chat: Annotated[bool, typer.Option("--chat", help="Use the model's chat template.")] = False
    prediction: Annotated[str, typer.Option(help="A text that the answer may resemble.")] = ""

    def read(self, output: OutputOptions) -> str | list[dict[str, Any]]:
        """Plain text, or chat messages."""
        if self.prompt == "-" and "-" in (output.schema, output.tools):
            raise UsageError("standard input can be read once: give the prompt or the file another way")
        text = sys.stdin.read() if self.prompt == "-" else self.prompt
        return [{"role": "user", "content": text}] if self.chat or output.tools is not None else text


@dataclass(frozen=True, slots=True)
class DisplayOptions:
    """Output of `paceline generate` beside the text."""

    show: Show = False
    compare: Annotated[
        bool,
        typer.Option("--compare", help="Decode again without drafts and say whether the text is the same."),
    ] = False
    svg: Annotated[Path | None, typer.Option(help="Save what is shown as a picture.")] = None
    to_json: AsJson = False


@dataclass(frozen=True, slots=True)
class ChatSampling(SamplingOptions):
    max_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.")] = 512


@grouped
def generate(
    context: typer.Context,
    model: ModelChoice,
    request: PromptOptions,
    drafter: DrafterOptions,
    spec: SpecOptions,
    sampling: SamplingOptions,
    output: OutputOptions,
    display: DisplayOptions,
    engine: DiskEngineOptions,
    template: TemplateOptions,
    pull: Pull = False,
) -> None:
    """Continue a prompt. Without MODEL: smollm2-135m."""
    params, arguments = sampling.params(), output.arguments()
    llm = _load(model.name(context), drafter, spec, engine, template, pull)
    prompt = request.read(output)

    def start(params: SamplingParams, **more: Any) -> "Stream":
        return llm.stream(prompt, params, prediction=request.prediction, **arguments, **more)

    if display.to_json:
        from paceline.output import as_json

        result = start(params).read()
        facts = as_json(result)
        if display.compare:
            plain = start(params, spec=replace(llm.spec, drafters=())).read()
            facts["plain"] = {"identical": plain.token_ids == result.token_ids, "passes": plain.passes}
        print(json.dumps(facts, ensure_ascii=False))
        return
    _write(start, params, llm, display)


@grouped
def chat(
    context: typer.Context,
    model: ModelChoice,
    drafter: DrafterOptions,
    spec: SpecOptions,
    sampling: ChatSampling,
    engine: DiskEngineOptions,
    template: TemplateOptions,
    system: Annotated[str, typer.Option(help="System message.")] = "",
    show: Show = False,
    pull: Pull = False,
) -> None:
    """Talk with a model; without MODEL, smollm2-135m. An empty line or Ctrl-D ends the conversation."""
    from paceline.cli.render import Terminal

    params = sampling.params()
    llm = _load(model.name(context), drafter, spec, engine, template, pull)
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    terminal = Terminal(show)
    while line := _next_line():
        messages.append({"role": "user", "content": line})
        stream = llm.stream(messages, params)
        terminal.write(stream)
        messages.append({"role": "assistant", "content": stream.result.content})
        if sampling.seed is None:
            params = sampling.params()


def _load(
    model: str,
    drafter: DrafterOptions,
    spec: SpecOptions,
    engine: DiskEngineOptions,
    template: TemplateOptions,
    pull: bool,
) -> "LLM":
    config, names = engine.config(), drafter.names
    checked = spec.config(names or ())  # a wrong option fails before torch is imported
    require_models(pull, model, drafter.draft_model)
    from paceline.llm import LLM

    llm = LLM(
        model,
        draft_model=drafter.draft_model,
        trained=drafter.trained or None,
        spec=None if names is None else checked,
        config=config,
        chat_template=template.chat_template,
        tool_format=template.tool_format,
    )
    if names is None:
        llm.spec = replace(checked, drafters=llm.spec.drafters)
    return llm


def _write(
    start: Callable[..., "Stream"], params: SamplingParams, llm: "LLM", display: DisplayOptions
) -> None:
    from paceline.cli.render import Terminal

    terminal = Terminal(display.show)
    stream = start(params)
    terminal.write(stream)
    if display.compare:
        plain = start(params, spec=replace(llm.spec, drafters=())).read()
        terminal.compare(stream.result, plain)
    if display.svg:
        terminal.save_picture(display.svg, _command_line())


def _command_line() -> str:
    """The command as it was typed, without the option that makes the picture."""
    typed = [part for part in sys.argv[1:] if not part.startswith("--svg=")]
    if "--svg" in typed:
        at = typed.index("--svg")
        typed = typed[:at] + typed[at + 2 :]
    return shlex.join(["paceline", *typed])


def _next_line() -> str:
    try:
        return input("> ").strip()
    except EOFError:
        return ""
