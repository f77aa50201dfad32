"""paceline show: a model on this machine, before it is loaded."""

import json
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from paceline import hub
from paceline.cli import completion
from paceline.cli.options import MODEL_HELP, AsJson, EngineOptions, grouped

if TYPE_CHECKING:
    from paceline.config import EngineConfig
    from paceline.target.load import LoadPlan
    from paceline.text import Tokenizer

MIB = 1 << 20
WITHOUT_MODEL = ("nothing", "grammar", "prediction")  # needs of drafters that a request alone can use


@dataclass(frozen=True, slots=True)
class Weights:
    """What the files of a model say."""

    family: str
    parameters: int
    layers: int
    quantisation: str  # as the file is called, else the encoding of most weights
    encodings: dict[str, float]  # share of the parameters
    size: int  # bytes on the disk
    context: int  # tokens


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes that the model takes, and those that are there."""

    weights: int
    cache: int  # as set
    other: int
    free: int | None  # None: not known
    cache_tokens: int  # that the cache holds
    fits: bool | None
    full_context: str  # whether the cache holds a text as long as the model's context


@dataclass(frozen=True, slots=True)
class Chat:
    template: bool
    template_knows_tools: bool
    tool_format: str
    channels: bool  # the model writes channels (harmony): reasoning, calls and the answer


@dataclass(frozen=True, slots=True)
class Head:
    name: str
    kind: str
    shipped: bool  # with paceline


@dataclass(frozen=True, slots=True)
class DraftModel:
    name: str
    same_tokenizer: bool  # else it drafts text, which is encoded again
    trained_here: bool


@dataclass(frozen=True, slots=True)
class Drafters:
    """Those that can draft for the model."""

    built_in: list[str]
    heads: list[Head]
    models: list[DraftModel]


@grouped
def show(
    model: Annotated[str, typer.Argument(help=MODEL_HELP, autocompletion=completion.models)],
    engine: EngineOptions,
    as_json: AsJson = False,
) -> None:
    """Describe a model: its files, the memory it takes here, what runs it, which drafters fit."""
    from paceline.target.load import plan_load
    from paceline.text import Tokenizer

    path, config = hub.resolve(model), engine.config()
    plan, weights, tokenizer = plan_load(path, config), _weights(path), Tokenizer.load(path)
    memory = _memory(plan, config, min(weights.context, config.max_model_len or weights.context))
    chat, drafters = _chat(tokenizer), _drafters(path, tokenizer)
    revision = next((one.revision for one in hub.installed() if one.path == path), "")
    if as_json:
        facts: dict[str, Any] = {"model": model, "path": str(path), "revision": revision, **asdict(weights)}
        facts |= {"engine": plan.engine, "reason": plan.reason, "memory": asdict(memory)}
        print(json.dumps(facts | {"chat": asdict(chat), "drafters": asdict(drafters)}, ensure_ascii=False))
        return
    out = Console(highlight=False, soft_wrap=True)
    for name, line in {
        "model": model,
        "path": str(path),
        **({"revision": revision} if revision else {}),
        "family": f"{weights.family}, {weights.parameters / 1e6:,.0f} million parameters",
        "quantisation": _quantisation(weights),
        "size": f"{weights.size / 1e6:,.0f} MB on the disk",
        "context": f"{weights.context:,} tokens",
        "engine": f"{plan.engine}: {plan.reason}",
        "memory": _memory_line(memory, config),
        "full context": memory.full_context,
        "chat": _chat_line(chat),
        "drafters": ", ".join(drafters.built_in),
        "trained heads": ", ".join(map(_head_line, drafters.heads)) or "none",
        "draft models": ", ".join(map(_draft_model_line, drafters.models)) or "none here",
    }.items():
        out.print(f"{name:<16} {line}", markup=False)


def _weights(path: Path) -> Weights:
    from paceline.hub.repository import quantisation
    from paceline.target.weights.reader import canonical_tensors, open_checkpoint

    checkpoint = open_checkpoint(path)
    tensors = [entry for _, entry in canonical_tensors(checkpoint)]
    counts: Counter[str] = Counter()
    for entry in tensors:
        counts[entry.encoding] += entry.elements
    total, shape = counts.total(), checkpoint.shape
    return Weights(
        family=shape.architecture,
        parameters=total,
        layers=shape.layers,
        quantisation=(quantisation(path.name) if path.is_file() else "") or counts.most_common(1)[0][0],
        encodings={encoding: round(count / total, 4) for encoding, count in counts.most_common()},
        size=hub.bytes_under(path) if path.is_dir() else _file_sizes({entry.file for entry in tensors}),
        context=shape.max_context,
    )


def _file_sizes(files: set[Path]) -> int:
    return sum(file.stat().st_size for file in files)


def _memory(plan: "LoadPlan", config: "EngineConfig", context: int) -> Memory:
    """The bill of `paceline advise`, for one text of the full context."""
    from paceline.advise.memory_estimate import MemoryEstimate

    free = _free_memory(config)
    left = None if free is None else max(0, free - plan.total)
    bill = MemoryEstimate(
        target={"weights": plan.weights, "other": plan.other},
        drafters={},
        cache=plan.cache,
        token=plan.token,
        cache_needed=plan.token * context,
        concurrency=1,
        tokens=context,
        free=left,
    )
    fits = plan.token * context <= plan.cache
    return Memory(
        weights=plan.weights,
        cache=plan.cache,
        other=plan.other,
        free=free,
        cache_tokens=plan.cache // plan.token,
        fits=None if free is None else plan.total <= free,
        full_context=f"one text of {context:,} tokens: {'fits into the cache' if fits else bill.verdict}",
    )


def _free_memory(config: "EngineConfig") -> int | None:
    import torch

    from paceline.limits import available_memory
    from paceline.target.eager.target import placement

    device, _ = placement(config)
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_memory()


def _chat(tokenizer: "Tokenizer") -> Chat:
    from paceline.text.chat_template import TOOL_TEMPLATE, mentions_tools

    templates = tokenizer.templates
    source = templates.get(TOOL_TEMPLATE, templates.get("default", ""))
    knows_tools = bool(source) and mentions_tools(source)
    return Chat(bool(templates), knows_tools, tokenizer.tool_format.name, tokenizer.tool_format.channels)


def _drafters(path: Path, tokenizer: "Tokenizer") -> Drafters:
    from paceline.cli.drafters import trained_rows
    from paceline.drafters import DRAFTERS
    from paceline.heads.local_heads import drafter_path, in_package
    from paceline.loading import model_fingerprint, unusable

    fitting = [row for row in trained_rows(model_fingerprint(path)) if row.suits and not row.problem]
    others = {
        each.name: each.path
        for each in hub.installed()
        if each.pulled and each.path != path and unusable("model", path, draft_model=each.path) is None
    }
    return Drafters(
        built_in=[name for name, info in DRAFTERS.items() if info.needs in WITHOUT_MODEL and name != "none"],
        heads=[
            Head(row.name, row.kind, in_package(drafter_path(row.name)))
            for row in fitting
            if row.kind != "model"
        ],
        models=[DraftModel(row.name, True, True) for row in fitting if row.kind == "model"]
        + [DraftModel(name, _same_tokenizer(other, tokenizer), False) for name, other in others.items()],
    )


def _same_tokenizer(other: Path, tokenizer: "Tokenizer") -> bool:
    from paceline.text import Tokenizer

    return Tokenizer.load(other).fingerprint == tokenizer.fingerprint


def _quantisation(weights: Weights) -> str:
    shares = ", ".join(f"{share:.0%} {name}" for name, share in weights.encodings.items() if share >= 0.005)
    return f"{weights.quantisation} ({shares} of the weights)"


def _memory_line(memory: Memory, config: "EngineConfig") -> str:
    needed = memory.weights + memory.cache + memory.other
    parts = f"weights {memory.weights / MIB:,.0f} + cache {memory.cache / MIB:,.0f}"
    line = (
        f"{parts}{f' + buffers {memory.other / MIB:,.0f}' if memory.other else ''} = {needed / MIB:,.0f} MiB"
    )
    if memory.free is None:
        return line
    line += f" of {memory.free / MIB:,.0f} MiB that are free"
    if memory.fits:
        return f"{line}: fits"
    room = memory.free - needed + memory.cache
    smaller = f"--cache-mb {room // MIB}" if room > 64 * MIB else "a smaller model or quantisation"
    return f"{line}: DOES NOT FIT, use {smaller}"


def _chat_line(chat: Chat) -> str:
    if not chat.template:
        return "no template: plain prompts only"
    if chat.channels:
        return "template of the harmony format: reasoning, calls and the answer are read from its channels"
    tools = (
        "as its template says" if chat.template_knows_tools else "its template knows none, a prompt is added"
    )
    return f"template, tool calls in the format {chat.tool_format} ({tools})"


def _head_line(head: Head) -> str:
    return f"{head.name} ({head.kind}{', shipped with paceline' if head.shipped else ''})"


def _draft_model_line(model: DraftModel) -> str:
    return f"{model.name} ({'same' if model.same_tokenizer else 'another'} tokenizer)"
