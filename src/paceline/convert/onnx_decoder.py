"""Writes a decoder as an ONNX graph with its KV cache as inputs and outputs, also for onnxruntime-web.

The graph follows `target/eager` operation by operation, for one sequence, in operators of ONNX opset 17,
which the WASM and the WebGPU backend of onnxruntime-web both have. Weights that stay as a GGUF file holds
them are multiplied by `com.microsoft.MatMulNBits`, whose blocks of 32 with a scale hold
Q4_0, Q8_0 and, with an offset added, Q4_1.

inputs   input_ids int64 [1, n]; num_logits int64 [1]; past_length int64 [1]
         past_key_values.{i}.key, .value float32 [1, kv_heads, past, head_dim], past_length of them used
outputs  logits float32 [1, num_logits, vocab], of the last tokens
         token int64 [1, num_logits], the most probable ones
         present.{i}.key, .value float32 [1, kv_heads, past_length + n, head_dim]
A sequence is rolled back by a past_length that is less than what the cache holds.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.atomic import replacing
from paceline.convert.export import known_word
from paceline.errors import UnknownArchitecture, UsageError
from paceline.target.eager.rope import RopeTable
from paceline.target.weights.model_config import ModelConfig, Rope, Weights
from paceline.target.weights.reader import load
from paceline.target.weights.tensors import EncodedMatrix

OnnxDtype = Literal["float32", "float16", "gguf"]
OPSET: Final = 17
IR_VERSION: Final = 9  # read by every onnxruntime since 1.16
BLOCK: Final = 32  # values that share a scale
ENCODED: Final = ("Q4_0", "Q4_1", "Q8_0")
MAX_BYTES: Final = (1 << 31) - (1 << 24)  # a protocol buffer holds 2 GiB
MICROSOFT: Final = "com.microsoft"
FLOAT: Final = 1  # onnx.TensorProto.FLOAT


def export_onnx(path: Path, out: Path, *, dtype: OnnxDtype = "float32", context: int = 0) -> Path:
    """Writes a model, a GGUF file or a folder, to the file `out`.

    dtype: how matrices are stored; all is computed in float32. float32 keeps every decoded weight, float16
    rounds, gguf leaves the blocks of a GGUF file as they are. context: most positions; 0: those of the
    model.
    """
    known_word(dtype, OnnxDtype)
    if out.exists():
        raise UsageError(f"{out} is there already: name a new file, or remove it first")
    _require_onnx()
    weights = load(path, keep=ENCODED if dtype == "gguf" else ())
    if dtype == "gguf" and not weights.encoded:
        kinds = ", ".join(ENCODED)
        raise UsageError(f"{path.name} has no matrix in {kinds}: use the dtype float32 or float16")
    import onnx

    model = decoder_graph(weights, np.float16 if dtype == "float16" else np.float32, context)
    if model.ByteSize() > MAX_BYTES:
        raise UsageError(
            f"{path.name} needs {model.ByteSize() / 1e9:.1f} GB, more than the 2 GiB of an ONNX file: "
            "use the dtype float16 or gguf, or a smaller model"
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    with replacing(out) as fresh:
        onnx.save(model, str(fresh))
    return out


def _require_onnx() -> None:
    try:
        import onnx  # noqa: F401
    except ImportError:
        raise UsageError("the export needs the package onnx: pip install 'paceline[onnx]'") from None


def decoder_graph(weights: Weights, store: type[np.floating[Any]] = np.float32, context: int = 0) -> Any:
    """The onnx.ModelProto. store: the type of dense matrices in the file."""
    shape = weights.shape.within(context)
    if shape.experts is not None:
        raise UnknownArchitecture(
            "a mixture of experts has no ONNX form here: export a model whose layers are dense"
        )
    positions = min(context or shape.max_context, shape.max_context)
    return _Decoder(replace(weights, shape=shape), store, positions).model()


@dataclass(frozen=True, slots=True)
class _Rotation:
    """Names of the cosines and signed sines of the rows, each [n, head_dim]."""

    cos: str
    sin: str


class _Graph:
    """Nodes and constants; each operation gives the name of its result."""

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.constants: dict[str, Any] = {}

    def op(self, kind: str, *inputs: str, output: str = "", domain: str = "", **attributes: Any) -> str:
        from onnx import helper

        name = output or f"{kind}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, list(inputs), [name], domain=domain, **attributes))
        return name

    def split(self, x: str) -> tuple[str, str]:
        """The two halves of the last axis."""
        from onnx import helper

        names = [f"Split_{len(self.nodes)}_{half}" for half in (0, 1)]
        self.nodes.append(helper.make_node("Split", [x], names, axis=-1))
        return names[0], names[1]

    def constant(self, name: str, values: NDArray[Any]) -> str:
        from onnx import numpy_helper

        if name not in self.constants:
            self.constants[name] = numpy_helper.from_array(np.asarray(values, order="C"), name)
        return name

    def ints(self, *values: int) -> str:
        return self.constant("ints_" + "_".join(map(str, values)), np.array(values, np.int64))

    def scalar(self, value: float) -> str:
        return self.constant(f"float_{value!r}", np.array(value, np.float32))

    def index(self, value: int) -> str:
        return self.constant(f"index_{value}", np.array(value, np.int64))

    def reshape(self, x: str, *sizes: int) -> str:
        """No sizes: a scalar."""
        shape = self.ints(*sizes) if sizes else self.constant("no_sizes", np.zeros(0, np.int64))
        return self.op("Reshape", x, shape)


class _Decoder:
    def __init__(self, weights: Weights, store: type[np.floating[Any]], positions: int) -> None:
        self.shape, self._tensors, self._encoded = weights.shape, weights.tensors, weights.encoded
        self._fingerprint, self._store, self._positions = weights.fingerprint, store, positions
        self._g = _Graph()
        self._block_sums: dict[str, str] = {}  # by the name of the rows

    def model(self) -> Any:
        from onnx import TensorProto, helper

        shape, g = self.shape, self._g
        tokens = g.reshape("input_ids", -1)
        self._read_positions(tokens)
        x = self._embedded(tokens)
        for layer in range(shape.layers):
            x = self._layer(layer, x)
        last = g.op("Slice", x, g.op("Neg", "num_logits"), g.ints((1 << 31) - 1), g.ints(0))
        head = "embed" if "head" not in self._tensors and "head" not in self._encoded else "head"
        logits = self._capped(self._product(self._norm(last, "norm"), head), shape.logit_softcap)
        g.op("Unsqueeze", logits, g.ints(0), output="logits")
        g.op("ArgMax", "logits", axis=2, keepdims=0, output="token")

        def value(name: str, kind: int, *sizes: int | str) -> Any:
            return helper.make_tensor_value_info(name, kind, sizes)

        caches = [(i, part) for i in range(shape.layers) for part in ("key", "value")]
        kv, size, floats = shape.kv_heads, shape.head_dim, TensorProto.FLOAT
        inputs = [value("input_ids", TensorProto.INT64, 1, "n")]
        inputs += [value(name, TensorProto.INT64, 1) for name in ("num_logits", "past_length")]
        inputs += [value(f"past_key_values.{i}.{p}", floats, 1, kv, "past", size) for i, p in caches]
        outputs = [value("logits", floats, 1, "rows", shape.vocab_size)]
        outputs += [value("token", TensorProto.INT64, 1, "rows")]
        outputs += [value(f"present.{i}.{p}", floats, 1, kv, "length", size) for i, p in caches]
        graph = helper.make_graph(g.nodes, "decoder", inputs, outputs, [*g.constants.values()])
        domains = {node.domain for node in g.nodes} | {""}
        opsets = [helper.make_opsetid(domain, 1 if domain else OPSET) for domain in sorted(domains)]
        model = helper.make_model(
            graph, opset_imports=opsets, ir_version=IR_VERSION, producer_name="paceline"
        )
        helper.set_model_props(model, self._facts())
        return model

    def _facts(self) -> dict[str, str]:
        shape = self.shape
        sizes = {"layers": shape.layers, "kv_heads": shape.kv_heads, "head_dim": shape.head_dim}
        sizes |= {"vocab_size": shape.vocab_size, "max_context": self._positions}
        return {"fingerprint": self._fingerprint, **{name: str(size) for name, size in sizes.items()}}

    def _read_positions(self, tokens: str) -> None:
        """Positions of the rows [n], masks [n, length] and rotations: the same for every layer of a kind."""
        g = self._g
        past = g.reshape("past_length")
        count = g.op("Gather", g.op("Shape", tokens), g.index(0))
        length = g.op("Add", past, count)
        self._length = g.op("Unsqueeze", length, g.ints(0))
        rows = g.op("Range", past, length, g.index(1))
        row, key = g.op("Unsqueeze", rows, g.ints(1)), g.op("Range", g.index(0), length, g.index(1))
        seen = g.op("LessOrEqual", key, row)
        self._masks = {False: self._mask(seen)}
        self._rotations = {False: self._rotation(rows, "rope", self.shape.rope)}
        if any(self.shape.local_layers):
            near = g.op("Less", g.op("Sub", row, key), g.index(self.shape.window))
            self._masks[True] = self._mask(g.op("And", seen, near))
            self._rotations[True] = self._rotation(
                rows, "local_rope", self.shape.local_rope or self.shape.rope
            )

    def _mask(self, seen: str) -> str:
        lowest = self._g.scalar(float(np.finfo(np.float32).min))
        return self._g.op("Where", seen, self._g.scalar(0.0), lowest)

    def _rotation(self, rows: str, name: str, rope: Rope) -> _Rotation:
        """Tables instead of Cos and Sin: those of GPUs are inexact at large angles."""
        table = RopeTable(rope, self.shape.head_dim, torch.device("cpu"))
        cos, sin = table.rows(torch.arange(self._positions), self._positions)
        g = self._g
        cosines, sines = g.constant(f"{name}.cos", cos.numpy()), g.constant(f"{name}.sin", sin.numpy())
        return _Rotation(g.op("Gather", cosines, rows), g.op("Gather", sines, rows))

    def _embedded(self, tokens: str) -> str:
        g, matrix = self._g, self._encoded.get("embed")
        if matrix is not None and matrix.encoding == "Q8_0":  # the blocks of the head that is tied to it
            codes, scales, _ = self._blocks("embed")
            values = g.op("Sub", g.op("Cast", g.op("Gather", codes, tokens), to=FLOAT), g.scalar(128.0))
            factors = g.op("Unsqueeze", g.op("Gather", scales, tokens), g.ints(2))
            x = g.reshape(g.op("Mul", values, factors), -1, self.shape.width)
        else:
            x = g.op("Cast", g.op("Gather", self._dense("embed"), tokens), to=FLOAT)
        return x if self.shape.embed_scale == 1.0 else g.op("Mul", x, g.scalar(self.shape.embed_scale))

    def _layer(self, layer: int, x: str) -> str:
        name = f"layers.{layer}."
        seen = self._attention(layer, self._norm(x, name + "attn_norm"))
        x = self._add(x, self._product(seen, name + "o"), name + "post_attn_norm")
        h = self._norm(x, name + "ffn_norm")
        gate = self._activated(self._product(h, name + "gate"))
        y = self._product(self._g.op("Mul", gate, self._product(h, name + "up")), name + "down")
        return self._add(x, y, name + "post_ffn_norm")

    def _add(self, x: str, y: str, norm: str) -> str:
        return self._g.op("Add", x, self._norm(y, norm) if norm in self._tensors else y)

    def _attention(self, layer: int, x: str) -> str:
        """Grouped-query attention: the queries of a group are rows of one product with their shared keys."""
        shape, g, name = self.shape, self._g, f"layers.{layer}."
        local = bool(shape.local_layers) and shape.local_layers[layer]
        q = self._heads(x, name + "q", shape.heads, self._rotations[local])
        k = self._heads(x, name + "k", shape.kv_heads, self._rotations[local])
        v = self._heads(x, name + "v", shape.kv_heads, None)
        keys, values = self._cached(layer, "key", k), self._cached(layer, "value", v)
        q = g.op("Mul", q, g.scalar(shape.attn_scale or shape.head_dim**-0.5))
        q = g.reshape(q, 1, shape.kv_heads, -1, shape.head_dim)
        scores = g.op("MatMul", q, g.op("Transpose", keys, perm=[0, 1, 3, 2]))
        scores, group = self._capped(scores, shape.attn_softcap), shape.heads // shape.kv_heads
        scores = g.op("Reshape", scores, self._sizes(shape.kv_heads, group, -1))
        weights = g.op("Softmax", g.op("Add", scores, self._masks[local]), axis=-1)
        seen = g.op("MatMul", g.op("Reshape", weights, self._sizes(1, shape.kv_heads, -1)), values)
        seen = g.op("Transpose", g.reshape(seen, shape.heads, -1, shape.head_dim), perm=[1, 0, 2])
        return g.reshape(seen, -1, shape.heads * shape.head_dim)

    def _capped(self, x: str, cap: float) -> str:
        """cap x tanh(x / cap); 0: no cap."""
        g = self._g
        return g.op("Mul", g.op("Tanh", g.op("Div", x, g.scalar(cap))), g.scalar(cap)) if cap else x

    def _sizes(self, *first: int) -> str:
        """A shape that ends with the number of keys."""
        return self._g.op("Concat", self._g.ints(*first), self._length, axis=0)

    def _heads(self, x: str, name: str, heads: int, rotation: _Rotation | None) -> str:
        """[heads, n, head_dim]"""
        g = self._g
        y = g.reshape(self._product(x, name), -1, heads, self.shape.head_dim)
        if f"{name}_norm" in self._tensors:
            y = self._norm(y, f"{name}_norm")
        y = g.op("Transpose", y, perm=[1, 0, 2])
        if rotation is None:
            return y
        first, second = g.split(y)
        turned = g.op("Mul", g.op("Concat", second, first, axis=-1), rotation.sin)
        return g.op("Add", turned, g.op("Mul", y, rotation.cos))

    def _cached(self, layer: int, part: str, rows: str) -> str:
        g, past = self._g, f"past_key_values.{layer}.{part}"
        used = g.op("Slice", past, g.ints(0), "past_length", g.ints(2))
        new = g.op("Unsqueeze", rows, g.ints(0))
        return g.op("Concat", used, new, axis=2, output=f"present.{layer}.{part}")

    def _norm(self, x: str, name: str) -> str:
        """Root-mean-square norm of the last axis."""
        g = self._g
        mean = g.op("ReduceMean", g.op("Mul", x, x), axes=[-1], keepdims=1)
        root = g.op("Sqrt", g.op("Add", mean, g.scalar(self.shape.norm_eps)))
        weight = g.constant(name, _floats(self._tensors[name]))
        return g.op("Mul", g.op("Div", x, root), weight)

    def _activated(self, x: str) -> str:
        g = self._g
        if self.shape.activation == "silu":
            return g.op("Mul", x, g.op("Sigmoid", x))
        cubed = g.op("Mul", g.op("Mul", x, g.op("Mul", x, x)), g.scalar(0.044715))
        inner = g.op("Mul", g.op("Add", x, cubed), g.scalar(float(np.sqrt(2 / np.pi))))
        half = g.op("Mul", x, g.scalar(0.5))
        return g.op("Mul", half, g.op("Add", g.op("Tanh", inner), g.scalar(1.0)))

    def _product(self, x: str, name: str) -> str:
        """Rows times the transposed weight, plus the bias if there is one."""
        g, bias = self._g, f"{name}_bias"
        if name in self._encoded:
            y = self._encoded_product(x, name)
            biased = bias in self._tensors
            return g.op("Add", y, g.constant(bias, _floats(self._tensors[bias]))) if biased else y
        inputs = [x, self._as_float32(self._dense(name))]
        if bias in self._tensors:
            inputs.append(g.constant(bias, _floats(self._tensors[bias])))
        return g.op("Gemm", *inputs, transB=1)

    def _as_float32(self, weight: str) -> str:
        return weight if self._store is np.float32 else self._g.op("Cast", weight, to=FLOAT)

    def _dense(self, name: str) -> str:
        return self._g.constant(name, _floats(self._tensors[name]).astype(self._store))

    def _encoded_product(self, x: str, name: str) -> str:
        """Blocks with a minimum: what it adds to a row is the sum of the row's block times it."""
        g, matrix = self._g, self._encoded[name]
        outputs, inputs = matrix.shape
        codes, scales, offsets = self._blocks(name)
        sizes: dict[str, Any] = {"K": inputs, "N": outputs, "bits": 8 if matrix.encoding == "Q8_0" else 4}
        sizes |= {"block_size": BLOCK, "accuracy_level": 1}
        y = g.op("MatMulNBits", x, codes, scales, domain=MICROSOFT, **sizes)
        if not offsets:
            return y
        if x not in self._block_sums:
            blocks = g.reshape(x, -1, inputs // BLOCK, BLOCK)
            self._block_sums[x] = g.op("ReduceSum", blocks, g.ints(2), keepdims=0)
        return g.op("Add", y, g.op("Gemm", self._block_sums[x], offsets, transB=1))

    def _blocks(self, name: str) -> tuple[str, str, str]:
        """Names of codes [N, K / 32, bytes], scales and offsets [N, K / 32]; "": there are no offsets."""
        g = self._g
        codes, scales, offsets = nbits_blocks(self._encoded[name])
        made = g.constant(f"{name}.codes", codes), g.constant(f"{name}.scales", scales)
        return *made, "" if offsets is None else g.constant(f"{name}.offsets", offsets)


def nbits_blocks(
    matrix: EncodedMatrix,
) -> tuple[NDArray[np.uint8], NDArray[np.float32], NDArray[np.float32] | None]:
    """A matrix of a GGUF file as MatMulNBits has it: a value is (code - middle of the codes) x scale +
    offset.

    Q4_1 is scale x code + minimum, so its offset is 8 x scale + minimum; the others have none. A zero point
    for each block would do the same, but the WebGPU backend takes whole numbers only. Two codes share a
    byte, the earlier one in its lower half; in GGUF they are those of i and i + 16.
    """
    outputs, inputs = matrix.shape
    raw = matrix.rows.numpy().reshape(outputs, inputs // BLOCK, -1)
    scales = _halves(raw, 0)
    if matrix.encoding == "Q8_0":
        return raw[:, :, 2:] ^ np.uint8(0x80), scales, None
    start = 4 if matrix.encoding == "Q4_1" else 2
    low, high = raw[:, :, start:] & 15, raw[:, :, start:] >> 4
    codes = np.concatenate((low, high), 2)
    packed = codes[:, :, 0::2] | (codes[:, :, 1::2] << 4)
    return packed, scales, 8 * scales + _halves(raw, 2) if matrix.encoding == "Q4_1" else None


def _halves(raw: NDArray[np.uint8], at: int) -> NDArray[np.float32]:
    """Half-precision numbers at a byte of each block, as float32."""
    pair = np.ascontiguousarray(raw[:, :, at : at + 2])
    halves: NDArray[np.float32] = pair.view(np.float16)[:, :, 0].astype(np.float32)
    return halves


def _floats(tensor: Tensor) -> NDArray[np.float32]:
    values: NDArray[np.float32] = tensor.float().numpy()
    return values


def empty_cache(shape: ModelConfig) -> dict[str, NDArray[np.float32]]:
    """The cache inputs of a new sequence."""
    nothing = np.zeros((1, shape.kv_heads, 0, shape.head_dim), np.float32)
    parts = ("key", "value")
    return {f"past_key_values.{i}.{part}": nothing for i in range(shape.layers) for part in parts}


def next_cache(outputs: Mapping[str, NDArray[np.float32]]) -> dict[str, NDArray[np.float32]]:
    """The cache inputs after a pass. outputs: by name."""
    held = ((name, values) for name, values in outputs.items() if name.startswith("present."))
    return {name.replace("present", "past_key_values"): values for name, values in held}


def output_names(shape: ModelConfig) -> Sequence[str]:
    caches = [f"present.{i}.{part}" for i in range(shape.layers) for part in ("key", "value")]
    return ["logits", "token", *caches]
