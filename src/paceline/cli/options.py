"""Option groups that several commands share.

A group is a frozen dataclass; each field is one option. `grouped` lets a command take groups as parameters.
"""

import inspect
import json
import secrets
import sys
from collections.abc import Callable, Sequence
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass
from functools import wraps
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from paceline.cli import completion
from paceline.config import EngineConfig, SamplingParams, SpecConfig
from paceline.errors import ConstraintError, SettingError, UsageError
from paceline.hub import DEFAULT_MODEL

if TYPE_CHECKING:
    from paceline.constraints import Constraint

MODEL_HELP = "A name from `paceline models`, owner/name[:QUANTISATION] of a hub, a folder or a GGUF file."
AsJson = Annotated[bool, typer.Option("--json", help="Print one machine-readable object.")]
Pull = Annotated[bool, typer.Option("--pull", help="Download a model that is not here, without asking.")]
Penalty = Annotated[float, typer.Option(help="-2 to 2, on tokens that the answer already contains; 0: off.")]


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Replaces each parameter that is an option group by the options of the group."""
    hints = get_type_hints(command, include_extras=True)
    groups = {name: hint for name, hint in hints.items() if isinstance(hint, type) and is_dataclass(hint)}
    flat: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        flat += _options(groups[name]) if name in groups else [parameter.replace(annotation=hints[name])]

    @wraps(command)
    def call(**values: Any) -> None:
        made = {
            n: group(**{f.name: values.pop(f.name) for f in fields(group)}) for n, group in groups.items()
        }
        command(**made, **values)

    keyword = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in flat]
    call.__signature__ = inspect.Signature(keyword)  # type: ignore[attr-defined]  # read by typer
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in keyword}
    return call


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """A model by its place or its option. The command line wins over paceline.toml, which has the first."""

    model: Annotated[
        str | None, typer.Argument(help=MODEL_HELP, show_default=False, autocompletion=completion.models)
    ] = None
    model_option: Annotated[
        str | None,
        typer.Option("--model", help="The same as MODEL.", autocompletion=completion.models),
    ] = None

    def name(self, context: typer.Context) -> str:
        return self.given(context) or DEFAULT_MODEL

    def given(self, context: typer.Context) -> str | None:
        if self.model is not None and self.model_option is not None and not in_config_file(context, "model"):
            raise UsageError(f"two models, {self.model} and {self.model_option}: give one, MODEL or --model")
        return self.model_option or self.model


def in_config_file(context: typer.Context, parameter: str) -> bool:
    source = context.get_parameter_source(parameter)
    return source is not None and source.name == "DEFAULT_MAP"


def require_writable(*files: Path | None) -> None:
    """Called before a long run, so that its results are not lost for want of a folder."""
    for file in files:
        if file is None:
            continue
        if file.is_dir():
            raise UsageError(f"{file} is a folder: give the name of a file")
        if not file.absolute().parent.is_dir():
            raise UsageError(f"{file} cannot be written: there is no folder {file.parent}")


def _options(group: type[Any]) -> list[inspect.Parameter]:
    hints, parameters = get_type_hints(group, include_extras=True), []
    for f in fields(group):
        default = inspect.Parameter.empty if f.default is MISSING else f.default
        kind = inspect.Parameter.KEYWORD_ONLY
        parameters.append(inspect.Parameter(f.name, kind, default=default, annotation=hints[f.name]))
    return parameters


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Device and resources of a model."""

    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto"
    dtype: Annotated[
        str,
        typer.Option(
            help="auto, float32, bfloat16, float16, int8, fp8 or gguf.", autocompletion=completion.dtypes
        ),
    ] = "auto"
    threads: Annotated[int, typer.Option(help="CPU threads; 0: all cores.")] = 0
    cache_mb: Annotated[int, typer.Option(help="Memory of the KV cache; a draft model has its own.")] = 1024
    max_model_len: Annotated[
        int, typer.Option(help="Most tokens of a prompt with its answer; 0: the model's context.")
    ] = 0
    deterministic: Annotated[
        bool,
        typer.Option(help="On a GPU, equal bits whatever the batch, not torch's products."),
    ] = True
    max_grammar_s: Annotated[float, typer.Option(help="CPU seconds to compile one constraint.")] = 3.0
    max_grammar_mb: Annotated[int, typer.Option(help="Memory to compile one constraint.")] = 256
    max_fixed_text: Annotated[int, typer.Option(help="Bytes a constraint may prescribe in a row.")] = 8192

    def config(self, **more: Any) -> EngineConfig:
        return EngineConfig(**asdict(self), **more)


CacheDir = Annotated[
    str | None, typer.Option(help="Folder of the KV cache on the disk; default: in paceline's own.")
]
_CACHE_DISK_MB = "Disk space for the KV cache, which then outlives the process; 0: none."


@dataclass(frozen=True, slots=True)
class DiskEngineOptions(EngineOptions):
    """The same, with a KV cache that may be kept on the disk."""

    cache_disk_mb: Annotated[int, typer.Option(help=_CACHE_DISK_MB)] = 0
    cache_dir: CacheDir = None


@dataclass(frozen=True, slots=True)
class ServerEngineOptions(DiskEngineOptions):
    """The same, kept on the disk by default."""

    cache_disk_mb: Annotated[int, typer.Option(help=_CACHE_DISK_MB)] = 2048


@dataclass(frozen=True, slots=True)
class DrafterOptions:
    """The drafters of a model, and what they need."""

    draft_model: Annotated[
        str | None,
        typer.Option(help="A smaller model for the drafter `model`.", autocompletion=completion.models),
    ] = None
    trained: Annotated[
        list[str] | None, typer.Option(help="A trained drafter's name or folder; repeat for several.")
    ] = None
    drafters: Annotated[
        str,
        typer.Option(
            help="Names from `paceline drafters`, or module:Class of your own, in order; auto: the default "
            "list; none: plain.",
            autocompletion=completion.drafters,
        ),
    ] = "auto"

    @property
    def names(self) -> tuple[str, ...] | None:
        """The names in --drafters; None: the default list."""
        if self.drafters == "auto":
            return None
        return tuple(name.strip() for name in self.drafters.split(",") if name.strip())


MaxDraft = Annotated[
    int, typer.Option("--max-draft", "--num-speculative-tokens", help="Most drafted tokens in one pass.")
]


@dataclass(frozen=True, slots=True)
class TemplateOptions:
    """What a model's files say about chats and tool calls, said otherwise."""

    chat_template: Annotated[
        str | None, typer.Option(help="A Jinja template or its file; default: the model's own.")
    ] = None
    tool_format: Annotated[
        str | None,
        typer.Option(
            help="How the model writes tool calls: hermes, llama3, mistral, smollm2 or harmony.",
            autocompletion=completion.tool_formats,
        ),
    ] = None


@dataclass(frozen=True, slots=True)
class SpecOptions:
    """How a request speculates."""

    max_draft: MaxDraft = 8
    tree_width: Annotated[int, typer.Option(help="Most drafted tokens for one position; 1: a chain.")] = 1
    adaptive: Annotated[bool, typer.Option(help="Draft less where it does not pay.")] = True
    accept: Annotated[
        str,
        typer.Option(
            help="match, residual, block, or typical (lossy).", autocompletion=completion.accept_rules
        ),
    ] = "match"

    def config(self, drafters: Sequence[str] = ()) -> SpecConfig:
        return SpecConfig(tuple(drafters), **asdict(self))


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """How the target chooses tokens."""

    max_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.")] = 256
    min_tokens: Annotated[int, typer.Option(help="Fewest tokens of an answer.")] = 0
    temperature: Annotated[float, typer.Option(help="0: greedy.")] = 0.0
    top_k: Annotated[int, typer.Option(help="Sample from the k likeliest tokens; 0 or -1: off.")] = 0
    top_p: Annotated[float, typer.Option(help="Sample from the likeliest tokens of this share; 1: off.")] = (
        1.0
    )
    min_p: Annotated[float, typer.Option(help="Lowest probability, as a share of the highest; 0: off.")] = 0.0
    repetition_penalty: Annotated[
        float, typer.Option(help="On tokens of the prompt and the answer; 1: off.")
    ] = 1.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    seed: Annotated[int | None, typer.Option(help="Same seed, same text. Default: a random one.")] = None
    stop: Annotated[list[str] | None, typer.Option(help="End before this text; repeat for several.")] = None

    def params(self) -> SamplingParams:
        seed = secrets.randbits(32) if self.seed is None else self.seed
        return SamplingParams(**{**asdict(self), "seed": seed, "stop": tuple(self.stop or ())})


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """Tools and constraints: what the answer must look like."""

    tools: Annotated[str | None, typer.Option(help="A file of OpenAI tools; implies --chat.")] = None
    tool_choice: Annotated[str, typer.Option(help="auto, required, none, or a tool's name.")] = "auto"
    schema: Annotated[str | None, typer.Option(help="A file: the answer is JSON of this schema.")] = None
    regex: Annotated[str | None, typer.Option(help="The answer matches this pattern.")] = None
    lark: Annotated[str | None, typer.Option(help="A file: the answer is a text of this grammar.")] = None
    choice: Annotated[
        list[str] | None, typer.Option(help="The answer is one of these; repeat for several.")
    ] = None
    whitespace: Annotated[str, typer.Option(help="In JSON: fixed, compact or flexible.")] = "fixed"

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of `LLM.stream`."""
        constraints = self._constraints()
        if len(constraints) > 1:
            raise UsageError("--schema, --regex, --lark and --choice exclude one another: give one of them")
        return {
            "tools": None if self.tools is None else read_tools(self.tools),
            "tool_choice": self.tool_choice,
            "output": constraints[0] if constraints else None,
            "whitespace": self.whitespace,
        }

    def _constraints(self) -> "list[Constraint]":
        from paceline.constraints import Choice, Json, Lark, Regex

        constraints: list[Constraint] = []
        if self.schema is not None:
            constraints.append(Json.of(read_schema(self.schema), self.whitespace))  # type: ignore[arg-type]  # checked there
        if self.regex is not None:
            constraints.append(Regex(self.regex))
        if self.lark is not None:
            constraints.append(Lark(read_text(self.lark)))
        if self.choice:
            constraints.append(Choice(tuple(self.choice)))
        return constraints


def read_text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise UsageError(f"cannot read {path}: {reason}") from None


def read_json(path: str) -> Any:
    """The data of a file; - is standard input."""
    text = sys.stdin.read() if path == "-" else read_text(path)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        name = "standard input" if path == "-" else path
        raise ConstraintError(f"{name} is not JSON ({error})") from None


def read_schema(path: str) -> Any:
    data = read_json(path)
    if not isinstance(data, dict | bool):
        raise ConstraintError(f"{path} holds no schema: expected an object, true or false")
    return data


def read_tools(path: str) -> list[dict[str, Any]]:
    data = read_json(path)
    tools = data.get("tools", [data]) if isinstance(data, dict) else data
    if not isinstance(tools, list) or not tools:
        raise ConstraintError(
            f'{path} holds no tools: expected a list of {{"type": "function", "function": ...}}'
        )
    return tools


def as_option(error: SettingError, argv: Sequence[str]) -> SettingError:
    """Names the option, --draft-length for draft_length, if it was given."""
    option = f"--{error.setting.replace('_', '-')}"
    options = takewhile(lambda word: word != "--", argv)
    return error.renamed(option) if any(word.partition("=")[0] == option for word in options) else error
