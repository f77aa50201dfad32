"""The target's hidden states as a vLLM server computes them, by vLLM's own `extract_hidden_states`.

`paceline vllm command --hidden-states FOLDER` is the server's call. Server and training share that folder: a
request's states come as a safetensors file, which is deleted once it is read.
"""

import fcntl
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from paceline.errors import one_line
from paceline.target.weights.model_config import Weights
from paceline.train.data.vllm_requests import completions
from paceline.train.recipe import default_taps
from paceline.train.train_decoder import TrainDecoder

SETTING: Final = "hidden_states_from"
_ASK: Final = {"max_tokens": 1, "temperature": 0.0, "kv_transfer_params": {"hidden_states": True}}


def server_layers(layers: int, taps: int) -> tuple[int, ...]:
    """The layers that a server must return, by vLLM's count: n is the output of the n-th, from 1.

    layers: of the target. taps: that a head reads. The last layer's gives the final hidden states.
    """
    return tuple(sorted({*(tap + 1 for tap in default_taps(layers, taps)), layers}))


class VllmDecoder(TrainDecoder):
    """Embeddings, norm and head are local; so is everything but `features`."""

    computed_by = "vllm"

    def __init__(self, weights: Weights, device: torch.device | str, dtype: torch.dtype, url: str) -> None:
        super().__init__(weights, device, dtype)
        self._url = url

    @torch.no_grad()
    def features(self, tokens: Tensor, taps: Collection[int] = ()) -> tuple[dict[int, Tensor], Tensor]:
        """Padding is sent along, which no row before it attends to."""
        last = self.shape.layers - 1
        texts = tokens.tolist()

        def read(index: int, reply: Mapping[str, Any]) -> dict[int, Tensor]:
            return _layers(reply["kv_transfer_params"], texts[index], {*taps, last})

        bodies = [{"prompt": text, **_ASK} for text in texts]
        rows = completions(self._url, SETTING, bodies, read)
        hidden = {tap: torch.stack([row[tap] for row in rows]).to(self.device) for tap in {*taps, last}}
        final = F.rms_norm(hidden[last].float(), (self.shape.width,), self.norm, self.shape.norm_eps)
        return {tap: hidden[tap].to(self.dtype) for tap in taps}, final.to(self.dtype)


def _layers(params: Mapping[str, Any] | None, text: list[int], wanted: Collection[int]) -> dict[int, Tensor]:
    """By layer, from 0: [tokens, width]."""
    if not params or not {"hidden_states_path", "layers"} <= params.keys():
        raise ValueError(
            "the server returns no hidden states: start it by `paceline vllm command --hidden-states FOLDER`"
        )
    ids = list(params["layers"])
    if missing := sorted({layer + 1 for layer in wanted} - set(ids)):
        raise ValueError(f"the server returns layers {ids}, and not {missing}")
    path = Path(params["hidden_states_path"])
    read = _read(path)
    if read["token_ids"].tolist() != text or len(read["hidden_states"]) != len(text):
        raise ValueError("the file holds the states of another text")
    path.unlink()
    _lock(path).unlink()
    return {layer: read["hidden_states"][:, ids.index(layer + 1)] for layer in wanted}


def _lock(path: Path) -> Path:
    """The server holds it until it has written the file."""
    return path.with_name(path.name + ".lock")


def _read(path: Path) -> dict[str, Tensor]:
    if path.suffix != ".safetensors":
        raise ValueError(f"{path} is no safetensors file")
    try:
        with _lock(path).open() as file:
            fcntl.flock(file, fcntl.LOCK_SH)
            return load_file(path)
    except Exception as error:  # OSError, or safetensors' own
        raise ValueError(f"{path} cannot be read here: {one_line(error)}; is the folder shared?") from None
