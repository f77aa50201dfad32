"""Rollouts: answers of the target with continuous batching, on a GPU."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np
import torch
from torch import Tensor

from paceline.config import require_min
from paceline.errors import ConstraintError
from paceline.train.data.rollout_cache import KEYS, WORD, Choose, Slots, bytes_per_token
from paceline.train.train_decoder import TrainDecoder
from paceline.types import Cursor

STEPS: Final = 16  # between two checks for complete answers
CPU_CACHE_GB: Final = 1.0
FREE_SHARE: Final = 0.6  # of a GPU's free memory that the cache may take
SHORTEST_CACHE: Final = 4 * KEYS  # positions; prompts are answered beside others of up to twice their length
NUCLEUS: Final = 512  # tokens that top-p keeps, at most
_32: Final = 0xFFFFFFFF

Progress = Callable[[int, int], None]  # answers done, answers in total


@dataclass(frozen=True, slots=True)
class Job:
    """One answer to be written."""

    prompt: Sequence[int]
    sampled: bool = False  # False: greedy
    seed: int = 0  # of its noise; below 2**63
    cursor: Callable[[], Cursor] | None = None  # at the start of the grammar it is written under, if any


@dataclass(frozen=True, slots=True)
class Rollout:
    """How answers are sampled and batched."""

    max_new: int = 384  # tokens of an answer
    temperature: float = 0.7  # of sampled answers
    top_p: float = 0.9
    slots: int = 1024  # answers at once
    cache_gb: float = 40.0  # at most; less where there is less
    prefill_tokens: int = 65536  # of prompts in one pass

    def __post_init__(self) -> None:
        require_min(self, max_new=1, slots=1, prefill_tokens=1)


def roll_out(
    model: TrainDecoder,
    jobs: Sequence[Job],
    eos: Sequence[int],
    how: Rollout,
    progress: Progress | None = None,
) -> list[list[int]]:
    """The answers in the order of their jobs, each with the token that ended it, if any did.

    An answer whose grammar has no valid continuation is empty.
    """
    answers: list[list[int]] = [[]] * len(jobs)
    done = 0
    for length, sampled, bound, members in _classes(jobs, how.max_new):
        room = _cache_bytes(model, how) // (bytes_per_token(model) * length)
        count = max(1, min(how.slots, len(members), room))
        make = partial(Slots, model, count, length, how.max_new, eos, _chooser(sampled, how), bound)
        masks = _GrammarMasks(count, model.shape.vocab_size) if bound else None
        for which, answer in _answered(make, jobs, members, how.prefill_tokens, masks):
            answers[which] = answer
            done += 1
            if progress is not None:
                progress(done, len(jobs))
    return answers


def _cache_bytes(model: TrainDecoder, how: Rollout) -> int:
    """Memory for the KV cache."""
    if model.device.type != "cuda":
        return int(min(how.cache_gb, CPU_CACHE_GB) * 1e9)
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(model.device)
    return int(min(how.cache_gb * 1e9, FREE_SHARE * free))


def _chooser(sampled: bool, how: Rollout) -> Choose:
    def choose(logits: Tensor, seeds: Tensor, index: Tensor) -> Tensor:
        if not sampled:
            return greedy(logits)
        return nucleus(logits, how.temperature, how.top_p, seeds, index)

    return choose


def _classes(jobs: Sequence[Job], max_new: int) -> Iterator[tuple[int, bool, bool, list[int]]]:
    """Jobs with one sampling method that fit one cache length, the shortest prompts first."""
    classes: dict[tuple[int, bool, bool], list[int]] = defaultdict(list)
    for i, job in enumerate(jobs):
        length = SHORTEST_CACHE
        while length < len(job.prompt) + max_new + STEPS:
            length *= 2
        classes[length, job.sampled, job.cursor is not None].append(i)
    for (length, sampled, bound), members in sorted(classes.items()):
        yield length, sampled, bound, sorted(members, key=lambda i: len(jobs[i].prompt))


class _GrammarMasks:
    """The grammar cursors of running slots, and their token masks."""

    def __init__(self, slots: int, vocab_size: int) -> None:
        self._cursors: dict[int, Cursor] = {}
        self._bits = np.full((slots, -(-vocab_size // WORD)), 0xFFFFFFFF, np.uint32)
        self.broken: set[int] = set()  # slots without a valid continuation

    def begin(self, slot: int, job: Job) -> None:
        assert job.cursor is not None
        self.broken.discard(slot)
        try:
            self._cursors[slot] = job.cursor()
            self._fill_mask(slot)
        except ConstraintError:
            self.broken.add(slot)

    def bits(self) -> Tensor:
        return torch.from_numpy(self._bits.view(np.int32))

    def read(self, tokens: Sequence[int]) -> list[int]:
        """tokens: the last of each slot. Returns the slots whose answers are complete."""
        ended = set(self.broken)
        for slot, cursor in self._cursors.items():
            try:
                if cursor.advance(tokens[slot]) and not cursor.finished:
                    self._fill_mask(slot)
                else:
                    ended.add(slot)
            except ConstraintError:
                self.broken.add(slot)
                ended.add(slot)
        for slot in ended & self._cursors.keys():
            del self._cursors[slot]
        return sorted(ended)

    def _fill_mask(self, slot: int) -> None:
        if not self._cursors[slot].fill(self._bits[slot]):
            self._bits[slot] = 0xFFFFFFFF


def _answered(
    make: Callable[[], Slots],
    jobs: Sequence[Job],
    waiting: Sequence[int],
    prefill_tokens: int,
    masks: _GrammarMasks | None,
) -> Iterator[tuple[int, list[int]]]:
    """Jobs and answers as they complete. The cache is freed afterwards."""
    slots = make()
    queue, running = list(reversed(waiting)), dict[int, int]()  # running: the job of each slot
    while queue or running:
        free = [slot for slot in range(slots.count) if slot not in running]
        if queue and len(free) * 8 >= slots.count:  # a pass for fewer does not pay
            taken = {slot: queue.pop() for slot in free[: len(queue)]}
            for part in _prefill_groups(taken, jobs, prefill_tokens):
                chosen = [jobs[taken[slot]] for slot in part]
                slots.fill(part, [job.prompt for job in chosen], [job.seed for job in chosen])
            if masks is not None:
                for slot, which in taken.items():
                    masks.begin(slot, jobs[which])
            running |= taken
        at, _, _ = slots.state()
        _advance(slots, max(at[slot] for slot in running) + 1, masks)
        _, written, left = slots.state()
        complete = [slot for slot in running if not left[slot]]
        for slot, answer in zip(
            complete, slots.answers(complete, [written[s] for s in complete]), strict=True
        ):
            yield running.pop(slot), [] if masks is not None and slot in masks.broken else answer


def _advance(slots: Slots, reach: int, masks: _GrammarMasks | None) -> None:
    """Several steps; under a grammar one, since the next mask depends on it."""
    if masks is None:
        for step in range(STEPS):
            slots.step(reach + step)
    else:
        slots.allow(masks.bits())
        slots.step(reach)
        slots.end(masks.read(slots.last()))


def _prefill_groups(taken: dict[int, int], jobs: Sequence[Job], max_tokens: int) -> Iterator[list[int]]:
    """Groups of slots whose padded prompts have at most `max_tokens` tokens, or single slots."""
    piece: list[int] = []
    for slot, which in taken.items():  # prompts are ordered by length
        if piece and (len(piece) + 1) * len(jobs[which].prompt) > max_tokens:
            yield piece
            piece = []
        piece.append(slot)
    if piece:
        yield piece


# Sampling of many rows at once, on any device: the same tokens as sampling/ chooses, by the counter-based
# Gumbel noise of sampling/noise.py (splitmix64). An answer depends on its seed, not on its neighbours.


def greedy(logits: Tensor) -> Tensor:
    """[rows, vocab] -> [rows]."""
    return logits.argmax(-1)


def nucleus(logits: Tensor, temperature: float, top_p: float, seeds: Tensor, index: Tensor) -> Tensor:
    """logits [rows, vocab], seeds and output indices [rows] int64 -> tokens [rows]."""
    best, ids = logits.topk(min(NUCLEUS, logits.shape[-1]), -1)
    x = (best - best[:, :1]) / temperature
    total = ((logits - best[:, :1]) / temperature).exp().sum(-1, keepdim=True, dtype=torch.float64)
    weight = x.double().exp()
    before = weight.cumsum(-1) - weight  # the weight of likelier tokens
    score = x.double() + _gumbel(_keys(seeds, index), ids)
    score = score.masked_fill(before >= top_p * total, float("-inf"))
    return ids.gather(1, score.argmax(-1, keepdim=True))[:, 0]


def _gumbel(keys: tuple[Tensor, Tensor], ids: Tensor) -> Tensor:
    """[rows] keys, [rows, n] token ids -> [rows, n] float64."""
    x = (ids * 0x9E3779B1) & _32
    x = x ^ (x >> 15) ^ keys[0][:, None]
    x = (x * (keys[1] | 1)[:, None]) & _32
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _32
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _32
    x = x ^ (x >> 16)
    return -torch.log(-torch.log((x.double() + 0.5) * 2.0**-32))


def _keys(seeds: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """noise.noise_key of each row, for the first choice."""
    x = _mix64(_mix64(seeds + _signed(0x9E3779B97F4A7C15)))
    x = _mix64(x ^ (index << 20))
    return _shifted(x, 32), x & _32


def _mix64(x: Tensor) -> Tensor:
    x = (x ^ _shifted(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shifted(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Logical shift to the right."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(x: int) -> int:
    return x - (1 << 64) if x >= 1 << 63 else x
