"""A batched decoder in plain torch, for training; whatever generates text uses target/.

It knows all families of target/eager/decoder.py but those with experts or soft-capping. The residual stream
is float32 whatever the weights are.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from paceline.errors import UnknownArchitecture
from paceline.target.eager.rope import RopeTable, rotate
from paceline.target.weights.model_config import ModelConfig, Weights

# Takes a layer's index and its queries [b, heads, n, head_dim], keys and values [b, kv_heads, n, head_dim].
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
# Not cuDNN's, which plans again for every shape: no two batches have the same.
_BACKENDS: Final = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
JOINED: Final = {"qkv": ("q", "k", "v"), "o": ("o",), "gate_up": ("gate", "up"), "down": ("down",)}
Rotation = tuple[Tensor, Tensor]  # cosines, signed sines: broadcast over [b, heads, n, head_dim]


class TrainDecoder:
    """Weights that already have the device and dtype are shared, not copied."""

    computed_by = ""  # the engine that computes hidden states; "": this one

    def __init__(self, weights: Weights, device: torch.device | str, dtype: torch.dtype) -> None:
        require_trainable(weights.shape)
        self.shape, self.fingerprint = weights.shape, weights.fingerprint
        self.device, self.dtype = torch.device(device), dtype
        tensors = {name: tensor.to(self.device, dtype) for name, tensor in weights.tensors.items()}
        self.embed = tensors["embed"]  # [vocab, width]
        self.head = tensors.get("head", self.embed)  # [vocab, width]
        self.norm = tensors["norm"].float()  # [width]
        self.layers = [Layer(i, self.shape, tensors) for i in range(self.shape.layers)]
        shape = self.shape
        self.scale = shape.attn_scale or shape.head_dim**-0.5
        self._ropes = [
            RopeTable(rope, shape.head_dim, self.device)
            for rope in (shape.rope, shape.local_rope or shape.rope)
        ]

    def local(self, layer: int) -> bool:
        """True if the layer attends to a sliding window only."""
        return self.shape.local(layer)

    def rotations(self, length: int) -> tuple[Rotation, Rotation]:
        """For global and local layers, positions 0 to length: each [length, head_dim]."""
        positions = torch.arange(length, device=self.device)
        everywhere, local = (rope.rows(positions, length) for rope in self._ropes)
        return everywhere, local

    @torch.no_grad()
    def features(self, tokens: Tensor, taps: Collection[int] = ()) -> tuple[dict[int, Tensor], Tensor]:
        """tokens [b, n], right-padded -> outputs of the layers `taps`, and the final hidden states, normed.

        All [b, n, width] in the model's dtype; rows of padding mean nothing and no other row attends to them.
        """
        hidden = self.run(tokens, self.rotations(tokens.shape[1]), self.causal(tokens.shape[1]), taps)
        return hidden, hidden.pop(-1)

    def logits(self, hidden: Tensor) -> Tensor:
        """Normed hidden states [..., width] -> [..., vocab] float32."""
        return F.linear(hidden, self.head).float()

    def run(
        self,
        tokens: Tensor,
        rotations: tuple[Rotation, Rotation],
        attend: Attend,
        taps: Collection[int] = (),
    ) -> dict[int, Tensor]:
        """Outputs of the layers `taps`; under -1 those of the final norm."""
        x = F.embedding(tokens, self.embed).float() * self.shape.embed_scale
        hidden = {}
        for i, layer in enumerate(self.layers):
            x = layer(x, rotations[self.local(i)], attend)
            if i in taps:
                hidden[i] = x.to(self.dtype)
        hidden[-1] = F.rms_norm(x, (x.shape[-1],), self.norm, self.shape.norm_eps).to(self.dtype)
        return hidden

    def causal(self, length: int) -> Attend:
        """Causal attention, within the window where the layer is local."""
        window = self.visible(length, self.shape.window) if any(self.shape.local_layers) else None

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            mask = window if self.local(layer) else None
            with sdpa_kernel(_BACKENDS):
                return F.scaled_dot_product_attention(
                    q, k, v, mask, is_causal=mask is None, scale=self.scale, enable_gqa=True
                )

        return attend

    def visible(self, length: int, window: int = 0) -> Tensor:
        """[length, length] bool: the keys a row attends to, within the window if there is one."""
        at = torch.arange(length, device=self.device)
        back = at[:, None] - at
        return (back >= 0) & (back < (window or length))


def require_trainable(shape: ModelConfig) -> None:
    """Raises UnknownArchitecture for a target whose layers this decoder lacks."""
    if shape.experts is not None or shape.attn_softcap or shape.logit_softcap:
        what = "a mixture of experts" if shape.experts is not None else "soft-capping"
        raise UnknownArchitecture(
            f"models of the {shape.architecture} family have {what}, which training does not know: "
            "train for another model"
        )


class Layer:
    """parts: its norms, and its matrices and biases, those of one input joined: qkv, o, gate_up, down."""

    def __init__(self, index: int, shape: ModelConfig, weights: Mapping[str, Tensor]) -> None:
        own = {
            name.rpartition(".")[2]: tensor
            for name, tensor in weights.items()
            if name.startswith(f"layers.{index}.")
        }
        self._index, self._shape, self._dtype = index, shape, own["down"].dtype
        self.parts = {name: own[name].float() for name in own if name.endswith("norm")}
        self.added: dict[
            str, Callable[[Tensor], Tensor]
        ] = {}  # LoRA adapters: added to the output of a matrix
        for name, joined in JOINED.items():
            self.parts |= _joined(own, name, joined)

    def __call__(self, x: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        """x [b, n, width] float32."""
        x = x + self._normed("post_attn_norm", self._attention(x, rotation, attend))
        return x + self._normed("post_ffn_norm", self._feed_forward(x))

    def _attention(self, x: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        shape, dtype = self._shape, self._dtype
        qkv = self._product("qkv", self._normed("attn_norm", x))
        qkv = qkv.view(*x.shape[:2], -1, shape.head_dim).transpose(1, 2)
        q, k, v = torch.split(qkv, [shape.heads, shape.kv_heads, shape.kv_heads], 1)
        q = rotate(self._normed("q_norm", q.float()), *rotation).to(dtype)
        k = rotate(self._normed("k_norm", k.float()), *rotation).to(dtype)
        seen = attend(self._index, q, k, v)
        return self._product("o", seen.transpose(1, 2).flatten(2))

    def _feed_forward(self, x: Tensor) -> Tensor:
        gate, up = self._product("gate_up", self._normed("ffn_norm", x)).chunk(2, -1)
        silu = self._shape.activation == "silu"
        return self._product("down", (F.silu(gate) if silu else F.gelu(gate, approximate="tanh")) * up)

    def _product(self, name: str, x: Tensor) -> Tensor:
        x = x.to(self._dtype)
        y = F.linear(x, self.parts[name], self.parts.get(f"{name}_bias"))
        return y + self.added[name](x) if name in self.added else y

    def _normed(self, name: str, x: Tensor) -> Tensor:
        """x as it is where the family has no such norm."""
        weight = self.parts.get(name)
        if weight is None:
            return x
        return F.rms_norm(x.float(), (x.shape[-1],), weight, self._shape.norm_eps)


def _joined(own: Mapping[str, Tensor], joined: str, names: Sequence[str]) -> dict[str, Tensor]:
    """One product for several weights of the same input, and its bias if any of them has one."""
    if len(names) == 1:
        return {name: own[name] for name in (joined, f"{joined}_bias") if name in own}
    made = {joined: torch.cat([own[name] for name in names])}
    if any(f"{name}_bias" in own for name in names):
        biases = [own.get(f"{name}_bias", own[name].new_zeros(len(own[name]))) for name in names]
        made[f"{joined}_bias"] = torch.cat(biases)
    return made
