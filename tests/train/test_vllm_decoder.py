"""Hidden states by a server: the same features and training; what cannot be the target's is refused.

A stand-in writes the files as vLLM does; tests/vllm_engine/test_hidden_states.py asks a real one.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from paceline.errors import DataError, SettingError, UsageError
from paceline.train.recipe import TrainConfig, new_recipe
from paceline.train.trainer import train
from paceline.train.vllm_decoder import VllmDecoder, server_layers
from support.heads import batches, target_text, tiny_config, tiny_model, tiny_weights
from support.models import VOCAB
from support.vllm_stand_in import Body, serving

LAYERS = 5  # of the tiny model
EVERY = list(range(1, LAYERS + 1))  # as vLLM counts them


def vllm(folder: Path, **other: Any) -> Callable[[Body], Body]:
    """Replies as the server would; other: fields of the reply's parameters in place of its own."""

    def reply(body: Body) -> Body:
        assert body["kv_transfer_params"] == {"hidden_states": True}
        path = folder / f"{len(list(folder.iterdir()))}-{abs(hash(tuple(body['prompt'])))}.safetensors"
        hidden, _ = tiny_model().features(torch.tensor([body["prompt"]]), range(LAYERS))
        states = torch.stack([hidden[layer][0] for layer in range(LAYERS)], 1)
        save_file({"hidden_states": states, "token_ids": torch.tensor(body["prompt"])}, path)
        path.with_name(path.name + ".lock").touch()
        return {"kv_transfer_params": {"hidden_states_path": str(path), "layers": EVERY} | other}

    return reply


def served(url: str) -> VllmDecoder:
    return VllmDecoder(tiny_weights(), "cpu", torch.float32, url)


def test_features_are_those_of_the_target_and_files_are_deleted(tmp_path: Path) -> None:
    tokens = target_text()[:3].clone()
    tokens[1, 20:] = 0  # padding
    expected, last = tiny_model().features(tokens, (1, 3))
    with serving(vllm(tmp_path)) as (url, bodies):
        hidden, final = served(url).features(tokens, (1, 3))
    assert set(hidden) == {1, 3}
    assert all(torch.equal(hidden[tap], expected[tap]) for tap in hidden)
    assert torch.allclose(final, last, atol=1e-6)
    assert sorted(body["prompt"] for body in bodies) == sorted(tokens.tolist())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["eagle", "medusa"])
def test_a_head_is_trained_alike(kind: str, tmp_path: Path) -> None:
    config: TrainConfig = tiny_config(2, kind=kind)
    local = new_recipe(config, tiny_model(), torch.arange(VOCAB))
    train(local, tiny_model(), batches, config)
    with serving(vllm(tmp_path)) as (url, _):
        decoder = served(url)
        remote = new_recipe(config, decoder, torch.arange(VOCAB))
        train(remote, decoder, batches, config)
    for name, weight in remote.net.state_dict().items():
        torch.testing.assert_close(weight, local.net.state_dict()[name], atol=1e-4, rtol=1e-3)


def test_a_training_does_not_go_on_with_states_from_elsewhere(tmp_path: Path) -> None:
    files, out = tmp_path / "files", tmp_path / "out"
    files.mkdir()
    config = tiny_config(2, kind="medusa")
    with serving(vllm(files)) as (url, _):
        decoder = served(url)
        train(new_recipe(config, decoder, torch.arange(VOCAB)), decoder, batches, config, out)
    local = new_recipe(config, tiny_model(), torch.arange(VOCAB))
    with pytest.raises(UsageError, match="other settings"):
        train(local, tiny_model(), batches, config, out)


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ({"hidden_states_path": "nowhere.safetensors"}, "is the folder shared"),
        ({"layers": [1, 2, 3, 4]}, r"returns layers \[1, 2, 3, 4\], and not \[5\]"),
    ],
)
def test_a_server_that_returns_something_else_is_refused(
    other: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    with serving(vllm(tmp_path, **other)) as (url, _), pytest.raises(DataError, match=reason):
        served(url).features(target_text()[:1], (1,))


def test_the_states_of_another_text_are_refused(tmp_path: Path) -> None:
    write = vllm(tmp_path)
    with (
        serving(lambda body: write(body | {"prompt": body["prompt"][::-1]})) as (url, _),
        pytest.raises(DataError, match="states of another text"),
    ):
        served(url).features(target_text()[:1])
    assert len(list(tmp_path.iterdir())) == 2  # it may be anybody's: file and lock are left alone


def test_a_file_of_another_kind_is_neither_read_nor_deleted(tmp_path: Path) -> None:
    def reply(body: Body) -> Body:
        params = vllm(tmp_path)(body)["kv_transfer_params"]
        path = Path(params["hidden_states_path"])
        for suffix in ("", ".lock"):
            path.with_name(path.name + suffix).rename(tmp_path / f"weights.bin{suffix}")
        return {"kv_transfer_params": params | {"hidden_states_path": str(tmp_path / "weights.bin")}}

    with serving(reply) as (url, _), pytest.raises(DataError, match="no safetensors file"):
        served(url).features(target_text()[:1])
    assert {path.name for path in tmp_path.iterdir()} == {"weights.bin", "weights.bin.lock"}


def test_a_server_without_extraction_says_how_to_start_it() -> None:
    with (
        serving(lambda _: {"kv_transfer_params": None}) as (url, _),
        pytest.raises(DataError, match="paceline vllm command --hidden-states"),
    ):
        served(url).features(target_text()[:1])
    with pytest.raises(SettingError, match="hidden_states_from"):
        served("localhost:8000").features(target_text()[:1])


def test_the_servers_layers_are_the_taps_of_a_new_head_and_the_last() -> None:
    net = new_recipe(tiny_config(1, kind="eagle"), tiny_model(), torch.arange(VOCAB)).net
    assert server_layers(LAYERS, 2) == (*(tap + 1 for tap in net.shape.taps), LAYERS)
    assert server_layers(30, 5) == (2, 9, 15, 21, 28, 30)
