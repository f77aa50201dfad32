"""A target that replays answers, with the times of a GPU's passes: what the host adds to them, without a GPU.

Passes run beside the host, as the CUDA target's do: `forward` returns at once, and whoever reads the tokens
waits. Where there are masks, tokens are chosen in a launch of its own after the pass, once they are known.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from time import perf_counter
from typing import Final, overload

import torch

from paceline.target.cost import CostTable
from paceline.types import CacheStats, Feed, Scores, Seq

# Milliseconds of SmolLM2's passes on an H200, by rows.
GPU: Final = CostTable({256: {1: 0.40, 2: 0.41, 8: 0.42, 16: 0.44, 32: 0.50, 64: 0.65}})
CHOOSE_S: Final = 20e-6  # of the launch that chooses tokens by masks
_NO_LOGITS: Final = torch.empty(0, 0)

Answers = Mapping[tuple[int, ...], Sequence[int]]  # by prompt


class StandIn:
    """Prompts are in its cache. Draft nodes below a wrong one have any choice: nobody reads it."""

    max_context = 1 << 16
    capacity = 1 << 30
    invariant_rows = 1 << 31
    bytes_held = 0
    fingerprint = "stand-in"
    cache_stats = CacheStats(0, 0, 0, 0, 0, 0, 0)

    def __init__(self, vocab_size: int, cost: CostTable = GPU) -> None:
        self.vocab_size, self._cost = vocab_size, cost
        self.answers: Answers = {}
        self.busy_s = 0.0  # of all passes
        self._free_at = 0.0  # when the last pass ends
        self._of: dict[str, tuple[int, Sequence[int]]] = {}  # prompt length and answer
        self._rows: dict[str, int] = {}  # cached

    def describe(self) -> str:
        return "a stand-in with the times of a GPU"

    def open(self, seq: Seq) -> int:
        self._of[seq.id] = seq.prompt_len, self.answers[tuple(seq.tokens[: seq.prompt_len])]
        self._rows[seq.id] = len(seq.tokens) - 1
        return self._rows[seq.id]

    def restore(self, seq_id: str, seconds: float) -> tuple[int, bool]:
        return self._rows[seq_id], False

    def forward(self, feeds: Sequence[Feed], taps: Sequence[int] = ()) -> Scores:
        tokens, starts, rows = list[int](), list[int](), 0
        for feed in feeds:
            starts.append(len(tokens))
            rows += len(feed.tokens) + len(feed.draft)
            tokens += self._choices(feed)
        took_s = self._cost(rows, 256) / 1000
        self.busy_s += took_s
        self._free_at = max(self._free_at, perf_counter()) + took_s
        asked = [feed.sampler.masks for feed in feeds if feed.sampler is not None and feed.sampler.masks]
        for masks in asked:
            masks()
        if asked:
            self._free_at = max(self._free_at, perf_counter()) + CHOOSE_S
        return Scores(_NO_LOGITS, tuple(starts), (), {}, _Tokens(tokens, self._free_at), running=True)

    def _choices(self, feed: Feed) -> list[int]:
        prompt, answer = self._of[feed.seq_id]
        first, draft = self._rows[feed.seq_id] + len(feed.tokens) - prompt, feed.draft
        if draft.parents is None:
            found = list(answer[first : first + 1 + len(draft.tokens)])
            return found + [0] * (1 + len(draft.tokens) - len(found))
        places = [first, *(first + draft.depth(node) for node in range(len(draft.tokens)))]
        return [answer[place] if place < len(answer) else 0 for place in places]

    def keep(self, seq_id: str, length: int, path: Sequence[int] = ()) -> None:
        self._rows[seq_id] = length + len(path)

    def close(self, seq_id: str) -> None:
        del self._of[seq_id], self._rows[seq_id]

    def forget(self, tenant: str) -> None:
        return


class _Tokens(Sequence[int]):
    def __init__(self, tokens: list[int], ready: float) -> None:
        self._tokens, self._ready = tokens, ready

    def _read(self) -> list[int]:
        while perf_counter() < self._ready:
            os.sched_yield()
        return self._tokens

    def __len__(self) -> int:
        return len(self._tokens)

    def __iter__(self) -> Iterator[int]:
        return iter(self._read())

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> list[int]: ...
    def __getitem__(self, at: int | slice) -> int | list[int]:
        return self._read()[at]
