"""The pieces of a model that trained heads borrow, read without the rest of it."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from paceline.errors import ModelError
from paceline.heads.base import DenseTargetEmbeddings
from paceline.target.weights.reader import open_checkpoint, placed_tensors, read_placed, rounded
from paceline.target.weights.tensors import fingerprint


def load_pieces(
    path: Path, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> DenseTargetEmbeddings:
    """From a GGUF file or a folder, decoded as `load` decodes them."""
    try:
        checkpoint = open_checkpoint(path)
        placed = dict(placed_tensors(checkpoint))
        mark = fingerprint(checkpoint.identity, placed.items())
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            held = {
                name: read_placed(checkpoint, name, placed[name], dtype, pool).to(device)
                for name in ("embed", "norm", "head")
                if name in placed
            }
    except OSError as error:
        raise ModelError(f"{path.name} cannot be read: {error.strerror or error}") from error
    scale = rounded(checkpoint.shape, dtype).embed_scale
    return DenseTargetEmbeddings(held["embed"], held.get("head", held["embed"]), held["norm"], mark, scale)
