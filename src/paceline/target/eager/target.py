"""The target in plain torch: a decoder, its KV cache, and the bookkeeping between passes."""

from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from paceline.config import FLOAT_DTYPES, EngineConfig
from paceline.errors import SettingError
from paceline.heads.base import TargetEmbeddings
from paceline.target import hardware
from paceline.target.base import FeedRecord, PagedTarget, check_layers
from paceline.target.eager.attention import KEY_TILE, Span
from paceline.target.eager.decoder import Batch, Decoder, PassOutput
from paceline.target.eager.linear import CUDA_TILE, MAX_ROWS
from paceline.target.kv.cache import BLOCK, PagedCache, TorchKVMemory, blocks_in
from paceline.target.weights.model_config import ModelConfig, Weights, layer_share
from paceline.target.weights.reader import load
from paceline.types import Draft, Feed, Scores, common_prefix


def placement(config: EngineConfig) -> tuple[torch.device, torch.dtype]:
    """Device and type of the weights; to be called before they are loaded."""
    name = config.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise SettingError("device", name, "auto, cpu, cuda or cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise SettingError("device", name, "auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SettingError("device", name, "cpu", "torch sees no GPU here")
    usual = torch.float32 if device.type == "cpu" else torch.bfloat16
    dtype = cast(torch.dtype, getattr(torch, config.dtype)) if config.dtype in FLOAT_DTYPES else usual
    if device.type == "cpu":
        hardware.prepare(dtype)
    return device, dtype


@dataclass(frozen=True, slots=True)
class _FeedRecord(FeedRecord):
    first_node: int  # row of the pass
    outcome: PassOutput


class TorchTarget(PagedTarget[_FeedRecord]):
    """Takes the tensors out of `weights`, which are of no use to anyone else afterwards."""

    def __init__(self, weights: Weights, config: EngineConfig) -> None:
        device, _ = placement(config)
        if device.type == "cpu":
            hardware.set_torch_threads(config.threads)
        tensors = cast(MutableMapping[str, Tensor], weights.tensors)
        self._decoder = Decoder(weights.shape.within(config.max_model_len), tensors, device)
        hardware.trim_heap()
        cache, self._kv = _make_cache(weights.shape, config.cache_mb, self._decoder)
        super().__init__(cache, weights.shape.max_context)
        self._keys, self._values = self._kv.k.unbind(0), self._kv.v.unbind(0)
        self.vocab_size, self.width = weights.shape.vocab_size, weights.shape.width
        self.layers, self.layer_share = weights.shape.layers, layer_share(weights.shape)
        self.fingerprint = weights.fingerprint
        self.bytes_held = self._decoder.bytes_held
        self.row_tile = self._decoder.tile.size
        self.invariant_rows = MAX_ROWS if device.type == "cpu" else CUDA_TILE

    @classmethod
    def load(cls, path: Path, config: EngineConfig) -> "TorchTarget":
        """From a GGUF file or a folder."""
        _, dtype = placement(config)
        return cls(load(path, dtype), config)

    def describe(self) -> str:
        device, dtype = self._decoder.device, str(self._decoder.dtype).removeprefix("torch.")
        gpu = device.type == "cuda"
        on = torch.cuda.get_device_name(device) if gpu else f"{torch.get_num_threads()} threads"
        return f"torch on {device}, {on}, {dtype}"

    def final_norm(self, rows: Tensor) -> Tensor:
        return self._decoder.final_norm(rows)

    def embeddings(self) -> TargetEmbeddings:
        return self._decoder.embeddings(self.fingerprint)

    def forward(self, feeds: Sequence[Feed], taps: Sequence[int] = ()) -> Scores:
        for feed in feeds:  # before any row is written: a full cache leaves every sequence as it was
            self._cache.extend(feed.seq_id, len(feed.tokens) + _depth(feed.draft))
        tokens: list[int] = []
        spans: list[Span] = []
        scored: list[int] = []
        starts, firsts, first_nodes = [], [], []
        for feed in feeds:
            firsts.append(len(tokens))
            spans += self._spans(feed, len(tokens))
            tokens += feed.tokens
            first_nodes.append(len(tokens))
            tokens += feed.draft.tokens
            starts.append(len(scored))
            if feed.scored:
                scored += range(first_nodes[-1] - 1, len(tokens))
        stash = any(_branches(feed.draft) for feed in feeds)
        outcome = self._decoder.forward(Batch(tokens, spans, scored, taps, stash), self._keys, self._values)
        for feed, first_node in zip(feeds, first_nodes, strict=True):
            base = self._cache.length(feed.seq_id)
            self._feeds[feed.seq_id] = _FeedRecord(base, tuple(feed.tokens), feed.draft, first_node, outcome)
        return Scores(outcome.logits, tuple(starts), tuple(firsts), outcome.hidden)

    def skip_forward(self, feeds: Sequence[Feed], starts: Sequence[int], layers: Sequence[int]) -> Scores:
        check_layers(layers, self.layers)
        self._reserve_skip_rows(feeds, starts)
        tokens: list[int] = []
        spans: list[Span] = []
        scored: list[int] = []
        for feed, start in zip(feeds, starts, strict=True):
            first, end = len(tokens), len(tokens) + len(feed.tokens)
            spans += self._cut(feed.seq_id, range(first, end), start)
            tokens += feed.tokens
            scored.append(end - 1)
        batch = Batch(tokens, spans, scored, layers=layers)
        outcome = self._decoder.forward(batch, self._keys, self._values)
        return Scores(outcome.logits, tuple(range(len(feeds))))

    def _spans(self, feed: Feed, first_row: int) -> Iterator[Span]:
        """The feed's rows are its tokens, then its nodes in their order."""
        start, nodes = self._cache.length(feed.seq_id), first_row + len(feed.tokens)
        before, *others = sorted(feed.draft.paths()) or [()]
        rows = [*range(first_row, nodes), *(nodes + node for node in before)]
        yield from self._cut(feed.seq_id, rows, start)
        for path in others:
            shared = common_prefix(before, path)
            rows = [nodes + node for node in path[shared:]]
            yield from self._cut(feed.seq_id, rows, start + len(feed.tokens) + shared)
            before = path

    def _cut(self, seq_id: str, rows: Sequence[int], start: int) -> Iterator[Span]:
        """One span, or several where kernels must be given a fixed number of rows."""
        tile = self._decoder.attention_tile
        size = tile.size if tile.exact else len(rows)
        for i in range(0, len(rows), size):
            part = tuple(rows[i : i + size])
            stop = start + i + len(part)
            slots = self._cache.slots(seq_id, start + i, stop)
            yield Span(part, start + i, slots, self._key_slots(seq_id, stop))

    def _key_slots(self, seq_id: str, stop: int) -> slice | list[int]:
        length = -(-stop // KEY_TILE) * KEY_TILE
        first = self._cache.first_slot(seq_id, stop)
        if first is not None:
            return slice(first, first + length)
        slots = self._cache.slots(seq_id, 0, stop)
        return slots + slots[:1] * (length - stop)

    def _move_draft(self, seq_id: str, start: int, path: Sequence[int], fed: _FeedRecord) -> None:
        """A tree's paths are written over one another, and the last one stays."""
        if not _branches(fed.draft):
            return
        device = self._decoder.device
        slots = torch.tensor(self._cache.slots(seq_id, start, start + len(path)), device=device)
        rows = torch.tensor([fed.outcome.stash_rows[fed.first_node + node] for node in path], device=device)
        keys, values = zip(*fed.outcome.stash, strict=True)
        with torch.inference_mode():
            for cached, new in ((self._kv.k, keys), (self._kv.v, values)):
                moved = torch.stack(new).index_select(2, rows)
                cached.index_copy_(2, slots, moved.to(cached.dtype))


def _depth(draft: Draft) -> int:
    return max(map(len, draft.paths()), default=0)


def _branches(draft: Draft) -> bool:
    return len(draft.paths()) > 1


def cache_dtype(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """The CPU reads float32 at once, whatever the weights are in. dtype: of the weights."""
    return torch.float32 if device.type == "cpu" else dtype


def _make_cache(shape: ModelConfig, cache_mb: int, decoder: Decoder) -> tuple[PagedCache, TorchKVMemory]:
    dtype = cache_dtype(decoder.device, decoder.dtype)
    blocks = blocks_in(cache_mb, shape, dtype.itemsize)
    try:
        rows = TorchKVMemory(
            shape.layers, shape.kv_heads, shape.head_dim, blocks * BLOCK, dtype, device=decoder.device
        )
    except RuntimeError:  # torch's word for memory it cannot have
        raise SettingError("cache_mb", cache_mb, "less: it does not fit into memory") from None
    return PagedCache(rows, blocks), rows
