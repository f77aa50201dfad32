"""paceline advise: what speculation would bring to recorded traffic, route by route."""

import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.console import Console
from rich.table import Column, Table

from paceline.cli import completion
from paceline.cli.options import MODEL_HELP, EngineOptions, grouped, require_writable
from paceline.config import require_min, require_positive
from paceline.errors import SettingError, UsageError

if TYPE_CHECKING:
    from paceline.advise.advice import FittedDrafter, TrainingGain
    from paceline.advise.engine_flags import EngineFlags
    from paceline.advise.report import Advice, Training
    from paceline.advise.traffic import Traffic
    from paceline.llm import LLM

HELD_OUT: Final = 0.3  # of the conversations, that a drafter is not fitted on


@dataclass(frozen=True, slots=True)
class TrafficOptions:
    """The recorded traffic, and the model it is for."""

    target: Annotated[str, typer.Option(help=MODEL_HELP, autocompletion=completion.models)]
    traces: Annotated[
        list[Path] | None,
        typer.Option(help="Conversations, or a `paceline trace export`: .jsonl or .jsonl.gz; repeat it."),
    ] = None
    store: Annotated[
        str | None, typer.Option(help="A trace store: a file, or postgresql://...; instead of --traces.")
    ] = None
    single_user: Annotated[
        bool, typer.Option(help="As in `paceline serve`: recorded requests that name nobody are one user's.")
    ] = False

    @property
    def sources(self) -> tuple[str | Path, ...]:
        return tuple(self.traces or ()) or (str(self.store),)

    def read(self) -> "Traffic":
        from paceline.advise.traffic import from_files, from_store
        from paceline.web.api_keys import tenant

        if bool(self.traces) == (self.store is not None):
            raise UsageError("give either --traces FILE, or --store URL")
        if self.store is not None:
            found = from_store(self.store, classify)
        else:
            found = from_files(self.traces or [], classify)
        return found if self.single_user else found.with_strangers(tenant(None, None))


@dataclass(frozen=True, slots=True)
class CandidateOptions:
    """Drafters to compare with the default list, which they join."""

    draft_model: Annotated[str | None, typer.Option(help="A smaller model for the drafter `model`.")] = None
    trained: Annotated[
        list[str] | None,
        typer.Option(help="A trained drafter's name or folder; default: all that are here for this model."),
    ] = None


@dataclass(frozen=True, slots=True)
class EffortOptions:
    """How much is answered and replayed."""

    requests: Annotated[int, typer.Option(help="Of each route, at most.")] = 96
    max_tokens: Annotated[int, typer.Option(help="Of an answer that is written now.")] = 256
    minutes: Annotated[float, typer.Option(help="For writing answers, all routes together.")] = 10.0
    concurrency: Annotated[int, typer.Option(help="Outputs at once to plan for; 0: as recorded.")] = 0
    fit_minutes: Annotated[
        float, typer.Option(help="For fitting a drafter on part of the traffic; 0: none is fitted.")
    ] = 0.0
    seed: Annotated[int, typer.Option(help="Of the sample and the intervals.")] = 0

    def check(self) -> None:
        require_positive(self, "minutes")
        require_min(self, fit_minutes=0)


@dataclass(frozen=True, slots=True)
class ReportOptions:
    """Files to write."""

    html: Annotated[Path | None, typer.Option(help="The report as a page, in one file.")] = None
    routes: Annotated[
        Path | None,
        typer.Option(help="A routes file for the server. Routes that it has keep their match and limits."),
    ] = None
    json_file: Annotated[
        str | None, typer.Option("--json", help="All figures as one object; - prints it.")
    ] = None

    def check(self) -> None:
        figures = None if self.json_file in (None, "-") else Path(str(self.json_file))
        require_writable(self.html, self.routes, figures)


def classify(body: Mapping[str, Any]) -> str:
    """The class of a prompt, as routes have it."""
    from paceline.server.routes import RouteRequest

    return RouteRequest.of_body("", {}, body).prompt


@grouped
def advise(
    traffic: TrafficOptions,
    effort: EffortOptions,
    reports: ReportOptions,
    drafter: CandidateOptions,
    engine: EngineOptions,
) -> None:
    """Say per route of recorded traffic whether to speculate, with what, and what to expect."""
    reports.check()
    effort.check()
    existing = _existing(reports.routes)
    with TemporaryDirectory() as folder:
        advice = _advice(traffic, effort, drafter, engine, Path(folder, "fit"))
    if reports.html is not None:
        from paceline.advise.report import html

        reports.html.write_text(html(advice), "utf-8")
    if reports.routes is not None:
        reports.routes.write_text(advice.routes_file(existing), "utf-8")
    if reports.json_file == "-":
        print(json.dumps(advice.as_dict()))
        return
    if reports.json_file is not None:
        Path(reports.json_file).write_text(json.dumps(advice.as_dict(), indent=1) + "\n", "utf-8")
    _print(advice)
    if reports.routes is not None:
        nothing = f"there is nothing to set: {reports.routes} has no routes, for lack of data"
        print(f"{advice.serve_command} {reports.routes}" if advice.decides or existing else nothing)


def _existing(path: Path | None) -> Mapping[str, Any] | None:
    """A routes file that is there already must be usable, before any time is spent."""
    if path is None or not path.exists():
        return None
    from paceline.server.routes import RouteError, load
    from paceline.web.config_file import read

    load(path)
    data: Mapping[str, Any] = read(path, RouteError)
    return data


def _advice(
    traffic: TrafficOptions,
    effort: EffortOptions,
    drafter: CandidateOptions,
    engine: EngineOptions,
    folder: Path,
) -> "Advice":
    """folder: for a drafter that is fitted and not kept."""
    from paceline.advise.advice import AdviceConfig, Engine, advise_routes
    from paceline.advise.memory_estimate import memory_estimate
    from paceline.advise.report import Advice, cost_table
    from paceline.advise.target_outputs import OutputLimits
    from paceline.config import SpecConfig
    from paceline.drafters import model_free
    from paceline.engine.control import Fixed, Rate
    from paceline.heads.head_checkpoint import read_card
    from paceline.llm import LLM
    from paceline.target.cost import confirmed_cost_table

    recorded = traffic.read()
    recorded.require_requests(", ".join(map(str, traffic.traces or ())) or "the store")
    limits = OutputLimits(effort.max_tokens, seconds=60 * effort.minutes)
    config = AdviceConfig(effort.requests, effort.concurrency, effort.seed, limits=limits)
    training = _fitted(traffic, effort, folder)
    llm = LLM(
        traffic.target,
        draft_model=drafter.draft_model,
        trained=drafter.trained or _fitting_heads(traffic.target) or None,
        spec=SpecConfig(),
        config=engine.config(),
    )
    if not llm.cost:
        raise SettingError("cache_mb", engine.cache_mb, "more: no pass could be measured in so little")
    cost, quiet = confirmed_cost_table(llm.target, llm.cost)
    weighty = {name: made for name, made in llm.drafters.items() if name not in model_free()}
    fitted = None if training is None else _fitted_drafter(llm, traffic, folder, engine)
    advisor = Engine(llm, lambda: Rate(cost), Fixed, cost, classify, weighty, fitted)
    routes = advise_routes(advisor, recorded, config, _show_progress)
    bill = memory_estimate(
        llm.target,
        llm.target.memory(),
        _drafter_bytes(llm, drafter.draft_model, engine.cache_mb),
        engine.cache_mb,
        routes,
        _free(llm.target.describe()),
    )
    return Advice(
        target=Path(traffic.target).stem if traffic.target.endswith(".gguf") else traffic.target,
        machine=_machine(llm),
        routes=tuple(routes),
        memory=bill,
        costs=cost_table(cost),
        busy=not quiet,
        rejected=recorded.rejected,
        training=training,
        draft_model=drafter.draft_model,
        single_user=traffic.single_user,
        heads={kind: name for name, kind in llm.trained.items()},
        head_lengths={head.kind: read_card(head.version.folder).shape.block for head in llm.heads},
    )


def _machine(llm: "LLM") -> dict[str, str]:
    from paceline import __version__
    from paceline.target.hardware import describe

    facts = describe()
    return {
        "paceline": __version__,
        "engine": llm.target.describe(),
        **{name: str(facts[name]) for name in ("cpu", "cores", "gpu")},
    }


def _fitting_heads(target: str) -> list[str]:
    """Trained drafters that are here and made for this model, one of each kind."""
    from paceline import hub
    from paceline.errors import PacelineError
    from paceline.heads.head_checkpoint import read_card
    from paceline.heads.local_heads import available_heads
    from paceline.loading import model_fingerprint

    own, found = model_fingerprint(hub.resolve(target)), dict[str, str]()
    for folder in available_heads():
        try:
            card = read_card(folder)
        except PacelineError:
            continue
        if card.fingerprint == own:
            found.setdefault(card.kind, folder.name)
    return list(found.values())


def _drafter_bytes(llm: "LLM", draft_model: str | None, cache_mb: int) -> dict[str, int]:
    """Of the weights on disk, which is about what they take in memory, and of a draft model's own cache."""
    from paceline.loading import draft_model_path, weight_bytes

    found = {
        head.kind: sum(file.stat().st_size for file in head.version.folder.glob("*.safetensors"))
        for head in llm.heads
    }
    if draft_model is not None:
        found["model"] = weight_bytes(draft_model_path(draft_model))
        found["model, its KV cache as set"] = cache_mb << 20
    return found


def _free(described: str) -> int | None:
    import torch

    from paceline.limits import available_memory

    if "cuda" in described and torch.cuda.is_available():
        return int(torch.cuda.mem_get_info()[0])
    return available_memory()


def _fitted(traffic: TrafficOptions, effort: EffortOptions, folder: Path) -> "Training | None":
    """A drafter of kind block, which continues one that fits the model if there is one."""
    if not effort.fit_minutes:
        return None
    from paceline.advise.report import Training
    from paceline.heads.local_heads import drafter_path
    from paceline.train.data.answer_plan import AnswersConfig
    from paceline.train.data.rollout import Rollout
    from paceline.train.head_pipeline import TrainJob, run
    from paceline.train.recipe import TrainConfig

    start = next((name for name in _fitting_heads(traffic.target)), None)
    answers = AnswersConfig(
        max_prompt=1536,
        max_prompts=4 * effort.requests,
        held_out=HELD_OUT,
        rollout=Rollout(max_new=effort.max_tokens),
    )
    schedule = TrainConfig(
        minutes=effort.fit_minutes, seed=effort.seed, tokens_per_batch=2048, anchors=32, eval_steps=1000
    )
    begin = drafter_path(start) if start else None
    job = TrainJob(traffic.target, traffic.sources, folder, begin, answers, schedule)
    card = run(job, lambda p: _show_progress(f"fit: {p.stage}", int(p.done), int(p.total)))
    before = card.data.get("before")
    return Training(
        card.kind,
        effort.fit_minutes,
        int(card.data["answers"]),
        int(card.data["measured_answers"]),
        card.tokens_per_pass[-1] if card.tokens_per_pass else 0.0,
        before["tokens_per_pass"][-1] if before else None,
    )


def _fitted_drafter(
    llm: "LLM", traffic: TrafficOptions, folder: Path, engine: EngineOptions
) -> "FittedDrafter":
    """On the backend that would serve it, with the conversations that it has seen."""
    from paceline import hub
    from paceline.advise.advice import FittedDrafter
    from paceline.loading import find_heads, head_drafters, read_heads
    from paceline.train.data.conversations import read
    from paceline.train.data.held_out import held_out

    stored = read_heads(find_heads(folder), hub.resolve(traffic.target))
    (drafter,) = head_drafters(llm.target, stored, engine.config())
    recorded = list(read(traffic.sources, Counter()))
    kept_back = held_out(recorded, HELD_OUT)
    seen = frozenset(one.opening for one, out in zip(recorded, kept_back, strict=True) if not out)
    return FittedDrafter(drafter, seen)


def _show_progress(what: str, done: int, total: int) -> None:
    if sys.stderr.isatty():
        end = "\n" if done == total else ""
        print(f"\r\033[K{what}: {done} of {total}", end=end, file=sys.stderr, flush=True)


def _print(advice: "Advice") -> None:
    from paceline.advise.report import NOT_REPLAYED, counted

    out = Console(highlight=False, soft_wrap=True)
    table = Table(
        Column("route", overflow="fold"),
        "advice",
        "tokens per pass",
        "decoding",
        "turns",
        "drafters",
        "length",
    )
    for one in advice.routes:
        rate = one.best.tokens_per_pass
        table.add_row(
            one.route,
            one.decision,
            f"{rate.value:.2f} ({rate.low:.2f} to {rate.high:.2f})",
            f"{one.best.speedup.value:.2f} x",
            f"{one.best.turn_speedup.value:.2f} x",
            ", ".join(one.best.drafters) if one.enabled else "",
            str(one.best.max_draft) if one.enabled else "",
        )
    out.print(table)
    for one in advice.routes:
        out.print(f"{one.route}: {one.reason}", markup=False)
        if one.decision == "too little data":
            sample = f"{counted(one.outputs, 'output')} of {counted(one.replayed, 'conversation')}"
            out.print(f"  from {sample}: give it more traffic, --requests and --minutes", markup=False)
        if one.training is not None:
            out.print(f"  {_training_gain(one.training)}", markup=False)
    out.print(f"{NOT_REPLAYED[0].upper()}{NOT_REPLAYED[1:]}.", markup=False)
    if advice.busy:
        out.print(
            "No two measurements of a pass agreed, or other processes ran beside them: "
            "speed-ups are provisional."
        )
    out.print(f"Memory: {advice.memory.verdict}.", markup=False)
    if (fit := advice.training) is not None:
        before = "" if fit.before is None else f", {fit.before:.2f} before"
        gain = f"{fit.tokens_per_pass:.2f} tokens per pass{before}"
        reached = gain if fit.measured_answers else "too little traffic to measure it on"
        out.print(f"A drafter fitted for {fit.minutes:g} minutes: {reached}.")
    _print_flags(out, list(advice.flags.items()))


def _training_gain(found: "TrainingGain") -> str:
    from paceline.advise.advice import MIN_CONVERSATIONS
    from paceline.advise.report import counted

    speedup, gain = found.speedup, found.gain
    sample = f"{counted(found.outputs, 'output')} of {counted(found.conversations, 'conversation')}"
    few = ": too few for intervals to mean much" if found.conversations < MIN_CONVERSATIONS else ""
    return (
        f"with a drafter fitted on part of it, decoding is {speedup.value:.2f} x plain and "
        f"{gain.value:.2f} x ({gain.low:.2f} to {gain.high:.2f}) the best list, "
        f"on {sample} that it was not fitted on{few}"
    )


def _print_flags(out: Console, flags: Sequence[tuple[str, Mapping[str, "EngineFlags"]]]) -> None:
    for route, engines in flags:
        for engine, given in engines.items():
            if given.words:
                out.print(f"{route}, {engine}: {given.text}", markup=False)
            for note in given.notes:
                out.print(f"  {note}", markup=False)
