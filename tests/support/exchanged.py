"""Heads of the tiny target to be written in other formats and read from them."""

from typing import Any

import torch

from paceline.convert.foreign_checkpoint import TargetModel
from paceline.heads.base import DraftHead
from paceline.heads.calibration import Calibration
from paceline.heads.eagle import EagleConfig, EagleHead
from paceline.heads.head_checkpoint import Card
from paceline.train.recipe import pieces_of
from support.head_cases import some_ids
from support.tiny_heads import tiny_model
from support.torch_cases import VOCAB

MODEL = tiny_model()
PIECES = pieces_of(MODEL)
TARGET = TargetModel("tiny", MODEL.shape, PIECES)


def shaken(net: DraftHead, seed: int) -> DraftHead:
    generator = torch.Generator().manual_seed(seed)
    net.init_weights(PIECES, generator)
    with torch.no_grad():
        for weight in net.parameters():
            weight.add_(0.1 * torch.randn(weight.shape, generator=generator))
    return net


def an_eagle(draft_vocab: int = 40, seed: int = 0, **settings: Any) -> EagleHead:
    settings = {"window": 7} | settings
    shape = EagleConfig(48, 4, 2, 16, 64, VOCAB, draft_vocab, (0, 2, 4), 3, **settings)
    net = shaken(EagleHead(shape, PIECES, some_ids(draft_vocab)), seed)
    assert isinstance(net, EagleHead)
    return net


def a_card(kind: str, net: Any) -> Card:
    calibration = Calibration((1.5,) * net.shape.block, (0.25,) * net.shape.block)
    return Card(kind, net.shape, "tiny", PIECES.fingerprint, "float32", calibration)
