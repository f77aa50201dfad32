"""The static KV cache of rollouts, and one decode step for all its slots.

A step never synchronises with the device and every tensor keeps its address, so that it can be a CUDA graph.
A slot whose answer is complete computes its last row again, and the result is discarded.
"""

from collections.abc import Callable, Sequence
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.train.train_decoder import Attend, TrainDecoder

KEYS: Final = 256  # a step reads a multiple of this many positions of the cache

WORD: Final = 32  # tokens in one word of a mask

Choose = Callable[
    [Tensor, Tensor, Tensor], Tensor
]  # logits [slots, vocab], seeds and output indices [slots] -> tokens


def bytes_per_token(model: TrainDecoder) -> int:
    shape = model.shape
    return 2 * shape.layers * shape.kv_heads * shape.head_dim * model.dtype.itemsize


class Slots:
    """length: positions of a slot, a multiple of KEYS. masked: grammars restrict the tokens."""

    def __init__(
        self,
        model: TrainDecoder,
        count: int,
        length: int,
        max_new: int,
        eos: Sequence[int],
        choose: Choose,
        masked: bool = False,
    ) -> None:
        self.count, self.length = count, length
        self._model, self._choose = model, choose
        shape, device = model.shape, model.device
        cache = (shape.layers, count, shape.kv_heads, length, shape.head_dim)
        self._keys = torch.zeros(cache, dtype=model.dtype, device=device)
        self._values = torch.zeros(cache, dtype=model.dtype, device=device)
        self._rotations = model.rotations(length)
        self._eos = torch.tensor(eos, dtype=torch.int64, device=device)
        self._rows = torch.arange(count, device=device)
        self._positions = torch.arange(length, device=device)
        self._token, self._at, self._written, self._left, self._seeds = torch.zeros(
            5, count, dtype=torch.int64, device=device
        ).unbind()
        self._out = torch.zeros(
            count, max_new + 1, dtype=torch.int64, device=device
        )  # the last column takes the output of idle slots
        self._max_new = max_new
        words = -(-shape.vocab_size // WORD) if masked else 0
        self._allowed = torch.full((count, words), -1, dtype=torch.int32, device=device)
        self._bit = torch.arange(WORD, dtype=torch.int32, device=device)
        # By positions read. None: one step has run without a graph.
        self._graphs: dict[int, torch.cuda.CUDAGraph | None] = {}
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None

    @torch.no_grad()
    def fill(self, slots: Sequence[int], prompts: Sequence[Sequence[int]], seeds: Sequence[int]) -> None:
        """Prefills prompts up to their last tokens, which the next step reads."""
        device, longest = self._model.device, max(map(len, prompts))
        tokens = torch.zeros(len(prompts), longest, dtype=torch.int64)
        for row, prompt in enumerate(prompts):
            tokens[row, : len(prompt)] = torch.tensor(prompt)
        ends = torch.tensor([len(prompt) - 1 for prompt in prompts])
        last = tokens[torch.arange(len(prompts)), ends]
        into = torch.tensor(slots, device=device)
        attend = self._storing(into, self._model.causal(longest))
        self._model.run(tokens.to(device), self._model.rotations(longest), attend)
        self._token[into], self._at[into] = last.to(device), ends.to(device)
        self._written[into], self._left[into] = 0, self._max_new
        self._seeds[into] = torch.tensor(seeds, device=device)

    def _storing(self, slots: Tensor, inner: Attend) -> Attend:
        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self._keys[layer][slots, :, : k.shape[2]] = k
            self._values[layer][slots, :, : v.shape[2]] = v
            return inner(layer, q, k, v)

        return attend

    @torch.no_grad()
    def step(self, reach: int) -> None:
        """One token for every slot. reach: above the position of every running slot's token."""
        keys = min(self.length, -(-reach // KEYS) * KEYS)
        if self._pool is None:
            self._step(keys)
        elif keys not in self._graphs:
            self._step(keys)  # warm-up: libraries allocate their workspaces
            self._graphs[keys] = None
        else:
            self._replay(keys)

    def _replay(self, keys: int) -> None:
        graph = self._graphs[keys]
        if graph is None:
            graph = self._graphs[keys] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool):
                self._step(keys)
        graph.replay()

    def _step(self, keys: int) -> None:
        everywhere, local = (
            (cos[self._at][:, None, None], sin[self._at][:, None, None]) for cos, sin in self._rotations
        )
        hidden = self._model.run(self._token[:, None], (everywhere, local), self._cached(keys))
        logits = self._model.logits(hidden[-1][:, 0])
        new = self._choose(self._masked(logits), self._seeds, self._written)
        running = self._left > 0
        column = torch.where(running, self._written, self._max_new)
        self._out[self._rows, column] = new
        ended = (new[:, None] == self._eos).any(1)
        self._token.copy_(torch.where(running, new, self._token))
        self._left.copy_(torch.where(ended, 0, (self._left - 1).clamp(min=0)))
        self._written.add_(running)
        self._at.add_(running)

    def _masked(self, logits: Tensor) -> Tensor:
        if not self._allowed.shape[1]:
            return logits
        allowed = ((self._allowed[:, :, None] >> self._bit) & 1).flatten(1)[:, : logits.shape[1]]
        return logits.masked_fill(allowed == 0, float("-inf"))

    def allow(self, bits: Tensor) -> None:
        """Masks of the next step: [slots, words] int32, token t is bit t % WORD of word t // WORD."""
        self._allowed.copy_(bits)

    def end(self, slots: Sequence[int]) -> None:
        """Marks answers as complete."""
        self._left[torch.tensor(slots, dtype=torch.int64, device=self._left.device)] = 0

    def _cached(self, keys: int) -> Attend:
        """Attention of one token per slot over the slot's cache."""
        model, at = self._model, self._at[:, None]
        back = at - self._positions[:keys]
        mask = _additive(back < 0, model.dtype)
        far = back >= model.shape.window
        window = _additive((back < 0) | far, model.dtype) if model.shape.window else mask

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self._keys[layer][self._rows, :, self._at] = k[:, :, 0]
            self._values[layer][self._rows, :, self._at] = v[:, :, 0]
            # Queries that share a key head are rows of one product: no copy of the keys for each of them.
            grouped = q.reshape(q.shape[0], k.shape[1], -1, q.shape[-1])
            seen = F.scaled_dot_product_attention(
                grouped,
                self._keys[layer][:, :, :keys],
                self._values[layer][:, :, :keys],
                (window if model.local(layer) else mask).expand(-1, k.shape[1], grouped.shape[2], -1),
                scale=model.scale,
            )
            return seen.reshape(q.shape)

        return attend

    def state(self) -> tuple[list[int], list[int], list[int]]:
        """The position of its token, tokens written and tokens left, for each slot."""
        at, written, left = torch.stack((self._at, self._written, self._left)).tolist()
        return at, written, left

    def last(self) -> list[int]:
        """The last token of each slot."""
        tokens: list[int] = self._token.tolist()
        return tokens

    def answers(self, slots: Sequence[int], written: Sequence[int]) -> list[list[int]]:
        which = torch.tensor(slots, dtype=torch.int64, device=self._out.device)
        rows: list[list[int]] = self._out[which].tolist()
        return [row[:n] for row, n in zip(rows, written, strict=True)]


def _additive(unseen: Tensor, dtype: torch.dtype) -> Tensor:
    """[slots, keys] -> [slots, 1, 1, keys]."""
    mask = torch.zeros(unseen.shape, dtype=dtype, device=unseen.device)
    return mask.masked_fill_(unseen, float("-inf"))[:, None, None]
