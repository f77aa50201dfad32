"""The drafters of a soak's pairs: which lists take turns, and the options of a server that has them all.

A head that the package does not ship is trained for some seconds: its drafts are poor, but some are accepted.
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final

from bench.peers.child import ROOT
from bench.serve import servers
from bench.serve.http_client import get
from paceline import SpecConfig, hub
from paceline.drafters import TARGET_DRAFTERS
from paceline.errors import UsageError, unknown_name
from paceline.heads.head_checkpoint import read_card
from paceline.heads.registry import HEAD_TYPES
from paceline.loading import find_heads, model_fingerprint, unusable

DEFAULT: Final = SpecConfig().drafters
ALONE: Final = ("ngram", "suffix", "recycle", "model", "self", "quantized", *HEAD_TYPES)
CACHING: Final = tuple((name,) for name in ("model", "quantized", *HEAD_TYPES))  # have rows of their own
SHIPPED: Final = {"block": "smollm2-135m-block"}
TRAINING: Final = ("--prompts", "24", "--max-new", "64", "--max-prompt", "600", "--draft-vocab", "2048")
CONVERSATIONS: Final = tuple(
    str(ROOT / "bench" / "workloads" / f"{name}.jsonl") for name in ("agent", "chat")
)
List = tuple[str, ...]


def all_lists(model: str) -> list[List]:
    """Each drafter that can work for the model alone, and with those of the default list."""
    path = hub.resolve(model)
    able = [name for name in ALONE if name not in TARGET_DRAFTERS or unusable(name, path) is None]
    extra = [name for name in able if name not in DEFAULT]
    return [DEFAULT, *((name,) for name in able), *((*DEFAULT, name) for name in extra)]


def read_lists(text: str) -> list[List]:
    """`self,default+block`: two lists."""
    known = {*DEFAULT, *ALONE, "prediction"}
    lists = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        names = [name for word in part.split("+") for name in (DEFAULT if word == "default" else (word,))]
        for name in names:
            if name not in known:
                raise UsageError(unknown_name("drafter", name, sorted({*known, "default"})))
        lists.append(tuple(names))
    return lists


def trained_heads(
    model: str, lists: Iterable[List], folder: Path, seconds: float, say: Callable[[str], None]
) -> list[str]:
    """A head of each kind that the lists name: shipped, in the folder already, or trained into it."""
    heads, path = [], hub.resolve(model)
    for kind in HEAD_TYPES:
        if not any(kind in names for names in lists):
            continue
        if (shipped := SHIPPED.get(kind)) and _fits(shipped, path):
            heads.append(shipped)
            continue
        out = folder / kind
        if not (out / "drafter.json").is_file():
            say(f"training a drafter of kind {kind} for {seconds:.0f} s")
            _train(model, kind, out, seconds)
        heads.append(str(out))
    return heads


def _fits(head: str, model: Path) -> bool:
    (found,) = find_heads([head])
    return read_card(found.version.folder).fingerprint == model_fingerprint(model)


def _train(model: str, kind: str, out: Path, seconds: float) -> None:
    command = [
        sys.executable,
        "-m",
        "paceline",
        "train",
        "--target",
        model,
        "--kind",
        kind,
        "--out",
        str(out),
    ]
    traces = [word for file in CONVERSATIONS for word in ("--traces", file)]
    command += [*traces, *TRAINING, "--minutes", str(seconds / 60)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    if not (out / "drafter.json").is_file():
        raise RuntimeError(f"no drafter of kind {kind} was trained: {done.stderr[-300:]}")


def server_options(model: str, lists: Sequence[List], heads: Sequence[str], draft_model: str) -> list[str]:
    """Of a server whose requests may name all of the lists."""
    named = {name for names in lists for name in names}
    options = [word for head in heads for word in ("--trained", head)]
    if "model" in named:
        options += ["--draft-model", draft_model or model]
    loaded = [*DEFAULT, *(name for name in TARGET_DRAFTERS if name in named)]
    return [*options, "--drafters", ",".join(loaded)]


def accepted(port: int) -> dict[str, tuple[int, int]]:
    """Tokens drafted and accepted by each drafter since the server started."""
    counts: dict[str, list[int]] = {}
    for line in get(port, "/metrics")[1].splitlines():
        for i, name in enumerate(("paceline_drafted_total{", "paceline_accepted_total{")):
            if line.startswith(name):
                drafter = line.partition('drafter="')[2].partition('"')[0]
                counts.setdefault(drafter, [0, 0])[i] += int(float(line.rpartition(" ")[2]))
    return {drafter: (drafted, taken) for drafter, (drafted, taken) in counts.items()}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--pair-clients", type=int, default=1, help="clients that send pairs; 0: none")
    parser.add_argument(
        "--drafters",
        type=_lists,
        default=[],
        help="lists of the pairs, as in self,default+block; all that can work if none is given",
    )
    parser.add_argument("--draft-model", default="", help="of the drafter model; default: the model itself")
    parser.add_argument("--heads", default="", help="a folder where heads trained for this are kept")
    parser.add_argument("--train-s", type=float, default=30.0, help="seconds of training for such a head")
    parser.add_argument("--steady-clock", action="store_true", help="a wall clock that does not jump")


def _lists(text: str) -> list[List]:
    try:
        return read_lists(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def start_server(
    options: argparse.Namespace, say: Callable[[str], None]
) -> tuple[servers.RunningServer, list[List]]:
    """A server for the pairs of a soak, and the lists that its requests may name."""
    lists = (options.drafters or all_lists(options.model)) if options.pair_clients else []
    with tempfile.TemporaryDirectory() as folder:
        heads = trained_heads(options.model, lists, Path(options.heads or folder), options.train_s, say)
        more = server_options(options.model, lists, heads, options.draft_model)
        module = "paceline" if options.steady_clock else "bench.serve.clock_jumps"
        given = options.model, options.threads, options.slots, options.cache_mb
        return servers.paceline(*given, options=more, module=module), lists
