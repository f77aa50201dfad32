"""Which layers a model sketches with: searched once, then known by the model's fingerprint."""

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from paceline.drafters.draft_model.layer_search import Found, Progress, search
from paceline.paths import home
from paceline.types import LayerSkipTarget

log = logging.getLogger("paceline")


def known_layers(target: LayerSkipTarget, fingerprint: str) -> Found | None:
    """What was found for this model before."""
    from paceline.atomic import read_json

    noted = read_json(_notes()).get(fingerprint, {})
    with suppress(ValueError, TypeError, KeyError):
        layers = tuple(int(layer) for layer in noted["layers"])
        if layers and set(layers) <= set(range(target.layers)) and list(layers) == sorted(set(layers)):
            return Found(layers, float(noted["agreement"]), float(noted["speed"]))
    return None


def find_layers(
    target: LayerSkipTarget,
    fingerprint: str,
    texts: Sequence[Sequence[int]],
    progress: Progress = lambda done, total: None,
) -> Found:
    """Searches, and notes what was found."""
    from paceline.atomic import read_json, write_json

    found = search(target, texts, progress)
    noted = {"layers": list(found.layers), "agreement": found.agreement, "speed": found.speed}
    with suppress(OSError):  # then it is searched for again next time
        _notes().parent.mkdir(parents=True, exist_ok=True)
        write_json(_notes(), read_json(_notes()) | {fingerprint: noted})
    return found


def layers_for(
    target: LayerSkipTarget, fingerprint: str, texts: Callable[[], Sequence[Sequence[int]]]
) -> tuple[int, ...]:
    """Those that are known, else those found now."""
    found = known_layers(target, fingerprint)
    if found is None:
        log.warning("self: looking for layers to leave out, once for this model; this takes some seconds")
        found = find_layers(target, fingerprint, texts(), _log_progress)
    log.info(
        "self: guesses run %d of %d layers and agree %.0f %% of the time; at best %.2f times plain speed",
        *(len(found.layers), target.layers, 100 * found.agreement, found.speed),
    )
    return found.layers


def _log_progress(done: int, total: int) -> None:
    if done * 4 // total > (done - 1) * 4 // total:
        log.info("self: %d of %d sets of layers tried", done, total)


def _notes() -> Path:
    return home() / "layers.json"
