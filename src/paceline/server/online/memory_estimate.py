"""An estimate of the memory that the training process needs, made before it starts."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from paceline.heads.head_checkpoint import WEIGHTS, read_card
from paceline.heads.versions import current
from paceline.target.hardware import available_memory
from paceline.target.weights.reader import canonical_tensors, open_checkpoint
from paceline.trace.online import OnlineTrainingConfig

MB: Final = 1 << 20
FLOAT_BYTES: Final = 4  # the process computes in float32, whatever the server does
BASE_BYTES: Final = 400 * MB  # the interpreter and its libraries, without any weights
FUSED_WEIGHTS: Final = ("q", "k", "v", "gate", "up")  # held twice while the model is loaded
# Floats per parameter: weight, gradient, two moments of the optimizer, saved copy, evaluated copy.
FLOATS_PER_PARAMETER: Final = 6
FLOATS_PER_DRAFT_LOGIT: Final = 10  # that a training step keeps, at each position
FLOATS_PER_TARGET_LOGIT: Final = 3
WIDTH_ROWS: Final = 6  # rows of the model's width that a pass holds for each token
FF_ROWS: Final = 4  # rows of the feed-forward width


def memory_shortage(
    model: Path, roots: Sequence[Path], config: OnlineTrainingConfig, available: int | None = None
) -> str:
    """A message if there is too little memory; empty if there is enough, or the system does not say.

    available: bytes; None: those available now.
    """
    available = available_memory() if available is None else available
    needed = needed_bytes(model, roots, config)
    if available is None or needed <= available:
        return ""
    return (
        f"online training needs about {needed // MB} MB of memory for a copy of the model, and "
        f"{available // MB} MB are available: drafters stay as they are; give the server more, "
        "or leave out --online-training"
    )


def needed_bytes(model: Path, roots: Sequence[Path], config: OnlineTrainingConfig) -> int:
    """The peak. Drafters are trained one after the other."""
    checkpoint = open_checkpoint(model)
    sizes = {name: stored.elements for name, stored in canonical_tensors(checkpoint)}
    weights = sum(sizes.values())
    twice = sum(size for name, size in sizes.items() if name.rpartition(".")[2] in FUSED_WEIGHTS)
    shape = checkpoint.shape
    one_pass = config.max_len * (WIDTH_ROWS * shape.width + FF_ROWS * shape.ff_width)
    batches = max(_drafter_floats(root, shape.width, shape.vocab_size, config) for root in roots)
    return BASE_BYTES + FLOAT_BYTES * (weights + max(twice, one_pass + batches))


def _drafter_floats(root: Path, width: int, vocab: int, config: OnlineTrainingConfig) -> int:
    """Floats besides the target: the head, the target's hidden states of the samples, and one step."""
    folder = current(root).folder
    card = read_card(folder)
    own = (folder / WEIGHTS).stat().st_size // (1 if card.weights == "int8" else FLOAT_BYTES)
    states = config.train_tokens * (len(card.shape.taps) + 1) * width
    position = (
        FLOATS_PER_DRAFT_LOGIT * card.shape.block * card.shape.draft_vocab + FLOATS_PER_TARGET_LOGIT * vocab
    )
    return FLOATS_PER_PARAMETER * own + states + config.batch_tokens * position
