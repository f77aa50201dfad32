"""The cost of a pass and of a round on a GPU: python -m bench.gpu [PART ...] [--model GGUF] [--out FOLDER]

Runs with torch, numpy, tokenizers and safetensors alone. Parts:

ceilings      copy bandwidth and matrix products, which everything else is measured against
passes        milliseconds of a pass by rows and context, real and random weights, and the share of the floor
host          the host's part of a round: from a pass's tokens to the next launch
profile       where that time goes
eager         the same for paceline's eager torch target
batches       milliseconds of a pass of several sequences
kernels       microseconds of each kernel in such a pass
rounds        tokens/s of the whole engine on recorded turns of agents, plain and with drafters: equal texts?
trained       the same with the block drafter of the package, on turns of agents and on chats
heads         milliseconds of a block drafter's draft, and its share of a pass
beside        `rounds` on fewer and shorter turns, with Transformers in the same process
rollouts      answers a minute for training: many sampled answers to recorded prompts
compiled      tokens/s of Transformers compiled with a static cache

The floor of a pass is the bytes it must read (weights but the embedding table, and the cache) over the
bandwidth.
"""

import argparse
import gc
import json
import os
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from paceline.config import EngineConfig, SamplingParams, SpecConfig
from paceline.drafters import model_free
from paceline.drafters.heads import BlockDrafter
from paceline.engine.control import Fixed, Rate
from paceline.engine.engine import Engine
from paceline.engine.estimates import Prior
from paceline.heads.block import BlockConfig
from paceline.heads.head_checkpoint import read
from paceline.heads.local_heads import SHIPPED
from paceline.heads.registry import parameter_shapes
from paceline.heads.runner import AnchorContext, CacheRows, SampleCall, TapInput
from paceline.target.base import ModelTarget
from paceline.target.cost import cost_table
from paceline.target.cuda.block_head import CudaBlock
from paceline.target.cuda.packing import GGUF
from paceline.target.cuda.target import CudaTarget
from paceline.target.cuda.weights import WeightType
from paceline.target.eager.target import TorchTarget
from paceline.target.load import load_target
from paceline.target.weights.dequant import ENCODINGS
from paceline.target.weights.model_config import ModelConfig, Rope, Weights
from paceline.target.weights.reader import load
from paceline.target.weights.tensors import EncodedMatrix
from paceline.types import Bits, Cursor, Draft, Drafter, Feed, Seq

ROWS: Final = (1, 8, 16, 32, 64)
CONTEXTS: Final = (300, 4000, 16000)
SHAPES: Final = {
    "135m": ModelConfig("llama", 30, 576, 9, 3, 64, 1536, 49152, 32768, 1e-5, Rope(100000.0)),
    "1.5b": ModelConfig("qwen2", 28, 1536, 12, 2, 128, 8960, 151936, 32768, 1e-6, Rope(1000000.0)),
    "8b": ModelConfig("llama", 32, 4096, 32, 8, 128, 14336, 128256, 32768, 1e-5, Rope(500000.0)),
    "32b": ModelConfig("qwen2", 64, 5120, 40, 8, 128, 27648, 152064, 32768, 1e-6, Rope(1000000.0)),
    "70b": ModelConfig("llama", 80, 8192, 64, 8, 128, 28672, 128256, 32768, 1e-5, Rope(500000.0)),
}
KINDS: Final[dict[str, tuple[str, ...]]] = {  # of weights; else bf16
    "135m": ("bf16", "gguf"),
    "8b": ("bf16", "int8", "fp8", "q4_0", "q4_k_m"),
    "70b": ("int8", "fp8", "q4_0", "q4_k_m"),
}
REPEATS: Final = 3
TIED: Final = ("135m", "1.5b")


class Notes:
    """Prints every measurement and keeps it as a line of JSON."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = folder / "gpu.jsonl"
        self.bandwidth = 4.3e12  # bytes a second, until measured

    def __call__(self, part: str, **values: object) -> None:
        row = {k: float(f"{v:.5g}") if isinstance(v, float) else v for k, v in values.items()}
        print(part, json.dumps(row), flush=True)
        with self._file.open("a") as stream:
            stream.write(json.dumps({"part": part, **row}) + "\n")


def timed(run: Callable[[], object], seconds: float = 0.15, samples: int = 9) -> float:
    """Median milliseconds, by the GPU's events."""
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    event: Any = torch.cuda.Event
    start, end = (event(enable_timing=True) for _ in range(2))

    def sample(count: int) -> float:
        start.record()
        for _ in range(count):
            run()
        end.record()
        torch.cuda.synchronize()
        return float(start.elapsed_time(end)) / count

    count = max(1, min(200, int(seconds * 1000 / samples / max(sample(1), 1e-3))))
    return median(sample(count) for _ in range(samples))


class RandomTensors(MutableMapping[str, Tensor]):
    """Each tensor is made on the GPU when it is taken: a model need not fit there in bfloat16."""

    def __init__(self, shape: ModelConfig, tied: bool) -> None:
        width, ff, vocab = shape.width, shape.ff_width, shape.vocab_size
        q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        sizes = {"q": (q, width), "k": (kv, width), "v": (kv, width), "o": (width, q)}
        sizes |= {"gate": (ff, width), "up": (ff, width), "down": (width, ff)}
        layer: dict[str, tuple[int, ...]] = {**sizes, "attn_norm": (width,), "ffn_norm": (width,)}
        if shape.architecture == "qwen2":
            layer |= {f"{p}_bias": sizes[p][:1] for p in "qkv"}
        self._sizes: dict[str, tuple[int, ...]] = {"embed": (vocab, width), "norm": (width,)}
        if not tied:
            self._sizes["head"] = (vocab, width)
        for i in range(shape.layers):
            self._sizes |= {f"layers.{i}.{part}": size for part, size in layer.items()}
        self._generator = torch.Generator("cuda").manual_seed(0)

    def __getitem__(self, name: str) -> Tensor:
        size = self._sizes[name]
        made = torch.empty(*size, device="cuda", dtype=torch.bfloat16)
        scale = 0.1 if len(size) == 1 else size[1] ** -0.5 * (4 if name == "embed" else 1)
        made.normal_(0, scale, generator=self._generator)
        return made.add_(1) if name.endswith("norm") else made

    def __contains__(self, name: object) -> bool:
        return name in self._sizes

    def __setitem__(self, name: str, tensor: Tensor) -> None:
        raise TypeError("random tensors are only read")

    def __delitem__(self, name: str) -> None:
        del self._sizes[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._sizes)

    def __len__(self) -> int:
        return len(self._sizes)


class RandomBlocks(MutableMapping[str, EncodedMatrix]):
    """Matrices of RandomTensors as a GGUF file of this kind would hold them, made when they are taken."""

    def __init__(self, tensors: RandomTensors, kind: str, layers: int) -> None:
        self._sizes: dict[str, tuple[int, int]] = {}
        self._kind, self._layers = kind, layers
        for name, size in list(tensors._sizes.items()):
            if len(size) == 2 and (name != "embed" or "head" not in tensors):
                self._sizes[name] = (size[0], size[1])
                if name != "embed":
                    del tensors[name]

    def _encoding(self, name: str) -> str:
        """As llama.cpp chooses it: Q6_K for the head, and in half of the layers for v and down."""
        if name in ("head", "embed"):
            return "Q6_K"
        _, layer, part = name.split(".")
        finer = part in ("v", "down") and int(layer) % 2 == 0
        return "Q4_0" if self._kind == "q4_0" else "Q6_K" if finer else "Q4_K"

    def __getitem__(self, name: str) -> EncodedMatrix:
        encoding, (outputs, inputs) = self._encoding(name), self._sizes[name]
        kind, spread = ENCODINGS[encoding], inputs**-0.5
        size = (outputs, inputs // kind.elements, kind.nbytes)
        blocks = torch.randint(0, 256, size, dtype=torch.uint8, device="cuda")
        for at, scale in HALVES[encoding].items():
            half = torch.tensor([scale * spread], dtype=torch.float16).view(torch.uint8).cuda()
            blocks[..., at : at + 2] = half
        return EncodedMatrix(encoding, blocks.flatten(1))

    def __setitem__(self, name: str, matrix: EncodedMatrix) -> None:
        raise TypeError("random blocks are only read")

    def __delitem__(self, name: str) -> None:
        del self._sizes[name]

    def __contains__(self, name: object) -> bool:
        return name in self._sizes

    def __iter__(self) -> Iterator[str]:
        return iter(self._sizes)

    def __len__(self) -> int:
        return len(self._sizes)


# Where a block has its half-precision numbers, and their size for weights of about 1.
HALVES: Final[dict[str, dict[int, float]]] = {
    "Q4_0": {0: 0.2}, "Q4_K": {0: 0.007, 2: 0.05}, "Q6_K": {208: 0.0007}
}  # fmt: skip


def weights_of(name: str, model: Path | None, kind: str = "bf16") -> Weights:
    """Random ones are made on the GPU, so that no large model has to be carried there."""
    if name == "135m" and model is not None:
        return load(model, torch.bfloat16, keep=GGUF if kind == "gguf" else ())
    tensors = RandomTensors(SHAPES[name], name in TIED)
    if weight_type(kind) != "gguf":
        return Weights(SHAPES[name], tensors, f"random {name}")
    blocks = RandomBlocks(tensors, kind, SHAPES[name].layers)
    return Weights(SHAPES[name], tensors, f"random {name} {kind}", blocks)


def weight_type(kind: str) -> WeightType:
    """kind: of a file, where weights stay as they are."""
    types: dict[str, WeightType] = {"bf16": "bf16", "int8": "int8", "fp8": "fp8"}
    return types.get(kind, "gguf")


def config_for(shape: ModelConfig) -> EngineConfig:
    """Room for two of the longest contexts."""
    per_token = 4 * shape.layers * shape.kv_heads * shape.head_dim
    return EngineConfig(device="cuda", cache_mb=2 * per_token * (max(CONTEXTS) + 512) // 2**20 + 1)


def floor_ms(target: CudaTarget, context: int, bandwidth: float) -> float:
    shape, weights = target.shape, sum(matrix.nbytes for _, matrix in target._weights.products())
    cache = 4 * shape.layers * shape.kv_heads * shape.head_dim * context
    return (weights + cache) / bandwidth * 1e3


def free() -> None:
    gc.collect()
    torch.cuda.empty_cache()


# ---- parts


def ceilings(notes: Notes, args: argparse.Namespace) -> None:
    a = torch.empty(2**30, device="cuda", dtype=torch.float32).normal_()
    b = torch.empty_like(a)
    copied = 8 * 2**30 / timed(lambda: b.copy_(a)) / 1e9
    x, y = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product = 2 * 8192**3 / timed(lambda: x @ y) / 1e9
    notes.bandwidth = copied * 1e12
    device = torch.cuda.get_device_name()
    notes("ceilings", device=device, torch=torch.__version__, copy_tb_s=copied, bf16_tflop_s=product)


AnyTarget = CudaTarget | TorchTarget


def opened(target: AnyTarget, contexts: Sequence[int]) -> Iterator[tuple[int, str]]:
    for context in contexts:
        if context + max(ROWS) >= target.max_context:
            continue
        name = f"context {context}"
        with target.noise(Seq(name, [1] * (context + 1), context + 1, tenant=name)):
            yield context, name


def a_pass(target: AnyTarget, lengths: Mapping[str, int], rows: int) -> Callable[[], None]:
    """Rows of each of these sequences, none of which is kept."""
    feeds = [Feed(seq, [1], Draft(tuple(range(1, rows)))) for seq in lengths]

    def run() -> None:
        target.forward(feeds)
        for seq, length in lengths.items():
            target.keep(seq, length)

    return run


def passes(notes: Notes, args: argparse.Namespace) -> None:
    for name in args.shapes:
        for kind in KINDS.get(name, ("bf16",)):
            if (kind in args.kinds or not args.kinds) and (kind != "gguf" or args.model):
                time_passes(notes, name, kind, args.model, args.contexts)
                free()


def time_passes(
    notes: Notes, name: str, kind: str, model: Path | None, contexts: Sequence[int] = CONTEXTS
) -> None:
    started = time.perf_counter()
    target = CudaTarget(weights_of(name, model, kind), config_for(SHAPES[name]), kind=weight_type(kind))
    took = time.perf_counter() - started
    notes("load", shape=name, kind=kind, seconds=took, mb=target.bytes_held / 2**20)
    for context, seq in opened(target, contexts):
        floor = floor_ms(target, context, notes.bandwidth)
        for rows in ROWS:
            run = a_pass(target, {seq: context}, rows)
            run()
            ms = timed(target.replay_last_pass, seconds=0.06)
            notes(
                "passes",
                shape=name,
                kind=kind,
                context=context,
                rows=rows,
                ms=ms,
                floor_ms=floor,
                percent=100 * floor / ms,
            )


def batches(notes: Notes, args: argparse.Namespace) -> None:
    """Several sequences in one call of the target, one row and eight rows each; deterministic, and not."""
    # 436 is the mean context of the steps that `bench.gpu_vllm` times.
    spans = {"300": (300, 300, 256), "436": (436, 436, 256), "1,000 to 1,400": (1000, 1400, 64)}
    tokens = max(most * (last + 64) for _, last, most in spans.values())
    for name in args.shapes:
        shape, kind = SHAPES[name], weight_type(KINDS.get(name, ("bf16",))[0])
        cache_mb = tokens * 4 * shape.layers * shape.kv_heads * shape.head_dim // 2**20 + 1
        config = EngineConfig(device="cuda", cache_mb=cache_mb, max_batch=256)
        modes = (config, replace(config, deterministic=False)) if kind == "bf16" else (config,)
        for mode in modes:
            target = CudaTarget(weights_of(name, args.model), mode, kind=kind)
            for context, (first, last, most) in spans.items():
                with ExitStack() as stack:
                    lengths = {f"s{i}": first + (last - first) * i // (most - 1) for i in range(most)}
                    for seq, length in lengths.items():
                        text = Seq(seq, [1] * (length + 1), length + 1, tenant=seq)
                        stack.enter_context(target.noise(text))
                    for count in (count for count in (1, 8, 32, 64, 128, 256) if count <= most):
                        for rows in (1, 8):
                            run = a_pass(target, dict(islice(lengths.items(), count)), rows)
                            run()
                            ms = timed(run, seconds=0.08)
                            notes(
                                "batches",
                                shape=name,
                                kind=kind,
                                deterministic=mode.deterministic,
                                context=context,
                                sequences=count,
                                rows=rows,
                                ms=ms,
                            )
            del target, run  # which holds it too
            free()


def kernels(notes: Notes, args: argparse.Namespace) -> None:
    """Microseconds of each kernel in one pass of 1, 8, 32 and 64 sequences, by torch's profiler.

    Dependent launches overlap, so the sum is more than the pass.
    """
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiled

    for name in args.shapes:
        shape = SHAPES[name]
        cache_mb = 64 * 400 * 4 * shape.layers * shape.kv_heads * shape.head_dim // 2**20 + 1
        config = EngineConfig(device="cuda", cache_mb=cache_mb, max_batch=64)
        kind = next(iter(args.kinds), "bf16")
        target = CudaTarget(weights_of(name, args.model, kind), config, kind=weight_type(kind))
        with ExitStack() as stack:
            lengths = {f"s{i}": 300 for i in range(64)}
            for seq, length in lengths.items():
                stack.enter_context(target.noise(Seq(seq, [1] * (length + 1), length + 1, tenant=seq)))
            for count in (1, 8, 32, 64):
                a_pass(target, dict(islice(lengths.items(), count)), 1)()
                target.replay_last_pass()
                torch.cuda.synchronize()
                with profiled(activities=[ProfilerActivity.CUDA]) as recorded:
                    for _ in range(5):
                        target.replay_last_pass()
                    torch.cuda.synchronize()
                times = {e.key: e.self_device_time_total / 5 for e in recorded.key_averages()}
                notes("kernels", shape=name, kind=kind, sequences=count, us=times)
        del target
        free()


class RandomHead(Mapping[str, Tensor]):
    """Weights of a block head, made on the GPU when they are read."""

    def __init__(self, shape: BlockConfig) -> None:
        self._sizes = parameter_shapes("block", shape)

    def __getitem__(self, name: str) -> Tensor:
        size = self._sizes[name]
        made = torch.randn(*size, device="cuda", dtype=torch.bfloat16)
        return made.mul_(size[-1] ** -0.5) if len(size) > 1 else made.mul_(0.1).add_(1)

    def __iter__(self) -> Iterator[str]:
        return iter(self._sizes)

    def __len__(self) -> int:
        return len(self._sizes)


def block_shape(shape: ModelConfig, draft_vocab: int) -> BlockConfig:
    """As `paceline train --kind block` makes them by default, with a vocabulary of 8,192 tokens."""
    taps = tuple(round(1 + i * (shape.layers - 4) / 4) for i in range(5))
    return BlockConfig(
        shape.width,
        shape.heads,
        shape.kv_heads,
        shape.head_dim,
        shape.ff_width,
        shape.vocab_size,
        draft_vocab,
        taps,
        norm_eps=shape.norm_eps,
        theta=shape.rope.theta,
    )


def heads(notes: Notes, args: argparse.Namespace) -> None:
    """A block head's whole draft: four hidden states read, a block of 8 filled, a chain of 8 chosen."""
    for name in args.shapes:
        for draft_vocab in (8192, 16384):
            time_head(notes, name, args.model, draft_vocab)
            free()


def time_head(notes: Notes, name: str, model: Path | None, draft_vocab: int) -> None:
    context, steps = 600, 8
    target = CudaTarget(weights_of(name, model), config_for(SHAPES[name]))
    shape, own = block_shape(target.shape, draft_vocab), target._weights
    runner = CudaBlock(
        shape,
        torch.arange(shape.draft_vocab),
        RandomHead(shape),
        own.embed,
        own.embeddings("").head,
        target.shape,
        target._launcher,
        target.max_context,
    )
    with target.noise(Seq("s", [1] * (context + 1), context + 1, tenant="s")):
        a_pass(target, {"s": context}, 1)()
        pass_ms = timed(target.replay_last_pass)
    rows = runner.like.new_empty(context + 64, shape.layers, 2, shape.kv_heads, shape.head_dim).normal_()
    states = torch.randn(len(shape.taps), 4, shape.width, device="cuda")
    hidden = dict(zip(shape.taps, states, strict=True))
    text = AnchorContext(1, context, range(context), CacheRows(rows, 0, context))
    part = TapInput(context - 4, hidden, CacheRows(rows, context - 4, 4))
    keys = [(i, 2 * i + 1) for i in range(steps)]
    for temperature in (0.0, 0.7):
        samples = [SampleCall(0, 0, keys, None, temperature)] if temperature else []
        draft = partial(runner.draft_chains, [part], [text], steps, [(0, 1)], [steps], samples)
        for _ in range(20):
            draft()
        calls, started = 200, time.perf_counter()
        for _ in range(calls):
            draft()
        call_ms = (time.perf_counter() - started) * 1e3 / calls
        ms = timed(runner.replay_last_draft)
        notes(
            "heads",
            shape=name,
            draft_vocab=draft_vocab,
            temperature=temperature,
            context=context,
            pass_ms=pass_ms,
            draft_ms=ms,
            call_ms=call_ms,
            percent=100 * ms / pass_ms,
        )


def eager(notes: Notes, args: argparse.Namespace) -> None:
    for name in args.shapes:
        target = TorchTarget(weights_of(name, args.model), config_for(SHAPES[name]))
        for context, seq in opened(target, CONTEXTS[:2]):
            for rows in (1, 8):
                ms = timed(a_pass(target, {seq: context}, rows), seconds=0.5, samples=5)
                notes("eager", shape=name, context=context, rows=rows, ms=ms)
        del target
        free()


Texts = list[list[int]]


Way = tuple[str, float]  # an engine with its drafters, a temperature
Run = Callable[[], tuple[Texts, int, float]]  # texts, passes, seconds


def rounds(notes: Notes, args: argparse.Namespace) -> None:
    """SmolLM2 on recorded turns of agents, one request at a time."""
    if args.model is None:
        notes("rounds", skipped="no --model")
        return
    turns = agent_turns(args.model, args.prompts)
    ways = paceline_ways(notes, args.model, turns, (0.0, 0.7), args.tokens, args.dtype)
    compare(notes, "rounds", ways, turns)


def beside(notes: Notes, args: argparse.Namespace) -> None:
    """The same on two turns, 32 tokens each, with Transformers in the same process."""
    if args.model is None:
        notes("beside", skipped="no --model")
        return
    turns, tokens = agent_turns(args.model, 2), 32
    ways = paceline_ways(notes, args.model, turns, (0.0,), tokens)
    model = transformers_model(args.model)
    for name, more in {"plain": {}, "prompt lookup": {"prompt_lookup_num_tokens": 7}}.items():
        ways[f"Transformers, {name}", 0.0] = partial(transformers_turns, model, turns, tokens, more)
    compare(notes, "beside", ways, turns)


PLAIN: Final = SpecConfig((), max_draft=0)
DEFAULT: Final = SpecConfig(max_draft=7)
MODEL_FREE: Final[Mapping[str, SpecConfig]] = {
    "plain": PLAIN,
    "grammar, suffix, ngram": DEFAULT,
    "grammar, suffix, ngram, to 15": replace(DEFAULT, max_draft=15),
    "grammar, suffix, ngram, tree": replace(DEFAULT, tree_width=2),
}
TRAINED: Final[Mapping[str, SpecConfig]] = {
    "plain": PLAIN,
    "grammar, suffix, ngram": DEFAULT,
    "block": replace(DEFAULT, drafters=("block",)),
    "block, always 5": replace(DEFAULT, drafters=("block",), max_draft=5, adaptive=False),
    "grammar, suffix, ngram, block": replace(DEFAULT, drafters=(*DEFAULT.drafters, "block")),
}


def trained(notes: Notes, args: argparse.Namespace) -> None:
    """SmolLM2 with the block drafter of the package: turns of agents, then chats."""
    if args.model is None:
        notes("trained", skipped="no --model")
        return
    target = load_target(args.model, EngineConfig(device="cuda", cache_mb=1024))
    head = read(SHIPPED / "smollm2-135m-block", target.fingerprint, target.vocab_size)
    runner = target.block_runner(head)
    assert runner is not None
    prior = cost_table(target)

    def drafters() -> dict[str, Drafter]:
        return {**model_free(), "block": BlockDrafter(runner, head.card.calibration, target.capacity)}

    for workload in ("agent", "chat"):
        turns = turns_of(args.model, workload, args.prompts)
        ways: dict[Way, Run] = {
            (f"paceline, {name}", temperature): partial(
                paceline_turns, target, prior, turns, spec, temperature, args.tokens, drafters
            )
            for temperature in (0.0, 0.7)
            for name, spec in TRAINED.items()
        }
        compare(notes, f"trained {workload}", ways, turns)


def paceline_ways(
    notes: Notes, model: Path, turns: Texts, temperatures: Sequence[float], tokens: int, dtype: str = "auto"
) -> dict[Way, Run]:
    target = load_target(model, EngineConfig(device="cuda", cache_mb=1024, dtype=dtype))
    notes("target", what=target.describe(), prompt_tokens=[len(turn) for turn in turns], tokens=tokens)
    prior, lists = cost_table(target), MODEL_FREE
    return {
        (f"paceline, {name}", temperature): partial(
            paceline_turns, target, prior, turns, spec, temperature, tokens
        )
        for temperature in temperatures
        for name, spec in lists.items()
    }


def compare(notes: Notes, part: str, ways: Mapping[Way, Run], turns: Texts) -> None:
    """Each way REPEATS times, in turns. Timed is what follows the first token of each answer."""
    results: dict[Way, list[tuple[Texts, int, float]]] = {way: [] for way in ways}
    for repeat in range(REPEATS):
        for (name, temperature), run in ways.items():
            texts, passes_made, seconds = run()
            results[name, temperature].append((texts, passes_made, seconds))
            notes(f"{part} run", engine=name, temperature=temperature, repeat=repeat, seconds=seconds)
    for (name, temperature), runs in results.items():
        speeds = sorted(_following(texts) / seconds for texts, _, seconds in runs)
        plain = results[f"{name.partition(',')[0]}, plain", temperature][0][0]
        same = sum(equal_tokens(texts, plain) for texts, *_ in runs)
        texts, passes_made, _ = sorted(runs, key=lambda run: run[2])[len(runs) // 2]  # the median run
        notes(
            part,
            engine=name,
            temperature=temperature,
            turns=len(turns),
            tokens=len(plain[0]),
            tokens_per_s=median(speeds),
            slowest=speeds[0],
            fastest=speeds[-1],
            tokens_per_pass=_following(texts) / passes_made if passes_made else None,
            equal=f"{same} of {REPEATS * sum(map(len, plain))}",
        )


def _following(texts: Texts) -> int:
    """Tokens after the first of each text."""
    return sum(map(len, texts)) - len(texts)


def equal_tokens(texts: Texts, others: Texts) -> int:
    pairs = zip(texts, others, strict=True)
    return sum(a == b for text, other in pairs for a, b in zip(text, other, strict=True))


def paceline_turns(
    target: ModelTarget,
    prior: Prior,
    turns: Texts,
    spec: SpecConfig,
    temperature: float,
    tokens: int,
    drafters: Callable[[], Mapping[str, Drafter]] = model_free,
) -> tuple[Texts, int, float]:
    """Texts, passes after each first token, and their seconds. Drafters remember earlier turns."""
    texts, passes_made, seconds = [], 0, 0.0
    engine = Engine(target, drafters(), Rate(prior))
    for i, turn in enumerate(turns):
        params = SamplingParams(temperature=temperature, seed=i, max_tokens=tokens, ignore_eos=True)
        seq = Seq(f"turn {i}", list(turn), len(turn), params, spec, tenant="bench")
        engine.submit(seq)
        while not seq.output:
            engine.step()
        first, started = len(seq.output), time.perf_counter()  # the next pass may be on its way
        while engine.busy:
            engine.step()
            passes_made += 1
        seconds += (time.perf_counter() - started) * (tokens - 1) / (tokens - first)
        texts.append(seq.output)
    target.forget("bench")
    return texts, passes_made, seconds


def rollouts(notes: Notes, args: argparse.Namespace) -> None:
    """512 sampled answers of at most 320 tokens, each prompt answered eight times: as for training."""
    if args.model is None:
        notes("rollouts", skipped="no --model")
        return
    from paceline.llm import LLM
    from paceline.train.data.prompts import Prompt
    from paceline.train.data.rollout import Job, Rollout, roll_out
    from paceline.train.data.target_answers import answering_config

    turns = [*turns_of(args.model, "agent", 58), *turns_of(args.model, "chat", 6)][:64]
    prompts = [Prompt(tuple(turn), held_out=False) for turn in turns]
    jobs = [Job(prompt, True, 8 * i + n) for i, prompt in enumerate(prompts) for n in range(8)]
    usual = answering_config(args.model, EngineConfig(device="cuda"))
    for config in (usual, replace(usual, deterministic=False), replace(usual, max_batch=64)):
        llm = LLM(str(args.model), config=config)
        for repeat in range(2):
            started = time.perf_counter()
            answers = roll_out(llm, jobs, Rollout(max_new=320))
            seconds = time.perf_counter() - started
            engine = f"engine, {config.max_batch} at once, deterministic {config.deterministic}"
            note_rollouts(notes, engine, repeat, answers, seconds)
        del llm
        free()


def note_rollouts(notes: Notes, engine: str, repeat: int, answers: Texts, seconds: float) -> None:
    tokens = sum(map(len, answers))
    notes(
        "rollouts",
        engine=engine,
        repeat=repeat,
        answers=len(answers),
        tokens=tokens,
        seconds=seconds,
        answers_per_minute=60 * len(answers) / seconds,
        tokens_per_s=tokens / seconds,
    )


def transformers_turns(
    model: Any, turns: Texts, tokens: int, more: Mapping[str, Any]
) -> tuple[Texts, int, float]:
    """Its prompt is timed alone first, and taken off."""
    texts, seconds = [], 0.0
    for turn in turns:
        _, first = transformers_text(model, turn, 1, more)
        text, whole = transformers_text(model, turn, tokens, more)
        texts.append(text)
        seconds += whole - first
    return texts, 0, seconds


def transformers_text(
    model: Any, turn: Sequence[int], tokens: int, more: Mapping[str, Any]
) -> tuple[list[int], float]:
    prompt = torch.tensor([turn], device="cuda")
    torch.cuda.synchronize()
    started = time.perf_counter()
    out = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        do_sample=False,
        pad_token_id=0,
        **more,
    )
    torch.cuda.synchronize()
    return out[0, prompt.shape[1] :].tolist(), time.perf_counter() - started


def compiled(notes: Notes, args: argparse.Namespace) -> None:
    """Transformers compiled with a static cache, on the first turn alone: it compiles for a minute."""
    if args.model is None:
        notes("compiled", skipped="no --model")
        return
    model, turn = transformers_model(args.model), agent_turns(args.model, 1)[0]
    more = {"cache_implementation": "static"}
    started = time.perf_counter()
    for tokens in (1, args.tokens):
        transformers_text(model, turn, tokens, more)
    warm = time.perf_counter() - started
    speeds = []
    for _ in range(REPEATS):
        texts, _, seconds = transformers_turns(model, [turn], args.tokens, more)
        speeds.append((len(texts[0]) - 1) / seconds)
    speeds.sort()
    notes(
        "compiled",
        engine="Transformers, compiled, static cache",
        temperature=0.0,
        turns=1,
        tokens=args.tokens,
        compile_seconds=warm,
        tokens_per_s=median(speeds),
        slowest=speeds[0],
        fastest=speeds[-1],
    )


def transformers_model(path: Path) -> Any:
    """A Llama of Transformers in bfloat16, with the weights of the file."""
    from transformers import LlamaConfig, LlamaForCausalLM

    weights = load(path, torch.bfloat16)
    shape = weights.shape
    config = LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.width,
        intermediate_size=shape.ff_width,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=shape.max_context,
        rms_norm_eps=shape.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope.theta},
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = LlamaForCausalLM(config).to("cuda", torch.bfloat16).eval()
    names = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
    names |= {part: f"self_attn.{part}_proj" for part in "qkvo"}
    names |= {part: f"mlp.{part}_proj" for part in ("gate", "up", "down")}
    state = {
        "model.embed_tokens.weight": weights.tensors["embed"],
        "model.norm.weight": weights.tensors["norm"],
    }
    for name, tensor in weights.tensors.items():
        if name.startswith("layers."):
            _, layer, part = name.split(".")
            state[f"model.layers.{layer}.{names[part]}.weight"] = tensor
    missing, surplus = model.load_state_dict(state, strict=False)
    assert not surplus, surplus
    assert set(missing) <= {"lm_head.weight"}, missing  # tied
    return model


def agent_turns(model: Path, count: int) -> Texts:
    return turns_of(model, "agent", count)


def turns_of(model: Path, workload: str, count: int) -> Texts:
    """The prompts of successive turns of recorded conversations, at most 2,000 tokens each."""
    from paceline.text import Tokenizer

    tokenizer = Tokenizer.load(model)
    lines = (Path(__file__).parent / "workloads" / f"{workload}.jsonl").read_text("utf-8").splitlines()
    found = []
    for record in map(json.loads, lines):
        messages = record["messages"]
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        for i in answers or [len(messages)]:
            text = tokenizer.render(messages[:i], record.get("tools"))
            found.append(tokenizer.encode(text)[-2000:])
    return found[:count]


def recorded_prompts(model: Path, count: int) -> list[list[int]]:
    from paceline.text import Tokenizer

    tokenizer = Tokenizer.load(model)
    lines = (Path(__file__).parent / "workloads" / "agent.jsonl").read_text("utf-8").splitlines()
    found = []
    for line in lines:
        record = json.loads(line)
        messages = record["messages"]
        last = max(i for i, message in enumerate(messages) if message["role"] == "assistant")
        text = tokenizer.render(messages[:last], record.get("tools"))
        found.append(tokenizer.encode(text)[-2000:])
    return found[:count]


class EvenTokens(Cursor):
    """A grammar that costs nothing: every other token, and at every eighth position one token alone."""

    finished = False

    def __init__(self, vocab: int, place: int = 0) -> None:
        self._row = np.full((vocab + 31) // 32, 0x55555555, np.uint32)
        self._place = place

    def fill(self, row: Bits) -> bool:
        row[:] = self._row if self._place % 8 else 0
        row[0] |= np.uint32(1)
        return True

    def advance(self, token: int) -> bool:
        self._place += 1
        return token % 2 == 0 if self._place % 8 != 1 else token == 0

    def forced(self) -> list[int]:
        return [] if self._place % 8 else [0]

    def canonical(self) -> list[int]:
        return []

    def fork(self) -> "EvenTokens":
        forked = object.__new__(EvenTokens)
        forked._row, forked._place = self._row, self._place
        return forked


class HostTimes:
    """Microseconds from a pass's tokens to the next pass's launch, and of the launch itself."""

    def __init__(self, target: CudaTarget) -> None:
        self._runner, self._group = target._runner, target._runner.groups[0]
        self._chosen, self._replay = self._group.chosen, self._runner._replay
        self._arrived = 0
        self.between: list[float] = []
        self.launch: list[float] = []

    def __enter__(self) -> "HostTimes":
        def chosen(rows: int) -> list[int]:
            tokens = self._chosen(rows)
            self._arrived = time.perf_counter_ns()
            return tokens

        def replay(kind: Any) -> None:
            started = time.perf_counter_ns()
            self._replay(kind)
            if self._arrived:
                self.between.append((started - self._arrived) / 1e3)
                self.launch.append((time.perf_counter_ns() - started) / 1e3)
            self._arrived = 0

        self._group.chosen = chosen  # type: ignore[method-assign]
        self._runner._replay = replay  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        del self._group.chosen, self._runner._replay


def host(notes: Notes, args: argparse.Namespace) -> None:
    """The host's part of a round of SmolLM2 at batch 1: from a pass's tokens to the next launch."""
    if args.model is None:
        notes("host", skipped="no --model")
        return
    target = load_target(args.model, EngineConfig(device="cuda", cache_mb=1024))
    assert isinstance(target, CudaTarget)
    default, penalties = SpecConfig(max_draft=7), {"repetition_penalty": 1.1, "frequency_penalty": 0.2}
    lists: dict[str, tuple[SpecConfig, dict[str, Any], bool]] = {
        "plain": (SpecConfig((), max_draft=0), {}, False),
        "grammar, suffix, ngram": (default, {}, False),
        "grammar, suffix, ngram, always 7": (SpecConfig(max_draft=7, adaptive=False), {}, False),
        "the same, a tree": (SpecConfig(max_draft=7, adaptive=False, tree_width=2), {}, False),
        "the same, penalties": (SpecConfig(max_draft=7, adaptive=False), penalties, False),
        "the same, a grammar": (SpecConfig(max_draft=7, adaptive=False), {}, True),
    }
    prompts = recorded_prompts(args.model, 4)
    prior = cost_table(target)
    for name, (spec, more, bound) in lists.items():
        with HostTimes(target) as times:
            passes_made, made, seconds = 0, 0, 0.0
            for i, prompt in enumerate(prompts):
                engine = Engine(target, model_free(), Rate(prior))
                params = SamplingParams(seed=1, max_tokens=250, ignore_eos=True, **more)
                cursor = EvenTokens(target.vocab_size) if bound else None
                seq = Seq(f"h{i}", list(prompt), len(prompt), params, spec, tenant=name, cursor=cursor)
                engine.submit(seq)
                while not seq.output:
                    engine.step()
                times._arrived, before, started = 0, len(seq.output), time.perf_counter()
                while engine.busy:
                    engine.step()
                    passes_made += 1
                seconds += time.perf_counter() - started
                made += len(seq.output) - before
            pass_us = 1e3 * timed(target.replay_last_pass)
        notes(
            "host",
            drafters=name,
            rounds=passes_made,
            tokens_per_pass=made / passes_made,
            round_us=1e6 * seconds / passes_made,
            pass_us=pass_us,
            between_us=median(times.between),
            between_p90_us=sorted(times.between)[len(times.between) * 9 // 10],
            launch_us=median(times.launch),
        )


def profile(notes: Notes, args: argparse.Namespace) -> None:
    """Where the host's time goes in rounds of SmolLM2 with the default list."""
    import cProfile
    import pstats

    if args.model is None:
        notes("profile", skipped="no --model")
        return
    target = load_target(args.model, EngineConfig(device="cuda", cache_mb=1024))
    prompt = recorded_prompts(args.model, 1)[0]
    engine = Engine(target, model_free(), Fixed())
    params = SamplingParams(seed=1, max_tokens=400, ignore_eos=True)
    seq = Seq("p", list(prompt), len(prompt), params, SpecConfig(adaptive=False))
    engine.submit(seq)
    while not seq.output:
        engine.step()
    profiler = cProfile.Profile()
    with profiler:
        while engine.busy:
            engine.step()
    with (args.out / "profile.txt").open("w") as stream:
        pstats.Stats(profiler, stream=stream).sort_stats("tottime").print_stats(45)


PARTS: Final[dict[str, Callable[[Notes, argparse.Namespace], None]]] = {
    "ceilings": ceilings,
    "passes": passes,
    "batches": batches,
    "kernels": kernels,
    "rounds": rounds,
    "trained": trained,
    "heads": heads,
    "rollouts": rollouts,
    "beside": beside,
    "host": host,
    "profile": profile,
    "eager": eager,
    "compiled": compiled,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", default=list(PARTS))
    parser.add_argument("--model", type=Path, help="SmolLM2 as a GGUF file; without it weights are random")
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--kinds", nargs="*", default=[], help="of weights, in passes and kernels; else all")
    parser.add_argument("--contexts", nargs="*", type=int, default=list(CONTEXTS))
    parser.add_argument("--dtype", default="auto", help="of the weights, in rounds")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "bench/results")))
    args = parser.parse_args()
    notes = Notes(args.out)
    for name in args.parts:
        started = time.perf_counter()
        try:
            PARTS[name](notes, args)
        except Exception:  # the other parts are still worth having
            traceback.print_exc()
            notes("failed", name=name, error=traceback.format_exc()[-1500:])
        print(f"== {name} {time.perf_counter() - started:.1f} s", flush=True)
        free()


if __name__ == "__main__":
    main()
