"""Inference with a block head: the interface that the drafter uses, and its implementation in torch."""

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
# For each text its drafted tokens and their confidence logits; values beyond the requested size mean nothing.
Chains = tuple[list[list[int]], list[list[float]]]


@dataclass(frozen=True, slots=True)
class CacheRows:
    """A slice of a tensor, made only where it is needed: slicing takes long, compared with a draft."""

    whole: Tensor  # [first + count or more, layers, 2, kv_heads, head_dim], of the type of a runner's `like`
    first: int
    count: int

    def cut(self) -> Tensor:
        return self.whole[self.first : self.first + self.count]


@dataclass(frozen=True, slots=True)
class TapInput:
    """Hidden states of some tokens, and the cache rows to fill from them."""

    start: int  # position of the first
    hidden: Mapping[int, Tensor]  # tap -> [first + count or more, width] float32
    rows: CacheRows  # output
    first: int = 0  # index of the first row in `hidden`

    def of(self, tap: int) -> Tensor:
        return self.hidden[tap][self.first : self.first + self.rows.count]


@dataclass(frozen=True, slots=True)
class BlockOutput:
    """The output of one block pass, before its tokens are chosen."""

    slots: int  # valid rows
    base: Tensor  # [slots or more, draft_vocab] float32
    hidden: Tensor  # [slots or more, width]; of CudaBlock [slots or more]: their part of the confidence


@dataclass(frozen=True, slots=True)
class AnchorContext:
    """An anchor and the cache rows that its block attends to."""

    token: int
    position: int
    positions: Sequence[int]  # of all rows of the whole tensor
    rows: CacheRows  # as `read` made them
    old: BlockOutput | None = None  # a block that is no longer needed: its memory may be reused


@dataclass(frozen=True, slots=True)
class ChainStart:
    """A slot of a block from which tokens are chosen one after the other."""

    block: BlockOutput
    slot: int
    previous: int  # the token before it


@dataclass(frozen=True, slots=True)
class SampleCall:
    """How C++ or the GPU samples the tokens of a chain: see sampling/csrc/choose.cpp."""

    choose: int  # address of paceline_choose_among
    settings: int  # address of its settings
    keys: Sequence[tuple[int, int]]  # of each token
    owner: object  # keeps the settings alive
    temperature: float = 1.0  # among the settings


SlotStart = tuple[int, int]  # a slot, and the token before it
SampleCalls = Sequence[SampleCall | None]  # for each chain, None for the likeliest tokens; () for none


def chain_starts(blocks: Sequence[BlockOutput], firsts: Sequence[SlotStart]) -> list[ChainStart]:
    return [ChainStart(block, *first) for block, first in zip(blocks, firsts, strict=True)]


class BlockRunner(Protocol):
    """Runs a block head: cache rows of the context, blocks after an anchor, chains of tokens from them."""

    shape: BlockConfig
    draft_ids: Tensor  # [draft_vocab]: the target's id of each draft token
    like: Tensor  # dtype and device of cache rows
    samples: bool = False  # chains can be sampled; else they are greedy
    prefers_batched_lookup: bool = True  # one call for several positions is faster than several calls

    def read(self, parts: Sequence[TapInput]) -> None:
        """Computes the cache rows of each part."""

    def fill(self, texts: Sequence[AnchorContext], slots: int) -> list[BlockOutput]:
        """One pass for all anchors. slots: rows of each block."""

    def chains(self, starts: Sequence[ChainStart], sizes: Sequence[int], samples: SampleCalls = ()) -> Chains:
        """Greedy or sampled tokens from each start on. sizes: how many for each."""

    def draft_chains(
        self,
        parts: Sequence[TapInput],
        texts: Sequence[AnchorContext],
        slots: int,
        firsts: Sequence[SlotStart],
        sizes: Sequence[int],
        samples: SampleCalls = (),
    ) -> tuple[list[BlockOutput], Chains]:
        """`read`, `fill` and `chains` in one call."""
        if parts:
            self.read(parts)
        filled = self.fill(texts, slots)
        return filled, self.chains(chain_starts(filled, firsts), sizes, samples)

    def logits_at(self, starts: Sequence[ChainStart]) -> tuple[Floats, list[float]]:
        """Logits [starts, draft_vocab], and confidence logits."""


class HeadTarget(Target, Protocol):
    """A target that trained draft heads can run beside."""

    def embeddings(self) -> TargetEmbeddings: ...  # shares the target's memory where its layout allows
    def block_runner(self, head: StoredHead) -> BlockRunner | None:
        """Runs a block head on the target's own threads or kernels. None: run the head with torch."""
        return None


class TorchBlock(BlockRunner):
    """Runs a block head with torch, on the device of its network."""

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
        hidden = net.block(tokens, anchors, context, net.visible(anchors, positions), slots)[:, 0]
        base = net.base_logits(hidden)
        return [BlockOutput(slots, *both) for both in zip(base, hidden, strict=True)]

    @torch.inference_mode()
    def chains(self, starts: Sequence[ChainStart], sizes: Sequence[int], samples: SampleCalls = ()) -> Chains:
        """Greedy; stays on the device until the end."""
        net, device = self._net, self._net.draft_ids.device
        base = pad_sequence([start.block.base for start in starts], batch_first=True)
        hidden = pad_sequence([start.block.hidden for start in starts], batch_first=True)
        last = torch.tensor([start.block.slots for start in starts], device=device) - 1
        first = torch.tensor([start.slot for start in starts], device=device)
        previous = torch.tensor([start.previous for start in starts], device=device)
        row, tokens, sure = torch.arange(len(starts), device=device), [], []
        for step in range(max(sizes)):
            at = torch.minimum(first + step, last)
            sure.append(net.confidence(hidden[row, at], previous))
            previous = net.draft_ids[(base[row, at] + net.markov(previous)).argmax(-1)]
            tokens.append(previous)
        return torch.stack(tokens, 1).tolist(), torch.stack(sure, 1).tolist()

    @torch.inference_mode()
    def logits_at(self, starts: Sequence[ChainStart]) -> tuple[Floats, list[float]]:
        net = self._net
        previous = torch.tensor([start.previous for start in starts], device=net.draft_ids.device)
        base = torch.stack([start.block.base[start.slot] for start in starts])
        hidden = torch.stack([start.block.hidden[start.slot] for start in starts])
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
