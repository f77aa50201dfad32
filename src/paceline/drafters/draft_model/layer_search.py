"""Greedy search for the layers that layer-skip drafts can do without, and the file of results.

A set of layers is scored by how often its most likely next token is the full model's, at positions spread
over calibration text. Layers are dropped one by one, each time the least missed of a few candidates. The
result is stored under the model's fingerprint.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from paceline.drafters.draft_model.layer_skip import skip_cost
from paceline.errors import UsageError
from paceline.paths import home
from paceline.sampling import Floats
from paceline.types import Feed, LayerSkipTarget, Seq

TENANT: Final = "\0layers"  # of no request
POSITIONS: Final = 32  # all are computed in one pass
MAX_CONTEXT: Final = 320  # tokens before a position
MIN_CONTEXT: Final = 16
CANDIDATES: Final = 3  # layers tried at each step
MAX_DRAFT: Final = 8  # nodes of a draft in the estimate of speed
ROW_COST: Final = 0.04  # of a pass: one more row in it
MIN_DROPPED: Final = 0.25  # of the layers: with fewer dropped, a draft costs as much as the token itself
MAX_DROPPED: Final = 0.5

log = logging.getLogger("paceline")

Progress = Callable[[int, int], None]  # sets scored so far, in all


@dataclass(frozen=True, slots=True)
class LayerSet:
    layers: tuple[int, ...]  # to run
    agreement: float  # share of positions where their most likely token is the full model's
    speed: float  # expected, against plain decoding


def expected_speed(agreement: float, cost: float) -> float:
    """At the best draft length, if tokens agree independently. cost: of one token, as a share of a pass."""
    tokens, survive, best = 1.0, 1.0, 0.0
    for length in range(1, MAX_DRAFT + 1):
        survive *= agreement
        tokens += survive
        best = max(best, tokens / (1 + length * (cost + ROW_COST)))
    return best


def search(
    target: LayerSkipTarget, texts: Sequence[Sequence[int]], progress: Progress = lambda done, total: None
) -> LayerSet:
    """The set with the highest expected speed; deterministic for the same texts."""
    positions = _Positions(target, texts)
    try:
        return _search(target, positions, progress)
    finally:
        positions.close()


def _search(target: LayerSkipTarget, positions: "_Positions", progress: Progress) -> LayerSet:
    every = tuple(range(target.layers))
    max_dropped, min_dropped = (int(share * len(every)) for share in (MAX_DROPPED, MIN_DROPPED))
    total, done = len(every) + CANDIDATES * max_dropped, 0

    def scored(dropped: Sequence[int]) -> tuple[float, float]:
        nonlocal done
        progress(done := done + 1, total)
        return positions.score([layer for layer in every if layer not in dropped])

    alone = {layer: scored([layer])[0] for layer in every}
    ranked = sorted(every, key=lambda layer: -alone[layer])
    dropped: list[int] = []
    sets: list[LayerSet] = []
    for _ in range(max_dropped):
        tried = {layer: scored([*dropped, layer]) for layer in ranked[:CANDIDATES]}
        best = max(tried, key=lambda layer: tried[layer][0])
        dropped.append(best)
        ranked.remove(best)
        layers = tuple(layer for layer in every if layer not in dropped)
        agreement = tried[best][1]
        sets.append(LayerSet(layers, agreement, expected_speed(agreement, skip_cost(target, len(layers)))))
    return max(sets[max(0, min_dropped - 1) :], key=lambda s: s.speed)


class _Positions:
    """Sequences that end at the positions, all but their last token computed by the full model."""

    def __init__(self, target: LayerSkipTarget, texts: Sequence[Sequence[int]]) -> None:
        self._target = target
        self._feeds: list[Feed] = []
        self._starts: list[int] = []
        try:
            for text in _spread(texts):
                self._open(text)
            logits: Floats = target.forward(self._feeds).logits.numpy(force=True)
            for feed, start in zip(self._feeds, self._starts, strict=True):
                target.keep(feed.seq_id, start)
        except BaseException:
            self.close()
            raise
        self._expected = logits.argmax(1)

    def _open(self, text: Sequence[int]) -> None:
        name, start = f"{TENANT} {len(self._feeds)}", len(text) - 1
        seq = Seq(name, list(text), len(text), tenant=TENANT, remember=False)
        computed = self._target.open(seq)
        self._feeds.append(Feed(seq.id, text[start:]))
        self._starts.append(start)
        if computed < start:
            self._target.forward([Feed(seq.id, text[computed:start], scored=False)])
            self._target.keep(seq.id, start)

    def score(self, layers: Sequence[int]) -> tuple[float, float]:
        """The mean log-probability of the full model's tokens here, and the share that are most likely."""
        logits: Floats = self._target.skip_forward(self._feeds, self._starts, layers).logits.numpy(force=True)
        relative = logits - logits.max(1, keepdims=True)
        expected = relative[np.arange(len(logits)), self._expected]
        logprobs = expected - np.log(np.exp(relative).sum(1))
        return float(logprobs.mean()), float((logits.argmax(1) == self._expected).mean())

    def close(self) -> None:
        for feed in self._feeds:
            self._target.close(feed.seq_id)


def _spread(texts: Sequence[Sequence[int]]) -> list[Sequence[int]]:
    """Beginnings of the texts that end at positions evenly spread over all of them."""
    ends = [(text, end) for text in texts for end in range(MIN_CONTEXT, min(len(text), MAX_CONTEXT) + 1)]
    if len(ends) < POSITIONS:
        raise UsageError(
            f"the recorded text has {len(ends)} positions to draft at: expected {POSITIONS} or more, "
            f"in texts of more than {MIN_CONTEXT} tokens"
        )
    chosen = np.linspace(0, len(ends) - 1, POSITIONS).astype(int)
    return [ends[i][0][: ends[i][1]] for i in chosen]


def known_layers(target: LayerSkipTarget, fingerprint: str) -> LayerSet | None:
    """The stored result for this model."""
    from paceline.atomic import read_json

    entry = read_json(_results()).get(fingerprint, {})
    with suppress(ValueError, TypeError, KeyError):
        layers = tuple(int(layer) for layer in entry["layers"])
        if layers and set(layers) <= set(range(target.layers)) and list(layers) == sorted(set(layers)):
            return LayerSet(layers, float(entry["agreement"]), float(entry["speed"]))
    return None


def find_layers(
    target: LayerSkipTarget,
    fingerprint: str,
    texts: Sequence[Sequence[int]],
    progress: Progress = lambda done, total: None,
) -> LayerSet:
    """Searches, and stores the result."""
    from paceline.atomic import read_json, write_json

    best = search(target, texts, progress)
    entry = {"layers": list(best.layers), "agreement": best.agreement, "speed": best.speed}
    with suppress(OSError):  # then the search is repeated next time
        _results().parent.mkdir(parents=True, exist_ok=True)
        write_json(_results(), read_json(_results()) | {fingerprint: entry})
    return best


def forget(fingerprint: str) -> None:
    """Drops the result for a model."""
    from paceline.atomic import read_json, write_json

    known = read_json(_results())
    if known.pop(fingerprint, None) is not None:
        write_json(_results(), known)


def layers_for(
    target: LayerSkipTarget, fingerprint: str, texts: Callable[[], Sequence[Sequence[int]]]
) -> tuple[int, ...]:
    """The stored layers, or those of a new search."""
    best = known_layers(target, fingerprint)
    if best is None:
        log.warning("self: searching for layers to skip, once for this model; this takes some seconds")
        best = find_layers(target, fingerprint, texts(), _log_progress)
    log.info(
        "self: drafts run %d of %d layers and agree %.0f %% of the time; at best %.2f times plain speed",
        *(len(best.layers), target.layers, 100 * best.agreement, best.speed),
    )
    return best.layers


def _log_progress(done: int, total: int) -> None:
    if done * 4 // total > (done - 1) * 4 // total:
        log.info("self: %d of %d sets of layers tried", done, total)


def _results() -> Path:
    return home() / "layers.json"
