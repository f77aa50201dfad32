"""Small untrained heads for a real model, in folders as `paceline train` leaves them."""

from pathlib import Path
from typing import Any

import torch

from paceline.heads.block import BlockConfig
from paceline.heads.eagle import EagleConfig
from paceline.heads.head_checkpoint import Card, save
from paceline.heads.medusa import MedusaConfig
from paceline.heads.registry import HEAD_TYPES
from paceline.target.weights.model_config import ModelConfig
from paceline.target.weights.reader import load_embeddings, open_checkpoint

TOKENS = 2048  # that it can guess


def save_untrained(folder: Path, model: Path, kind: str = "block") -> Path:
    """Its guesses are poor: the text must not care."""
    pieces = load_embeddings(model)
    net = HEAD_TYPES[kind].net(_shape(kind, open_checkpoint(model).shape), pieces, torch.arange(TOKENS))
    net.init_weights(pieces, torch.Generator().manual_seed(0))
    card = Card(
        kind, net.shape, model.name, pieces.fingerprint, acceptance=(0.5, 0.25), tokens_per_pass=(1.5, 1.6)
    )
    save(folder, card, net)
    return folder


def _shape(kind: str, of: ModelConfig) -> Any:
    taps = (1, of.layers // 2)
    if kind == "medusa":
        return MedusaConfig(of.width, of.vocab_size, TOKENS, (of.layers - 1,), 4)
    cls = BlockConfig if kind == "block" else EagleConfig
    return cls(of.width, 1, 1, 32, 64, of.vocab_size, TOKENS, taps)
