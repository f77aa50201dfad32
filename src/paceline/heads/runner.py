"""What a drafter needs computed of a network that fills blocks, and how torch computes it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from paceline.heads.base import TargetEmbeddings
from paceline.heads.block import BlockConfig, BlockHead, KeysValues
from paceline.heads.head_checkpoint import StoredHead
from paceline.types import Target

Floats = NDArray[np.float32]
# Of each text the guesses, one after the other, and the logits of confidence; beyond what was asked for they
# mean nothing.
Chains = tuple[list[list[int]], list[list[float]]]


@dataclass(frozen=True, slots=True)
class CacheRows:
    """Some rows of a tensor, which only those cut who must: that takes long, for a draft."""

    whole: Tensor  # [first + count or more, layers, 2, kv_heads, head_dim], of the type of a runner's `like`
    first: int
    count: int

    def cut(self) -> Tensor:
        return self.whole[self.first : self.first + self.count]


@dataclass(frozen=True, slots=True)
class TapInput:
    """What the target made of some tokens."""

    start: int  # position of the first
    hidden: Mapping[int, Tensor]  # of each layer tapped: [first + count or more, width] float32
    rows: CacheRows  # to be filled
    first: int = 0  # which of the hidden states is the first

    def of(self, tap: int) -> Tensor:
        return self.hidden[tap][self.first : self.first + self.rows.count]


@dataclass(frozen=True, slots=True)
class BlockOutput:
    """A block, before it is known which tokens stand in it."""

    slots: int  # how many there are of it
    base: Tensor  # [slots or more, draft_vocab] float32
    hidden: Tensor  # [slots or more, width]


@dataclass(frozen=True, slots=True)
class AnchorContext:
    """An anchor, and what its block sees of the text before it."""

    token: int
    position: int
    positions: Sequence[int]  # of the rows, and of others before and behind them: those of the whole tensor
    rows: CacheRows  # as `read` made them
    old: BlockOutput | None = None  # a block that nobody needs any more: its memory may be used


@dataclass(frozen=True, slots=True)
class ChainStart:
    block: BlockOutput
    slot: int
    previous: int  # the token before it


@dataclass(frozen=True, slots=True)
class SampleCall:
    """How C++ draws the guesses of a chain: see sampling/csrc/choose.cpp."""

    choose: int  # where paceline_choose_among is
    settings: int  # and what it is given
    keys: Sequence[tuple[int, int]]  # of each guess
    owner: object  # of the settings


First = tuple[int, int]  # a slot, and the token before it
SampleCalls = Sequence[SampleCall | None]  # of each chain, None for the likeliest; or of none at all


def chain_starts(blocks: Sequence[BlockOutput], firsts: Sequence[First]) -> list[ChainStart]:
    return [ChainStart(block, *first) for block, first in zip(blocks, firsts, strict=True)]


class BlockRunner(Protocol):
    shape: BlockConfig
    draft_ids: Tensor  # [draft_vocab]: see Net
    like: Tensor  # of the type that rows are
    draws: bool = False  # whether guesses of chains can be drawn; else they are the likeliest
    prefers_batched_lookup: bool = True  # whether one look at several places is quicker than several looks

    def read(self, parts: Sequence[TapInput]) -> None:
        """Fills the rows of each part."""

    def fill(self, texts: Sequence[AnchorContext], slots: int) -> list[BlockOutput]:
        """One pass for all of them. slots: how many rows each block has."""

    def chains(self, places: Sequence[ChainStart], sizes: Sequence[int], draws: SampleCalls = ()) -> Chains:
        """The likeliest tokens from each place on, or those drawn. sizes: how many of each."""

    def guess(
        self,
        parts: Sequence[TapInput],
        texts: Sequence[AnchorContext],
        slots: int,
        firsts: Sequence[First],
        sizes: Sequence[int],
        draws: SampleCalls = (),
    ) -> tuple[list[BlockOutput], Chains]:
        """Reads, fills, and says what `chains` does from the first place of each on."""
        if parts:
            self.read(parts)
        filled = self.fill(texts, slots)
        return filled, self.chains(chain_starts(filled, firsts), sizes, draws)

    def look(self, places: Sequence[ChainStart]) -> tuple[Floats, list[float]]:
        """Logits [places, draft_vocab], and the logits of confidence."""


class HeadTarget(Target, Protocol):
    """A target that trained draft heads can run beside."""

    def embeddings(self) -> TargetEmbeddings: ...  # shares the target's memory where its layout allows
    def block_runner(self, head: StoredHead) -> BlockRunner | None:
        """Runs a block head on the target's own threads or kernels. None: run the head with torch."""
        return None


class TorchBlock(BlockRunner):
    """Where the network is."""

    def __init__(self, net: BlockHead) -> None:
        self._net, self.like = net.eval(), net.fc.weight.detach()
        self.shape, self.draft_ids = net.shape, net.draft_ids

    @torch.inference_mode()
    def read(self, parts: Sequence[TapInput]) -> None:
        net, device = self._net, self._net.draft_ids.device
        sizes = [part.rows.count for part in parts]
        positions = [torch.arange(p.start, p.start + n) for p, n in zip(parts, sizes, strict=True)]
        hidden = {tap: torch.cat([p.of(tap) for p in parts]).to(device) for tap in net.shape.taps}
        at = torch.cat(positions)[None].to(device)
        layers = net.context(net.features(hidden)[None], at)
        rows = torch.stack([torch.stack(kv) for kv in layers])  # [layers, 2, 1, kv_heads, rows, head_dim]
        for part, made in zip(parts, torch.split(rows[:, :, 0].permute(3, 0, 1, 2, 4), sizes), strict=True):
            part.rows.cut()[:] = made

    @torch.inference_mode()
    def fill(self, texts: Sequence[AnchorContext], slots: int) -> list[BlockOutput]:
        net, device = self._net, self._net.draft_ids.device
        positions, context = self._context(texts)
        tokens = torch.tensor([[text.token] for text in texts], device=device)
        anchors = torch.tensor([[text.position] for text in texts], device=device)
        hidden = net.block(tokens, anchors, context, net.sees(anchors, positions), slots)[:, 0]
        base = net.base_logits(hidden)
        return [BlockOutput(slots, *both) for both in zip(base, hidden, strict=True)]

    @torch.inference_mode()
    def chains(self, places: Sequence[ChainStart], sizes: Sequence[int], draws: SampleCalls = ()) -> Chains:
        """Without leaving the device, and without drawing."""
        net, device = self._net, self._net.draft_ids.device
        base = pad_sequence([place.block.base for place in places], batch_first=True)
        hidden = pad_sequence([place.block.hidden for place in places], batch_first=True)
        last = torch.tensor([place.block.slots for place in places], device=device) - 1
        first = torch.tensor([place.slot for place in places], device=device)
        previous = torch.tensor([place.previous for place in places], device=device)
        row, tokens, sure = torch.arange(len(places), device=device), [], []
        for step in range(max(sizes)):
            at = torch.minimum(first + step, last)
            sure.append(net.confidence(hidden[row, at], previous))
            previous = net.draft_ids[(base[row, at] + net.markov(previous)).argmax(-1)]
            tokens.append(previous)
        return torch.stack(tokens, 1).tolist(), torch.stack(sure, 1).tolist()

    @torch.inference_mode()
    def look(self, places: Sequence[ChainStart]) -> tuple[Floats, list[float]]:
        net = self._net
        previous = torch.tensor([place.previous for place in places], device=net.draft_ids.device)
        base = torch.stack([place.block.base[place.slot] for place in places])
        hidden = torch.stack([place.block.hidden[place.slot] for place in places])
        logits: Floats = (base + net.markov(previous)).numpy(force=True)
        return logits, net.confidence(hidden, previous).tolist()

    def _context(self, texts: Sequence[AnchorContext]) -> tuple[Tensor, list[KeysValues]]:
        """Positions [b, n], -1 for padding, and each layer's keys and values."""
        longest = max(text.rows.count for text in texts)
        positions = torch.full((len(texts), longest), -1)
        cut = [text.rows.cut() for text in texts]
        rows = cut[0].new_zeros(len(texts), longest, *cut[0].shape[1:])
        for i, (text, own) in enumerate(zip(texts, cut, strict=True)):
            at = text.positions[text.rows.first : text.rows.first + text.rows.count]
            positions[i, : len(own)] = torch.tensor(at)
            rows[i, : len(own)] = own
        layers = rows.permute(2, 3, 0, 4, 1, 5)  # [layers, 2, b, kv_heads, n, head_dim]
        return positions.to(self._net.draft_ids.device), [(layer[0], layer[1]) for layer in layers]
