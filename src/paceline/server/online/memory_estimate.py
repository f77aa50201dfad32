"""Whether there is memory for a process that trains drafters, found before it begins."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from paceline.heads.head_checkpoint import WEIGHTS, read_card
from paceline.heads.versions import current
from paceline.target.hardware import available_memory
from paceline.target.weights.reader import open_checkpoint, placed_tensors
from paceline.trace.online import OnlineTrainingConfig

MB: Final = 1 << 20
FLOAT: Final = 4  # bytes of a number, whatever the server computes in
PROGRAM: Final = 400 * MB  # without any weights
JOINED: Final = ("q", "k", "v", "gate", "up")  # weights that are held twice while the model is loaded
OF_A_WEIGHT: Final = 6  # numbers: itself, its gradient, two of the optimiser; as it is stored, and measured
OF_A_GUESS: Final = 10  # numbers that a step keeps for each token that could be guessed at a place
OF_A_LOGIT: Final = 3  # the same, of what the target says there
ROWS: Final = 6  # that a pass holds of each token, of the model's width
INNER_ROWS: Final = 4  # and of its inner one


def reason_against(
    model: Path, roots: Sequence[Path], config: OnlineTrainingConfig, room: int | None = None
) -> str:
    """Why nothing can be learned; nothing where there is room, or the system does not say.

    room: bytes; None: what there is now.
    """
    room = available_memory() if room is None else room
    needed = needed_bytes(model, roots, config)
    if room is None or needed <= room:
        return ""
    return (
        f"learning needs about {needed // MB} MB of memory for a copy of the model, and {room // MB} MB are "
        "available: drafters stay as they are; give the server more, or leave out --learn"
    )


def needed_bytes(model: Path, roots: Sequence[Path], config: OnlineTrainingConfig) -> int:
    """The most that is held at once. Drafters are trained one after the other."""
    checkpoint = open_checkpoint(model)
    sizes = {name: stored.elements for name, stored in placed_tensors(checkpoint)}
    weights = sum(sizes.values())
    twice = sum(size for name, size in sizes.items() if name.rpartition(".")[2] in JOINED)
    shape = checkpoint.shape
    one_pass = config.max_len * (ROWS * shape.width + INNER_ROWS * shape.ff_width)
    batches = max(_of_drafter(root, shape.width, shape.vocab_size, config) for root in roots)
    return PROGRAM + FLOAT * (weights + max(twice, one_pass + batches))


def _of_drafter(root: Path, width: int, vocab: int, config: OnlineTrainingConfig) -> int:
    """Numbers besides the target: its weights, what the target made of the texts, and a step."""
    folder = current(root).folder
    card = read_card(folder)
    own = (folder / WEIGHTS).stat().st_size // (1 if card.weights == "int8" else FLOAT)
    states = config.train_tokens * (len(card.shape.taps) + 1) * width
    place = OF_A_GUESS * card.shape.block * card.shape.draft_vocab + OF_A_LOGIT * vocab
    return OF_A_WEIGHT * own + states + config.batch_tokens * place
