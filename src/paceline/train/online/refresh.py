"""Online training of drafters on served traffic, in a process of its own that the server may pause.

It reads a RefreshJob from standard input and reports events as lines of JSON. A new version is made only if
it beats the old one on held-out conversations. The server puts it to use, since that takes a lock: a process
that holds one must not be paused.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import stdev
from typing import Any, Final, get_args

import torch

from paceline.config import EngineConfig
from paceline.drafters.heads import drafter_of
from paceline.heads import versions
from paceline.heads.head_checkpoint import Card, load, save_card
from paceline.log import origin
from paceline.target.eager.target import placement
from paceline.target.hardware import set_torch_threads
from paceline.target.weights.reader import load as load_weights
from paceline.trace.online import OnlineTrainingConfig, RefreshJob
from paceline.train.evaluate import DraftOutcome, acceptance, passes_by_text, replay
from paceline.train.online.online_batches import Report, Split, batches, split, train_online
from paceline.train.publish import EVAL_DRAFT, REPLAY_BATCH, publish
from paceline.train.recipe import Kind, Recipe, loss_of, pieces_of
from paceline.train.train_decoder import TrainDecoder

# On the CPU even if the server uses a GPU: stopping a process frees no GPU memory and none of its queue.
ENGINE: Final = EngineConfig("cpu", "float32")


def run(job: RefreshJob, report: Report) -> None:
    """Trains every drafter of the job, one after the other."""
    parts = split(job.samples, job.config)
    positions = sum(len(text.anchors()) for text in parts.recorded())
    if not parts.training or positions < job.config.min_positions:
        report({"waits": f"{len(parts.training)} samples to train on, {positions} held-out positions"})
        return
    device, dtype = placement(ENGINE)
    set_torch_threads(job.engine.threads)
    model = TrainDecoder(load_weights(Path(job.model), dtype), device, dtype)
    for root in job.drafters:
        report(refresh(Path(root), model, parts, job.config, report))


def refresh(
    root: Path,
    model: TrainDecoder,
    parts: Split,
    config: OnlineTrainingConfig,
    report: Report = lambda _: None,
) -> dict[str, Any]:
    """Trains one drafter. The result says which version was made and from which, or why none was."""
    served, began, texts = versions.serving(root), versions.current(root), parts.recorded()
    loaded = load(began.folder, pieces_of(model))
    net, card = loaded.net, loaded.card
    length, block = min(EVAL_DRAFT, net.shape.block), net.shape.block
    old = replay(drafter_of(net), model, texts, block, batch=REPLAY_BATCH)
    new: list[DraftOutcome] = []
    recipe = Recipe(_kind(card), net, loss_of(card.kind, net, model, config.anchors), card.calibration)
    cached = batches(card.kind, net.shape.taps, model, parts.training, config)
    train_online(net, recipe.loss, cached, config, torch.Generator().manual_seed(began.number), report)
    with versions.making(root) as folder:
        data = {name: value for name, value in card.data.items() if name != "by_kind_of_text"}
        made = publish(folder, recipe, model, card.target, texts, data, card.weights, on_drafts=new.extend)
        was, now = (acceptance(drafts, texts, length).tokens_per_pass[-1] for drafts in (old, new))
        result = {"drafter": root.name, "kind": card.kind, "before": was, "after": now}
        passes = [passes_by_text(drafts, texts, length) for drafts in (old, new)]
        if now < was + config.min_gain or not saves(*passes):
            return {**result, "refused": "it is not clearly better on held-out conversations"}
        if versions.serving(root) != served:
            return {**result, "refused": "another version serves by now"}
        learned = {
            "from": began.number,
            "steps": config.steps,
            "texts": len(parts.training),
            "held_out_texts": len(texts),
            "tokens_per_pass": {"before": was, "after": now},
        }
        save_card(folder, replace(made, data={**made.data, "learned": learned}))
        return {**result, "made": versions.add(root, folder), "learned_from": served}


def saves(old: Sequence[int], new: Sequence[int]) -> bool:
    """True if fewer passes are needed, by more than one standard error of the paired differences."""
    saved = [before - after for before, after in zip(old, new, strict=True)]
    if len(saved) < 2:
        return False  # no spread to compare with
    error: float = stdev(saved) * len(saved) ** 0.5  # of their sum
    return sum(saved) > error + 1e-9


def _kind(card: Card) -> Kind:
    return next(kind for kind in get_args(Kind) if kind == card.kind)


def _print_event(event: dict[str, Any]) -> None:
    print(json.dumps(event), flush=True)


def main() -> None:
    try:
        run(RefreshJob.decode(sys.stdin.buffer.read()), _print_event)
    except Exception as problem:
        _print_event({"failed": origin(problem)})
        sys.exit(1)
