"""Hidden states of a running vLLM server, to train on."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from bench.vllm.server import MISSING, serving, vllm_python
from paceline.cli import main
from paceline.convert import export_model
from paceline.target.weights.reader import load
from paceline.text import Tokenizer
from paceline.train.train_decoder import TrainDecoder
from paceline.train.vllm_decoder import VllmDecoder, server_layers
from paceline.vllm.serve_command import extraction_config
from support.training import TOWNS, ask, user, write

pytestmark = [
    pytest.mark.model,
    pytest.mark.vllm,
    pytest.mark.skipif(vllm_python() is None, reason=MISSING),
]

LAYERS, TAPS = 30, (1, 14, 27)  # of SmolLM2; taps of a new head are among the server's layers


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("states")


@pytest.fixture(scope="module")
def url(smollm2_path: Path, files: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = export_model(smollm2_path, tmp_path_factory.mktemp("model") / "smollm2")
    config = extraction_config(server_layers(LAYERS, 5))
    with serving(folder, config, max_model_len=512, hidden_states=str(files)) as served:
        yield f"http://127.0.0.1:{served.port}"


def test_they_are_those_of_the_same_weights_here(url: str, files: Path, smollm2_path: Path) -> None:
    weights, tokenizer = load(smollm2_path), Tokenizer.load(smollm2_path)
    texts = [tokenizer.encode(tokenizer.render([user(ask(town))])) for town in TOWNS[:3]]
    longest = max(map(len, texts))
    tokens = torch.tensor([text + [0] * (longest - len(text)) for text in texts])
    theirs, their_last = VllmDecoder(weights, "cpu", torch.float32, url).features(tokens, TAPS)
    ours, our_last = TrainDecoder(weights, "cpu", torch.float32).features(tokens, TAPS)
    for i, text in enumerate(texts):
        rows = slice(0, len(text))
        for tap in TAPS:
            assert relative_error(theirs[tap][i, rows], ours[tap][i, rows]) < 1e-3
        assert relative_error(their_last[i, rows], our_last[i, rows]) < 1e-3
    assert not list(files.iterdir())  # read and deleted


def test_a_head_is_trained_on_the_servers_answers_and_states(url: str, files: Path, tmp_path: Path) -> None:
    talks = write(
        tmp_path / "talks.jsonl", [{"messages": [user(ask(town))], "group": town} for town in TOWNS]
    )
    out = tmp_path / "head"
    options = ["--kind", "eagle", "--steps", "2", "--max-new", "24", "--batch-tokens", "256"]
    served = ["--answers-from", url, "--hidden-states-from", url, "--device", "cpu"]
    with pytest.raises(SystemExit) as end:
        main(["train", "--traces", str(talks), "--out", str(out), *options, *served])
    assert end.value.code in (0, None)
    card = json.loads(next(out.rglob("drafter.json")).read_text())
    assert card["kind"] == "eagle"
    assert not list(files.iterdir())


def relative_error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max())
