"""Goes on training drafters with what a server served: a process of its own, which the server may pause.

It reads a job from standard input and writes a line of JSON for each thing there is to tell. A new version is
made only if it beats the old one on conversations that nothing was learned from. That it serves is for the
server to say, which nobody pauses while it holds a lock.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import stdev
from typing import Any, Final, get_args

import torch

from paceline.config import EngineConfig, LearnConfig
from paceline.drafters.heads import drafter_of
from paceline.heads import versions
from paceline.heads.head_checkpoint import Card, load, save_card
from paceline.log import place_of
from paceline.target.eager.target import placement
from paceline.target.weights.reader import load as load_weights
from paceline.trace.online import RefreshJob
from paceline.train.evaluate import Guess, acceptance, passes_by_text, replay
from paceline.train.online.online_batches import Split, Tell, batches, learn, split
from paceline.train.publish import MEASURED, TOGETHER, publish
from paceline.train.recipe import Kind, Recipe, loss_of, pieces_of
from paceline.train.train_decoder import TrainDecoder

# Wherever the server computes: to stop a process frees no memory of a GPU, nor what it has queued there.
ON: Final = EngineConfig("cpu", "float32")


def run(job: RefreshJob, tell: Tell) -> None:
    """Every drafter of the job, one after the other."""
    parts = split(job.texts, job.config)
    places = sum(len(text.anchors()) for text in parts.recorded())
    if not parts.learned or places < job.config.least_places:
        tell({"waits": f"{len(parts.learned)} texts to learn from, {places} places in held-out ones"})
        return
    device, dtype = placement(ON)
    if job.engine.threads:
        torch.set_num_threads(job.engine.threads)
    model = TrainDecoder(load_weights(Path(job.model), dtype), device, dtype)
    for root in job.drafters:
        tell(refresh(Path(root), model, parts, job.config, tell))


def refresh(
    root: Path, model: TrainDecoder, parts: Split, config: LearnConfig, tell: Tell = lambda _: None
) -> dict[str, Any]:
    """One drafter. Says what became of it: a version was made, from which, or refused and why."""
    served, began, texts = versions.serving(root), versions.current(root), parts.recorded()
    loaded = load(began.folder, pieces_of(model))
    net, card = loaded.net, loaded.card
    most, block = min(MEASURED, net.shape.block), net.shape.block
    old = replay(drafter_of(net), model, texts, block, batch=TOGETHER)
    new: list[Guess] = []
    recipe = Recipe(_kind(card), net, loss_of(net, model, config.anchors), card.calibration)
    lessons = batches(card.kind, net.shape.taps, model, parts.learned, config)
    learn(net, recipe.loss, lessons, config, torch.Generator().manual_seed(began.number), tell)
    with versions.making(root) as folder:
        data = {name: value for name, value in card.data.items() if name != "by_kind_of_text"}
        made = publish(folder, recipe, model, card.target, texts, data, card.weights, tell=new.extend)
        was, now = (acceptance(guesses, texts, most).tokens_per_pass[-1] for guesses in (old, new))
        told = {"drafter": root.name, "kind": card.kind, "before": was, "after": now}
        passes = [passes_by_text(guesses, texts, most) for guesses in (old, new)]
        if now < was + config.least_gain or not saves(*passes):
            return {**told, "refused": "it is not clearly better on held-out conversations"}
        if versions.serving(root) != served:
            return {**told, "refused": "another version serves by now"}
        learned = {
            "from": began.number,
            "steps": config.steps,
            "texts": len(parts.learned),
            "held_out_texts": len(texts),
            "tokens_per_pass": {"before": was, "after": now},
        }
        save_card(folder, replace(made, data={**made.data, "learned": learned}))
        return {**told, "made": versions.add(root, folder), "learned_from": served}


def saves(old: Sequence[int], new: Sequence[int]) -> bool:
    """Whether fewer passes are needed, by more than chance gives and takes from one text to the next."""
    saved = [before - after for before, after in zip(old, new, strict=True)]
    if len(saved) < 2:
        return False  # one text does not say what chance gives
    error: float = stdev(saved) * len(saved) ** 0.5  # of their sum
    return sum(saved) > error + 1e-9


def _kind(card: Card) -> Kind:
    return next(kind for kind in get_args(Kind) if kind == card.kind)


def _tell(told: dict[str, Any]) -> None:
    print(json.dumps(told), flush=True)


def main() -> None:
    try:
        run(RefreshJob.decode(sys.stdin.buffer.read()), _tell)
    except Exception as problem:
        _tell({"failed": place_of(problem)})
        sys.exit(1)
