"""CudaTarget: the target protocol over the CUDA kernels."""

import logging
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Final, cast, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.config import EngineConfig
from paceline.errors import CacheFull
from paceline.heads.base import TargetEmbeddings
from paceline.heads.block import BlockConfig
from paceline.heads.head_checkpoint import StoredHead
from paceline.target.base import FeedRecord, PagedTarget, check_layers
from paceline.target.cuda.arguments import MAX_ROWS
from paceline.target.cuda.batch import (
    FeedRows,
    PassRows,
    SequenceRows,
    SpareSlots,
    feed_rows,
    pass_groups,
    passes,
)
from paceline.target.cuda.block_head import CudaBlock, unsupported_reason
from paceline.target.cuda.driver import GpuLauncher, Launcher
from paceline.target.cuda.graphs import BUCKETS, DENSE, ChooseKind, PassKind, PassRunner, Products, defines
from paceline.target.cuda.memory import make_cache, nbytes
from paceline.target.cuda.weights import CudaWeights, WeightType
from paceline.target.eager.target import placement
from paceline.target.kv.cache import BLOCK, PagedCache
from paceline.target.weights.model_config import ModelConfig, Weights, layer_share
from paceline.target.weights.tensors import EncodedMatrix
from paceline.types import NO_DRAFT, Bits, Draft, Feed, Sampler, Scores

log = logging.getLogger("paceline")

_BUCKET: Final = tuple(next(size for size in BUCKETS if size >= rows) for rows in range(MAX_ROWS + 1))


@dataclass(frozen=True, slots=True)
class _FeedRecord(FeedRecord):
    slots: Sequence[int]  # where each node of the draft is


@dataclass(slots=True)
class _Results:
    """What the passes of one call gave."""

    passes: list[list[PassRows]]  # each with its groups of rows
    logits: list[Tensor] = field(default_factory=list)
    hidden: list[Tensor] = field(default_factory=list)  # [taps, rows, width]
    tokens: list[int] = field(default_factory=list)  # of all passes but the last


class _ChosenTokens(Sequence[int]):
    """The tokens of the passes of one call: whoever reads them waits for the last of these passes."""

    def __init__(self, chosen: Callable[[Sequence[PassRows]], list[int]], results: _Results) -> None:
        self._chosen, self._results = chosen, results
        self._count = sum(len(rows.scored) for groups in results.passes for rows in groups)
        self._tokens: list[int] | None = None

    def read(self) -> list[int]:
        if self._tokens is None:
            self._tokens = self._results.tokens + self._chosen(self._results.passes[-1])
        return self._tokens

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[int]:
        return iter(self.read())

    def __eq__(self, other: object) -> bool:
        return self.read() == list(other) if isinstance(other, Sequence) else NotImplemented

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> list[int]: ...
    def __getitem__(self, at: int | slice) -> int | list[int]:
        return self.read()[at]


class CudaTarget(PagedTarget[_FeedRecord]):
    """A row's bits depend on its sequence alone: not on other rows, batches, chunks of a prompt or the cache.

    Unless the configuration is not deterministic: then torch multiplies bfloat16 weights in passes of more
    than 64 rows.

    Takes the tensors out of `weights`, which are of no use to anyone else afterwards.
    """

    timed_contexts: tuple[int, ...] = (256, 2048)

    def __init__(
        self,
        weights: Weights,
        config: EngineConfig,
        launcher: Launcher | None = None,
        kind: WeightType = "bf16",
    ) -> None:
        """launcher: None: the GPU that the configuration names."""
        shape = weights.shape.within(config.max_model_len)
        self.shape, self._config = shape, config
        tensors = cast(MutableMapping[str, Tensor], weights.tensors)
        encoded = cast(MutableMapping[str, EncodedMatrix], weights.encoded)
        device = placement(config)[0] if launcher is None else launcher.device
        self._weights = CudaWeights(shape, tensors, device, kind, encoded)
        self._launcher = launcher or make_launcher(shape, config, self._weights.kernels)
        self._rows, blocks, spare = make_cache(shape, config, self._launcher.device)
        super().__init__(PagedCache(self._rows, blocks), shape.max_context)
        self._spare = SpareSlots(blocks * BLOCK, spare)
        self._runner = PassRunner(
            *(self._launcher, self._weights, self._rows, self.max_context, config.max_batch),
            throughput=not config.deterministic,
        )
        self._throughput = self._runner.buffers.sums is not None
        self.invariant_rows = MAX_ROWS if self._throughput else 2**31
        self._lent: dict[tuple[int, int], Tensor] = {}  # rows of the logits' buffer
        self._last: _ChosenTokens | None = None  # of the pass that may still be running
        self.vocab_size, self.width = shape.vocab_size, shape.width
        self.layers, self.layer_share = shape.layers, layer_share(shape)
        self.fingerprint = weights.fingerprint
        self.bytes_held = self._weights.nbytes

    def describe(self) -> str:
        device = self._launcher.device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "a CPU, as a test"
        mode = ", throughput" if self._throughput else ""
        return f"cuda kernels on {device}, {name}, {self._weights.kind}{mode}"

    def memory(self) -> Mapping[str, int]:
        buffers = nbytes(self._runner.buffers) + nbytes(self._runner.histories)
        return {"weights": nbytes(self._weights), "cache": nbytes(self._rows), "buffers": buffers}

    def final_norm(self, rows: Tensor) -> Tensor:
        return F.rms_norm(rows, (self.shape.width,), self._weights.norm.to(rows.dtype), self.shape.norm_eps)

    def embeddings(self) -> TargetEmbeddings:
        return self._weights.embeddings(self.fingerprint)

    def block_runner(self, head: StoredHead) -> CudaBlock | None:
        """In graphs of its own, for a block head of a supported shape."""
        if head.card.kind != "block":
            return None
        shape, own = cast(BlockConfig, head.card.shape), self._weights
        if reason := unsupported_reason(shape, self.shape):
            log.warning("the block drafter runs on torch, which is slower here: %s", reason)
            return None
        dense = own.kernels <= DENSE
        launcher = self._launcher if dense else make_launcher(self.shape, self._config)
        runner = CudaBlock(
            shape,
            head.draft_ids,
            head.weights,
            own.embed,
            own.embeddings(self.fingerprint).head,
            self.shape,
            launcher,
            self.max_context,
        )
        if launcher.device.type == "cuda":
            runner.capture_usual()
        return runner

    def forward(self, feeds: Sequence[Feed], taps: Sequence[int] = ()) -> Scores:
        """Returns once the pass is on its way: whoever reads the tokens waits for it.

        Weights, cache and buffers are there from the start; only copies of logits and hidden states are not.
        Where the GPU has no memory for them, CacheFull has the engine try a smaller pass.
        """
        try:
            return self._forward(feeds, taps)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
        try:
            return self._forward(feeds, taps)
        except torch.OutOfMemoryError:
            raise CacheFull(
                "the GPU has no memory left for the results of a pass: give a smaller cache_mb or max_batch, "
                "or end what else uses this GPU"
            ) from None

    def _forward(self, feeds: Sequence[Feed], taps: Sequence[int]) -> Scores:
        tapped = self._check_taps(taps) if taps else ()
        self._finish_last()
        cache, bases = self._cache, []
        for feed in feeds:  # before any row is written: a full cache leaves every sequence as it was
            cache.extend(feed.seq_id, len(feed.tokens) + _depth(feed.draft))
            bases.append(cache.length(feed.seq_id))
        self._spare.reset()
        rows = [
            self._feed_rows(feed, feed.draft, base, _scored_from(feed), feed.sampler)
            for feed, base in zip(feeds, bases, strict=True)
        ]
        results = self._run(rows, (), tapped)
        starts, firsts = [0], [0]  # from here on while the GPU works
        for feed, base, one in zip(feeds, bases, rows, strict=True):
            fed = len(feed.tokens)
            starts.append(starts[-1] + (1 + len(feed.draft)) * feed.scored)
            firsts.append(firsts[-1] + len(one))
            self._feeds[feed.seq_id] = _FeedRecord(base, tuple(feed.tokens), feed.draft, one.slots[fed:])
        states = _joined(results.hidden, 1).unbind() if tapped else ()
        hidden = dict(zip(tapped, states, strict=True))
        tokens: Sequence[int] = ()
        if any(rows.chosen for groups in results.passes for rows in groups):
            tokens = self._last = _ChosenTokens(self._chosen, results)
        return Scores(self._logits(results), tuple(starts[:-1]), tuple(firsts[:-1]), hidden, tokens, True)

    def _check_taps(self, taps: Sequence[int]) -> tuple[int, ...]:
        tapped = tuple(sorted(set(taps)))
        if not 0 <= tapped[0] <= tapped[-1] < self.layers:
            raise ValueError(f"taps={tapped!r}: the model has layers 0 to {self.layers - 1}")
        return tapped

    def _finish_last(self) -> None:
        """The next pass overwrites the tokens of the last one: they are read now, if nobody has."""
        if self._last is not None:
            self._last.read()
            self._last = None

    def skip_forward(self, feeds: Sequence[Feed], starts: Sequence[int], layers: Sequence[int]) -> Scores:
        check_layers(layers, self.layers)
        self._finish_last()
        self._reserve_skip_rows(feeds, starts)
        rows = [
            self._feed_rows(feed, NO_DRAFT, start, len(feed.tokens) - 1)
            for feed, start in zip(feeds, starts, strict=True)
        ]
        results = self._run(rows, tuple(layers), ())
        return Scores(self._logits(results), tuple(range(len(feeds))))

    def replay_last_pass(self) -> None:
        """The kernels of the last pass alone, for benchmarks."""
        self._runner.replay_last()

    def close(self, seq_id: str) -> None:
        super().close(seq_id)
        self._runner.tables.drop(seq_id)
        self._runner.histories.drop(seq_id)

    def _feed_rows(
        self, feed: Feed, draft: Draft, start: int, scored_from: int, sampler: Sampler | None = None
    ) -> FeedRows:

        def slots(first: int, end: int) -> list[int]:
            return self._cache.slots(feed.seq_id, first, end)

        rows = feed_rows(feed.seq_id, feed.tokens, draft, start, slots, self._spare, scored_from, sampler)
        if not 0 <= min(rows.tokens) <= max(rows.tokens) < self.vocab_size:
            raise ValueError(f"a token is not one of the model's {self.vocab_size}")
        return rows

    def _run(self, feeds: Sequence[FeedRows], layers: tuple[int, ...], taps: tuple[int, ...]) -> _Results:
        """Launches the passes. The tokens of the last one are still to be waited for."""
        buffers, limit = self._runner.buffers, len(self._runner.groups)
        cut = list(passes(feeds, buffers.max_parts))
        results = _Results([cut[i : i + limit] for i in range(0, len(cut), limit)])
        for i, groups in enumerate(results.passes):
            if i:
                results.tokens += self._chosen(results.passes[i - 1])  # the next pass overwrites them
            self._launch(groups, layers, taps)
            for which, rows in enumerate(groups):
                if rows.scored:
                    results.logits.append(self._rows_of_logits(rows, which, lent=len(cut) == 1))
                if taps:
                    first = which * MAX_ROWS
                    states = buffers.taps(taps)[:, first : first + len(rows.tokens)]
                    results.hidden.append(states.clone())
        return results

    def _launch(self, groups: Sequence[PassRows], layers: tuple[int, ...], taps: tuple[int, ...]) -> None:
        """One pass. Its tokens are chosen in the same graph, unless their masks are still being computed."""
        bucket = _BUCKET[len(groups[0].tokens)] if len(groups) == 1 else MAX_ROWS
        choose = _choose_kind(groups, bucket) if any(rows.chosen for rows in groups) else None
        waits = choose is not None and choose.masked
        scored = any(rows.scored for rows in groups)
        kind = PassKind(bucket, layers, taps, scored, None if waits else choose, len(groups))
        self._runner.run(groups, self._cache.table, kind)
        if choose is not None and waits:
            for which, rows in enumerate(groups):
                masks = [_masks(rows, s) for s in rows.sequences]
                self._runner.choose(rows, masks, choose._replace(group=which))

    def _rows_of_logits(self, rows: PassRows, group: int, lent: bool) -> Tensor:
        """The scored rows, which ascend. lent: good until the next pass overwrites them."""
        logits, first, last = self._runner.groups[group].buffers.logits, rows.scored[0], rows.scored[-1]
        if last - first + 1 != len(rows.scored):
            return logits[rows.scored, : self.vocab_size]
        if not lent or not rows.all_chosen:
            return logits[first : last + 1, : self.vocab_size].clone()
        if (first, last) not in self._lent:
            self._lent[first, last] = logits[first : last + 1, : self.vocab_size]
        return self._lent[first, last]

    def _logits(self, results: _Results) -> Tensor:
        if not results.logits:
            return self._runner.buffers.logits.new_empty(0, self.vocab_size)
        return _joined(results.logits)

    def _chosen(self, groups: Sequence[PassRows]) -> list[int]:
        """The token of each scored row of a pass, -1 where nobody asked for it."""
        if len(groups) == 1:
            return self._chosen_of(groups[0], 0)
        return [token for which, rows in enumerate(groups) for token in self._chosen_of(rows, which)]

    def _chosen_of(self, rows: PassRows, group: int) -> list[int]:
        if not rows.chosen:
            return [-1] * len(rows.scored)
        chosen = self._runner.groups[group].chosen(len(rows.tokens))
        if rows.all_chosen:
            return chosen if len(chosen) == len(rows.scored) else [chosen[row] for row in rows.scored]
        asked = {
            row for s in rows.sequences if s.sampler for row in range(s.scored_row, s.first_row + s.row_count)
        }
        return [chosen[row] if row in asked else -1 for row in rows.scored]

    def _move_draft(self, seq_id: str, start: int, path: Sequence[int], fed: _FeedRecord) -> None:
        source = [fed.slots[node] for node in path]
        target = self._cache.slots(seq_id, start, start + len(path))
        if source != target:
            self._runner.move(source, target)

    def _fill_with_noise(self, slots: list[int]) -> None:
        at = torch.tensor(slots, device=self._launcher.device)
        with torch.inference_mode():
            for cached in (self._rows.k, self._rows.v):
                noise = torch.randn(cached.shape[3], device=cached.device, dtype=cached.dtype)
                cached.index_copy_(2, at, noise.expand(*cached.shape[:2], len(slots), -1).contiguous())


def make_launcher(shape: ModelConfig, config: EngineConfig, products: Products = DENSE) -> GpuLauncher:
    """Builds the kernels for this model and GPU. Raises NotCompiled where it cannot."""
    device, _ = placement(config)
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    return GpuLauncher(device, defines(shape, multiprocessors, products, pass_groups(config.max_batch)))


def _scored_from(feed: Feed) -> int:
    return len(feed.tokens) - 1 if feed.scored else len(feed.tokens) + len(feed.draft)


def _depth(draft: Draft) -> int:
    if draft.parents is None:
        return len(draft.tokens)
    return max(map(len, draft.paths()), default=0)


def _choose_kind(groups: Sequence[PassRows], bucket: int) -> ChooseKind:
    cut = history = masked = False
    for rows in groups:
        for s in rows.sequences:
            if (sampler := s.sampler) is not None:
                cut = cut or sampler.cuts
                history = history or bool(sampler.bias) or sampler.penalises
                masked = masked or sampler.masks is not None
    return ChooseKind(bucket, cut, history, masked)


def _masks(rows: PassRows, s: SequenceRows) -> Sequence[Bits | Exception | None]:
    """Of the sequence's scored rows. Where they cannot be had, its tokens are left to the host."""
    if s.sampler is None or s.sampler.masks is None:
        return ()
    try:
        return s.sampler.masks()
    except Exception:  # the engine asks again, and tells the request
        rows.chosen -= s.first_row + s.row_count - s.scored_row
        s.sampler = None
        return ()


def _joined(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)


assert max(BUCKETS) == MAX_ROWS
