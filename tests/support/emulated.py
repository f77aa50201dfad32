"""The native library of another architecture, run by qemu-user on calls that were recorded here.

A `Script` holds memory and calls; what this machine's library answered is what an emulated one must answer,
bit for bit. replay.cpp carries it out. Structures have the same layout on all 64-bit systems.
"""

import ctypes as c
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.heads.block import BlockHead
from paceline.target.native import library
from paceline.target.native import target as native_module
from paceline.target.native.block_head import NativeBlock
from paceline.target.native.library import CODE_BYTES, FORMATS, GROUP, SCALE_BYTES, SCALE_GROUPS, TILE, UNIT
from paceline.target.native.target import NativeTarget
from support import SUPPORT
from support.native_targets import a_pool, beside

COMPILER = "aarch64-linux-gnu-g++"
EMULATOR = "qemu-aarch64"
SYSTEM = "/usr/aarch64-linux-gnu"  # where Debian puts the libraries of the other architecture
# Processors that have what a path needs, and nothing that a better one does.
PROCESSORS = {"portable": "cortex-a57", "neon": "cortex-a57", "neondotprod": "neoverse-n1", "neoni8mm": "max"}


def require_emulator() -> None:
    for program, package in ((COMPILER, "g++-aarch64-linux-gnu"), (EMULATOR, "qemu-user")):
        if shutil.which(program) is None:
            pytest.skip(f"no {program} here: apt-get install {package}")


@dataclass(frozen=True)
class Memory:
    """A piece of the script's memory."""

    number: int


@dataclass(frozen=True)
class Result:
    """Of a call."""

    memory: Memory


class Script:
    def __init__(self) -> None:
        self.steps: list[bytes] = []
        self.answers: list[tuple[str, bytes]] = []  # what is asked for, and what it must be
        self._count = 0

    def memory(self, data: bytes) -> Memory:
        self._add("b", len(data), data)
        self._count += 1
        return Memory(self._count - 1)

    def write(self, to: Memory, data: bytes) -> None:
        self._add("w", to.number, 0, len(data), data)

    def point(self, owner: Memory, offset: int, to: Memory) -> None:
        self._add("p", owner.number, offset, to.number, 0)

    def attach(self, owner: Memory, offset: int, address: int | None, nbytes: int) -> Memory | None:
        """A copy of memory of this process, to which a structure points; none where that is nothing."""
        if not address or not nbytes:
            return None
        copy = self.memory(c.string_at(address, nbytes))
        self.point(owner, offset, copy)
        return copy

    def call(self, name: str, *arguments: int | Memory | Result) -> Result:
        result = self.memory(bytes(8))
        given = [number for one in arguments for number in _argument(one)]
        self._add("c", result.number, len(name), name.encode(), len(arguments), *given)
        return Result(result)

    def expect(self, what: str, at: Memory, answer: bytes) -> None:
        self._add("o", at.number, 0, len(answer))
        self.answers.append((what, answer))

    def _add(self, step: str, *values: int | bytes) -> None:
        numbers = (value if isinstance(value, bytes) else np.int64(value).tobytes() for value in values)
        self.steps.append(np.int64(ord(step)).tobytes() + b"".join(numbers))


def _argument(value: int | Memory | Result) -> tuple[int, int, int]:
    if isinstance(value, Result):
        return 2, value.memory.number, 0
    return (1, value.number, 0) if isinstance(value, Memory) else (0, value, 0)


def check(script: Script, path: str, folder: Path, file: Path | None = None) -> None:
    """Every answer of the emulated library is the one that was recorded. file: of another library."""
    assert script.answers
    given, out = folder / f"{path}.script", folder / f"{path}.out"
    given.write_bytes(b"".join(script.steps))
    emulator = [EMULATOR, "-cpu", PROCESSORS[path], "-L", SYSTEM]
    command = [*emulator, *map(str, (_replay(), file or arm_library(path), given, out))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{path}: {done.stderr}"
    found, at = out.read_bytes(), 0
    for what, answer in script.answers:
        assert found[at : at + len(answer)] == answer, f"{path}: {what} differs"
        at += len(answer)
    assert at == len(found)


@contextmanager
def cross_compiler() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CXX", COMPILER)
        yield


@cache
def arm_library(path: str) -> Path:
    with cross_compiler():
        return library.build(path)


@cache
def _replay() -> Path:
    """The program, made under a name of this process's own: others may be at it too."""
    program = arm_library("portable").with_name("replay")
    made = program.with_name(f"{program.name}-{os.getpid()}")
    flags = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror"]
    subprocess.run([COMPILER, *flags, str(SUPPORT / "replay.cpp"), "-ldl", "-o", str(made)], check=True)
    return made.replace(program)


# ---- what structures point at


def attach_linear(script: Script, owner: Memory, at: int, linear: library.Linear) -> None:
    form, groups, pairs = FORMATS[linear.format], linear.inputs // GROUP, linear.outputs // TILE // 2
    codes, scales = groups * CODE_BYTES[form], groups // SCALE_GROUPS[form] * SCALE_BYTES[form]
    for name, pair, tile in (("codes", linear.codes_pair, codes), ("scales", linear.scales_pair, scales)):
        offset = at + getattr(library.Linear, name).offset
        script.attach(owner, offset, getattr(linear, name), (pairs - 1) * pair + 2 * tile)


def attach_fields(
    script: Script, owner: Memory, at: int, value: Any, sizes: Mapping[str, int]
) -> dict[str, Memory]:
    """The memory behind pointers of a structure at some offset, by their names. sizes: in bytes."""
    found = {
        name: script.attach(owner, at + getattr(type(value), name).offset, getattr(value, name), nbytes)
        for name, nbytes in sizes.items()
    }
    return {name: memory for name, memory in found.items() if memory is not None}


def attach_layers(
    script: Script, owner: Memory, at: int, layers: Any, sizes: Mapping[str, int], experts: int = 0
) -> None:
    table = script.memory(bytes(layers))
    script.point(owner, at, table)
    for i, layer in enumerate(layers):
        start = i * c.sizeof(library.Layer)
        for name in library.LINEARS:
            attach_linear(script, table, start + getattr(library.Layer, name).offset, getattr(layer, name))
        attach_fields(script, table, start, layer, sizes)
        if layer.experts:
            each = (library.Linear * (3 * experts)).from_address(layer.experts)
            linears = script.memory(bytes(each))
            script.point(table, start + library.Layer.experts.offset, linears)
            for j, linear in enumerate(each):
                attach_linear(script, linears, j * c.sizeof(library.Linear), linear)
        if layer.expert_biases:
            biases = (c.c_void_p * (3 * experts)).from_address(layer.expert_biases)
            pointers = script.memory(bytes(biases))
            script.point(table, start + library.Layer.expert_biases.offset, pointers)
            for j, bias in enumerate(biases):
                script.attach(pointers, j * c.sizeof(c.c_void_p), bias, 4 * each[j].outputs)


class _Replaced:
    """A library, some functions of which are others."""

    def __init__(self, lib: c.CDLL, **others: Callable[..., int]) -> None:
        self.__dict__.update(others)
        self._lib = lib

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lib, name)


# ---- passes of a target


@contextmanager
def recorded_passes(target: NativeTarget, threads: int) -> Iterator[Script]:
    """All passes meanwhile, with their logits, hidden states, and a checksum of the cache after each.

    threads: how many the emulated library uses.
    """
    script, lib, kv = Script(), target._lib, target._kv
    own, cached = _attach_model(script, target)
    decoder = script.call("paceline_open", own, script.call("paceline_pool_open", threads))
    known = {name: getattr(kv, name).tobytes() for name in cached}

    def forward(handle: int, given: Any) -> int:
        run, sizes = given._obj, _pass_sizes(given._obj, target)
        for name, memory in cached.items():
            if (now := getattr(kv, name).tobytes()) != known[name]:  # rows were moved since
                script.write(memory, now)
        own = script.memory(bytes(run))
        copies = attach_fields(script, own, 0, run, sizes)
        failed = int(lib.paceline_forward(handle, given))
        script.call("paceline_forward", decoder, own)
        for name in ("logits", "hidden"):
            if name in copies:
                answer = c.string_at(getattr(run, name), sizes[name])
                script.expect(f"{name} of {run.rows} rows", copies[name], answer)
        for name, memory in cached.items():
            known[name] = getattr(kv, name).tobytes()
            digest = np.uint64(lib.paceline_xxh64(getattr(kv, name).ctypes.data, len(known[name]), 0))
            found = script.call("paceline_xxh64", memory, len(known[name]), 0)
            script.expect(f"{name} after {run.rows} rows", found.memory, digest.tobytes())
        return failed

    target._lib = _Replaced(lib, paceline_forward=forward)  # type: ignore[assignment]
    yield script
    target._lib = lib


def _attach_model(script: Script, target: NativeTarget) -> tuple[Memory, dict[str, Memory]]:
    """The model, and its cache by name."""
    shape, kv, (weights, layers, _) = target.shape, target._kv, target._held
    model = native_module._model(shape, weights, kv, layers)
    own = script.memory(bytes(model))
    for name in ("embed", "head"):
        attach_linear(script, own, getattr(library.Model, name).offset, getattr(model, name))
    width = -(-shape.width // UNIT) * UNIT
    sizes = dict.fromkeys(("attn_norm", "ffn_norm", "o_bias", "post_attn_norm", "post_ffn_norm"), 4 * width)
    sizes |= dict.fromkeys(("k_bias", "v_bias"), 4 * shape.kv_heads * shape.head_dim)
    sizes |= dict.fromkeys(("q_norm", "k_norm"), 4 * shape.head_dim)
    sizes |= {"q_bias": 4 * shape.heads * shape.head_dim, "router": 4 * model.experts * shape.width}
    sizes |= {"router_bias": 4 * model.experts, "sinks": 4 * shape.heads}
    attach_layers(script, own, library.Model.layer.offset, layers, sizes, model.experts)
    attach_fields(script, own, 0, model, {"norm": 4 * width})
    cache_bytes = {name: getattr(kv, name).nbytes for name in ("keys", "values")}
    return own, attach_fields(script, own, 0, model, cache_bytes)


def _pass_sizes(run: library.Pass, target: NativeTarget) -> dict[str, int]:
    shape, rows = target.shape, run.rows
    spans = np.frombuffer(c.string_at(run.span, 16 * run.spans), np.int32).reshape(-1, 4).tolist()
    writes = c.c_int32.from_address(run.write_starts + 4 * rows).value
    words = {
        **dict.fromkeys(("tokens", "span_rows"), rows),
        **dict.fromkeys(("cosines", "sines", "local_cosines", "local_sines"), rows * shape.head_dim // 2),
        "tables": max(table - (-(start + count) // 16) for _, count, start, table in spans),
        "span": 4 * run.spans,
        "write_starts": rows + 1,
        "writes": writes,
        "copy": 2 * run.copies,
        "scored_rows": run.scored,
        "tap_layers": run.taps,
        "run_layers": run.layers,
        "logits": run.scored * shape.vocab_size,
        "hidden": run.taps * rows * shape.width,
    }
    return {name: 4 * count for name, count in words.items()}


# ---- calls of a block head


def recorded_blocks(net: BlockHead, threads: int) -> tuple[NativeBlock, Script]:
    """A runner all of whose calls are recorded, with what they write. threads: see `recorded_passes`."""
    script, pool = Script(), a_pool()
    lib, fillers = pool.lib, list[Result]()

    def block_open(given: Any, handle: int) -> int:
        own = _attach_block_model(script, given._obj)
        fillers.append(script.call("paceline_block_open", own, script.call("paceline_pool_open", threads)))
        return int(lib.paceline_block_open(given, handle))

    def block_run(handle: int, given: Any) -> int:
        call = _BlockCall(script, runner, given._obj)
        failed = int(lib.paceline_block_run(handle, given))
        script.call("paceline_block_run", fillers[0], call.own)
        for what, memory, address, nbytes in call.written:
            script.expect(what, memory, c.string_at(address, nbytes))
        return failed

    pool.lib = _Replaced(lib, paceline_block_open=block_open, paceline_block_run=block_run)  # type: ignore[assignment]
    runner = beside(net, pool)
    return runner, script


def _attach_block_model(script: Script, model: library.BlockModel) -> Memory:
    own = script.memory(bytes(model))
    for name in ("embed", "fc", "head", "markov_out"):
        attach_linear(script, own, getattr(library.BlockModel, name).offset, getattr(model, name))
    sizes = {"attn_norm": 4 * model.width, "ffn_norm": 4 * model.width}
    sizes |= dict.fromkeys(("q_norm", "k_norm"), 4 * model.head_dim)
    layers = (library.Layer * model.layers).from_address(model.layer)
    attach_layers(script, own, library.BlockModel.layer.offset, layers, sizes)
    sizes = dict.fromkeys(("context_norm", "norm", "mask"), 4 * model.width)
    sizes |= {"sure": 4 * (model.width + model.rank), "weights": model.weights_bytes}
    sizes |= {"markov_in": 4 * (model.draft_vocab + 1) * model.rank, "ids": 8 * model.draft_vocab}
    attach_fields(script, own, 0, model, sizes)
    return own


@dataclass
class _BlockCall:
    """A copy of the arguments of one call, and the places that it writes to."""

    script: Script
    runner: NativeBlock
    call: library.DraftCall
    written: list[tuple[str, Memory, int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.own = self.script.memory(bytes(self.call))
        self._shape, self._rows = self.runner.shape, self.runner._row_bytes
        self._read()
        self._fill()
        self._chain()

    def _attach(
        self, owner: Memory, at: int, value: Any, sizes: Mapping[str, int], outputs: str = ""
    ) -> None:
        copies = attach_fields(self.script, owner, at, value, sizes)
        self.written += [
            (name, copies[name], getattr(value, name), sizes[name])
            for name in outputs.split()
            if name in copies
        ]

    def _table(self, at: int, address: int, kind: Any, count: int) -> tuple[Memory, Any]:
        """The structures that a field of the call points at."""
        each = (kind * count).from_address(address)
        memory = self.script.memory(bytes(each))
        self.script.point(self.own, at, memory)
        return memory, each

    def _rotations(self, at: int, value: Any) -> None:
        self._attach(
            self.own, at, value, dict.fromkeys(("cosines", "sines"), self.runner._rotations._cos.nbytes)
        )

    def _read(self) -> None:
        reading, at = self.call.reading, library.DraftCall.reading.offset
        table, parts = self._table(
            at + library.Reading.part.offset, reading.part, library.Part, reading.parts
        )
        self._rotations(at, reading)
        for i, part in enumerate(parts):
            start = i * c.sizeof(library.Part)
            self._attach(table, start, part, {"context": part.rows * self._rows}, "context")
            hidden = self.script.memory(bytes(8 * reading.taps))
            self.script.point(table, start + library.Part.hidden.offset, hidden)
            for tap, states in enumerate((c.c_void_p * reading.taps).from_address(part.hidden)):
                self.script.attach(hidden, 8 * tap, states, 4 * part.rows * self._shape.width)

    def _fill(self) -> None:
        filling, at = self.call.filling, library.DraftCall.filling.offset
        table, texts = self._table(
            at + library.Filling.text.offset, filling.text, library.Text, filling.texts
        )
        self._rotations(at, filling)
        for i, text in enumerate(texts):
            sizes = {"context": text.count * self._rows, "hidden": 4 * filling.slots * self._shape.width}
            sizes |= {"base": 4 * filling.slots * self.runner._outputs}
            self._attach(table, i * c.sizeof(library.Text), text, sizes, "hidden base")

    def _chain(self) -> None:
        chaining, at = self.call.chaining, library.DraftCall.chaining.offset
        of = at + library.Chaining.chain.offset
        table, chains = self._table(of, chaining.chain, library.Chain, chaining.chains)
        for i, chain in enumerate(chains):
            slots = chain.slot + chain.steps
            sizes = {"base": 4 * slots * self.runner._outputs, "hidden": 4 * slots * self._shape.width}
            self._attach(table, i * c.sizeof(library.Chain), chain, sizes)
        sizes = dict.fromkeys(("numbers", "sure"), 4 * chaining.chains * chaining.steps)
        sizes |= {"logits": 4 * chaining.chains * self.runner._outputs}
        self._attach(self.own, at, chaining, sizes, "numbers sure logits")
