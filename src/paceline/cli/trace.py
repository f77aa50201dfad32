"""paceline trace ls, show, export"""

import json
import sys
from collections.abc import Iterable, Sequence
from contextlib import closing
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.errors import StoreError, UsageError

if TYPE_CHECKING:  # other commands start without a database
    from paceline.trace.record import RequestRecord, RoundRecord
    from paceline.trace.store import Store

trace_app = typer.Typer(no_args_is_help=True, help="Requests to the server, round by round.")

REQUEST_HEAD = (
    "id",
    "time",
    "model",
    "route",
    "prompt",
    "output",
    "per pass",
    "accepted",
    "first",
    "all",
    "end",
)
ROUND_HEAD = (
    "round",
    "at",
    "budget",
    "drafted",
    "accepted",
    "tokens",
    "batch",
    "rows",
    "draft",
    "target",
    "by",
)

ENDS = ("stop", "tool_calls", "length", "cancelled", "error", "refused")

StoreUrl = Annotated[
    str | None,
    typer.Option("--store", help="A file, or postgresql://...; else traces.db in paceline's folder."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Machine-readable: one object.")]


@trace_app.command("ls")
def list_requests(
    limit: Annotated[int, typer.Option(min=1, help="Most requests shown, newest first.")] = 20,
    before: Annotated[str | None, typer.Option(help="Only those before this id: the next page.")] = None,
    model: Annotated[str | None, typer.Option(help="Only this model.")] = None,
    route: Annotated[str | None, typer.Option(help="Only this route.")] = None,
    finish: Annotated[str | None, typer.Option(help=f"Only this end: {', '.join(ENDS)}.")] = None,
    as_json: AsJson = False,
    store: StoreUrl = None,
) -> None:
    """The latest requests."""
    if finish is not None and finish not in ENDS:
        raise UsageError(f"--finish {finish!r} is not usable: expected one of {', '.join(ENDS)}")
    with closing(_open(store)) as traces:
        records = traces.list(limit, before, model, route, finish)
    if as_json:
        from paceline.trace.record import write_json

        print(write_json([_summary(record) for record in records]))
        return
    _print_table(REQUEST_HEAD, map(_request_cells, records))


@trace_app.command("show")
def show_request(
    id: Annotated[str, typer.Argument(help="Its id, or the beginning of it.")],
    as_json: AsJson = False,
    store: StoreUrl = None,
) -> None:
    """One request and its rounds."""
    from paceline.trace.record import as_dict, write_json

    with closing(_open(store)) as traces:
        trace = traces.get(id)
    if trace is None:
        raise StoreError(f"there is no request {id!r}; `paceline trace ls` lists them")
    if as_json:
        print(write_json(as_dict(*trace)))
        return
    record, rounds = trace
    for name, value in as_dict(record, ()).items():
        if name != "rounds" and value not in (None, "", {}, ()):
            print(f"{name:<18} {_printable(value)}")
    _print_table(ROUND_HEAD, map(_round_cells, rounds))


@trace_app.command("export")
def export_requests(
    since: Annotated[str | None, typer.Option(help="2026-01-31, or with a time: 2026-01-31T18:00.")] = None,
    file: Annotated[str, typer.Option("--output", "-o", help="- writes to standard output.")] = "-",
    store: StoreUrl = None,
) -> None:
    """Every request with its rounds, one JSON object a line."""
    from paceline.trace.record import write_json

    start = None if since is None else _unix(since)
    with closing(_open(store)) as traces:
        lines = (write_json(request) + "\n" for request in traces.export(start))
        if file == "-":
            sys.stdout.writelines(lines)
            return
        try:
            with open(file, "w", encoding="utf-8") as sink:
                sink.writelines(lines)
        except OSError as error:
            raise UsageError(f"{file} cannot be written: {error.strerror}") from None


def _open(url: str | None) -> "Store":
    from paceline.trace.store import Store

    return Store.open(url, create=False)


def _unix(date: str) -> float:
    try:
        return datetime.fromisoformat(date).timestamp()
    except (ValueError, OverflowError):
        raise UsageError(f"--since {date!r} is no date: expected 2026-01-31 or 2026-01-31T18:00") from None


def _summary(record: "RequestRecord") -> dict[str, Any]:
    from paceline.trace.record import TEXT, as_dict

    return {name: value for name, value in as_dict(record, ()).items() if name not in (*TEXT, "rounds")}


def _request_cells(record: "RequestRecord") -> tuple[str, ...]:
    first = "-" if record.first_token_s is None else f"{record.first_token_s * 1e3:.0f} ms"
    return (
        record.id,
        f"{datetime.fromtimestamp(record.created):%m-%d %H:%M:%S}",
        record.model,
        record.route or "-",
        str(record.prompt_tokens),
        str(record.output_tokens),
        f"{record.tokens_per_pass:.2f}",
        f"{record.accepted}/{record.drafted}",
        first,
        f"{record.seconds:.2f} s",
        record.finish or "-",
    )


def _round_cells(r: "RoundRecord") -> tuple[str, ...]:
    counts = (r.index, r.start, r.budget, r.drafted, r.accepted, r.committed, r.batch, r.rows)
    by = " ".join(f"{name}:{count}" for name, count in r.sources)
    return (*map(str, counts), f"{r.draft_us} µs", f"{r.target_us} µs", by or "-")


def _print_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """As wide as it is: an id that is cut cannot be copied."""
    lines = [head, *([_printable(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def _printable(value: object) -> str:
    """On one line, and nothing in it moves the terminal's cursor."""
    if not isinstance(value, str):
        return _printable(json.dumps(value, ensure_ascii=False))
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in value)
