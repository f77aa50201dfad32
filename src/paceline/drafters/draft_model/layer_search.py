"""Which layers the target can do without when it guesses for itself, found on recorded text.

A set of layers is judged by how often its likeliest next token is the whole model's, at places spread over
the text. Layers are left out one by one, each time the one that is missed least of a few candidates.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from paceline.drafters.draft_model.layer_skip import sketch_cost
from paceline.errors import UsageError
from paceline.sampling import Floats
from paceline.types import Feed, LayerSkipTarget, Seq

TENANT: Final = "\0layers"  # no request's
PLACES: Final = 32  # all are sketched in one pass
CONTEXT: Final = 320  # most tokens before a place
EARLIEST: Final = 16  # fewest
CANDIDATES: Final = 3
LONGEST: Final = 8  # guesses in a draft
ROW_COST: Final = 0.04  # of one more row in the verifying pass
LEAST_LEFT_OUT: Final = 0.25  # of the layers: with more of them, a guess costs what the token itself costs
MOST_LEFT_OUT: Final = 0.5

Progress = Callable[[int, int], None]  # sketches made so far, in all


@dataclass(frozen=True, slots=True)
class Found:
    layers: tuple[int, ...]  # to run
    agreement: float  # share of places where they say what the whole model says
    speed: float  # expected, against plain decoding


def expected_speed(agreement: float, cost: float) -> float:
    """Of the best draft length, if guesses agree independently; cost: of one, as a share of a pass."""
    tokens, survive, best = 1.0, 1.0, 0.0
    for guesses in range(1, LONGEST + 1):
        survive *= agreement
        tokens += survive
        best = max(best, tokens / (1 + guesses * (cost + ROW_COST)))
    return best


def search(
    target: LayerSkipTarget, texts: Sequence[Sequence[int]], progress: Progress = lambda done, total: None
) -> Found:
    """The set with the highest expected speed, from the same texts always the same."""
    places = _Places(target, texts)
    try:
        return _search(target, places, progress)
    finally:
        places.close()


def _search(target: LayerSkipTarget, places: "_Places", progress: Progress) -> Found:
    every = tuple(range(target.layers))
    most, least = (int(share * len(every)) for share in (MOST_LEFT_OUT, LEAST_LEFT_OUT))
    total, done = len(every) + CANDIDATES * most, 0

    def judged(left_out: Sequence[int]) -> tuple[float, float]:
        nonlocal done
        progress(done := done + 1, total)
        return places.judge([layer for layer in every if layer not in left_out])

    alone = {layer: judged([layer])[0] for layer in every}
    ranked = sorted(every, key=lambda layer: -alone[layer])
    left_out: list[int] = []
    found: list[Found] = []
    for _ in range(most):
        tried = {layer: judged([*left_out, layer]) for layer in ranked[:CANDIDATES]}
        best = max(tried, key=lambda layer: tried[layer][0])
        left_out.append(best)
        ranked.remove(best)
        layers = tuple(layer for layer in every if layer not in left_out)
        agreement = tried[best][1]
        found.append(Found(layers, agreement, expected_speed(agreement, sketch_cost(target, len(layers)))))
    return max(found[max(0, least - 1) :], key=lambda f: f.speed)


class _Places:
    """Sequences that stand at the places, all but their last token computed by the whole model."""

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
        self._wanted = logits.argmax(1)

    def _open(self, text: Sequence[int]) -> None:
        seq, start = Seq(f"{TENANT} {len(self._feeds)}", list(text), len(text), tenant=TENANT), len(text) - 1
        computed = self._target.open(seq)
        self._feeds.append(Feed(seq.id, text[start:]))
        self._starts.append(start)
        if computed < start:
            self._target.forward([Feed(seq.id, text[computed:start], scored=False)])
            self._target.keep(seq.id, start)

    def judge(self, layers: Sequence[int]) -> tuple[float, float]:
        """How likely the whole model's tokens are to these layers, in nats; how many are the likeliest."""
        logits: Floats = self._target.skip_forward(self._feeds, self._starts, layers).logits.numpy(force=True)
        relative = logits - logits.max(1, keepdims=True)
        wanted = relative[np.arange(len(logits)), self._wanted]
        likely = wanted - np.log(np.exp(relative).sum(1))
        return float(likely.mean()), float((logits.argmax(1) == self._wanted).mean())

    def close(self) -> None:
        for feed in self._feeds:
            self._target.close(feed.seq_id)


def _spread(texts: Sequence[Sequence[int]]) -> list[Sequence[int]]:
    """Beginnings of the texts that end at places evenly spread over all of them."""
    places = [(text, end) for text in texts for end in range(EARLIEST, min(len(text), CONTEXT) + 1)]
    if len(places) < PLACES:
        raise UsageError(
            f"the recorded text has {len(places)} places to guess at: expected {PLACES} or more, "
            f"in texts of more than {EARLIEST} tokens"
        )
    chosen = np.linspace(0, len(places) - 1, PLACES).astype(int)
    return [places[i][0][: places[i][1]] for i in chosen]
