"""vLLM itself loads what is exported, guesses as we do, and writes what it writes without."""

import json
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bench.vllm.server import MISSING, vllm_python
from paceline.config import SamplingParams, SpecConfig
from paceline.convert import METHODS, export, export_model
from paceline.convert.hf_model import config_of
from paceline.drafters.heads import drafter_of
from paceline.heads.head_checkpoint import Card, load, save
from paceline.target.weights.reader import load as load_weights
from paceline.target.weights.reader import load_embeddings
from paceline.text import Tokenizer
from paceline.train.evaluate import RecordedText
from paceline.train.losses.base import TrainBatch
from paceline.train.recipe import TrainConfig, new_recipe
from paceline.train.train_decoder import TrainDecoder
from paceline.types import Ask, HiddenRows, Seq
from support import SUPPORT
from support.models import WRITTEN, save_reference, some_tokens

pytestmark = [pytest.mark.model, pytest.mark.vllm]

ASKED = ("What is rain? Answer in two sentences.", "Write a short list of facts about gold.")
MAX_TOKENS, GUESSES = 48, 4
LIKELIEST = 20  # tokens of a place
STEPS = {"block": 80, "eagle": 32}
RATES = {"block": 3e-3, "eagle": 1e-3}


def ran(script: str, *arguments: str) -> str:
    python = vllm_python()
    if python is None:
        pytest.skip(MISSING)
    # -P: files beside the script have the names of libraries.
    command = [str(python), "-P", str(SUPPORT / script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return next(line for line in done.stdout.splitlines() if line.startswith("RESULT ")).removeprefix(
        "RESULT "
    )


@dataclass(frozen=True)
class Place:
    path: Path  # of the model as we load it
    folder: Path  # as vLLM does
    prompts: list[list[int]]
    plain: list[list[int]]  # what vLLM writes without guesses
    weights: Mapping[str, Tensor]
    model: TrainDecoder

    @property
    def texts(self) -> list[RecordedText]:
        pairs = zip(self.prompts, self.plain, strict=True)
        return [RecordedText([*p, *a], [False] * len(p) + [True] * len(a)) for p, a in pairs]


def served(folder: Path, prompts: list[list[int]], drafter: str = "", method: str = "") -> dict[str, Any]:
    asked = {"model": str(folder), "drafter": drafter, "method": method, "guesses": GUESSES}
    found: dict[str, Any] = json.loads(
        ran("vllm_serves.py", json.dumps(asked | {"prompts": prompts, "max_tokens": MAX_TOKENS}))
    )
    return found


@pytest.fixture(scope="module")
def place(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Place:
    folder = export_model(smollm2_path, tmp_path_factory.mktemp("model") / "smollm2")
    tokenizer = Tokenizer.load(smollm2_path)
    prompts = [tokenizer.encode(tokenizer.render([{"role": "user", "content": text}])) for text in ASKED]
    plain = served(folder, prompts)["tokens"]
    weights = load_weights(smollm2_path)
    model = TrainDecoder(weights, "cpu", torch.float32)
    return Place(smollm2_path, folder, prompts, plain, weights.tensors, model)


def head(place: Place, kind: str, folder: Path, steps: int) -> Path:
    """After STEPS steps it knows these very answers by heart, or nearly."""
    known = sorted({token for text in place.texts for token in text.tokens})
    config = TrainConfig(
        kind=kind,  # type: ignore[arg-type]
        steps=max(1, steps),
        draft_vocab=len(known),
        layers=2,
        block=GUESSES,
        taps=3,
        markov_rank=16,
        anchors=32,
    )
    made = new_recipe(config, place.model, torch.tensor(known), place.weights)
    optimizer = torch.optim.Adam(made.net.parameters(), RATES[kind])
    generator, lessons = torch.Generator().manual_seed(0), []
    for text in place.texts:
        tokens = torch.tensor([text.tokens])
        hidden, final = place.model.features(tokens, made.net.shape.taps)
        lessons.append(TrainBatch(tokens, torch.tensor([text.own]), hidden, final))
    for step in range(steps):
        optimizer.zero_grad()
        loss, _ = made.loss(lessons[step % len(lessons)], step / steps, generator)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    save(folder, Card(kind, made.net.shape, "smollm2", place.model.fingerprint), made.net)
    return folder


def ours(place: Place, folder: Path) -> tuple[list[list[list[int]]], list[int]]:
    """Our drafts on the way through each of these answers, and how many guesses are kept at each place."""
    drafter = drafter_of(load(folder, load_embeddings(place.path)).net)
    drafts: list[list[list[int]]] = []
    kept = [0] * GUESSES
    for text, prompt in zip(place.texts, place.prompts, strict=True):
        hidden, _ = place.model.features(torch.tensor([text.tokens]), drafter.taps)
        seq = Seq("one", list(prompt), len(prompt), SamplingParams(), SpecConfig((drafter.name,)))
        drafter.begin(seq)
        drafts.append([])
        read, anchor = 0, len(prompt)
        while rest := text.tokens[anchor + 1 :]:
            seq.tokens[:] = text.tokens[: anchor + 1]
            drafter.on_hidden(
                [HiddenRows(seq, read, {tap: rows[0, read:anchor] for tap, rows in hidden.items()})]
            )
            said = list(drafter.draft([Ask(seq, GUESSES)])[0].tokens)
            drafts[-1].append(said)
            agree = [a == b for a, b in zip(said, rest, strict=False)]
            right = [*agree, False].index(False)
            kept = [n + (place < right) for place, n in enumerate(kept)]
            read, anchor = anchor, anchor + right + 1
        drafter.end(seq)
    return drafts, kept


@pytest.mark.parametrize("kind", ["block", "eagle"])
def test_vllm_drafts_what_we_draft(kind: str, place: Place, tmp_path: Path) -> None:
    folder = head(place, kind, tmp_path / "ours", STEPS[kind])
    out = export(folder, place.path, tmp_path / "theirs", verifier=str(place.folder))
    found, (drafts, kept) = served(place.folder, place.prompts, str(out), METHODS[kind]), ours(place, folder)
    assert found["tokens"] == place.plain
    pairs = [
        both
        for here, there in zip(drafts, found["drafts"], strict=True)
        for one, other in zip(here, there, strict=False)  # vLLM makes one more when an answer has ended
        for both in zip(one, other, strict=True)
    ]
    same = sum(a == b for a, b in pairs)
    print(
        f"{kind}: kept by place: vLLM {found['kept']}, paceline {kept}; {same} of {len(pairs)} guesses equal"
    )
    assert sum(kept) > 20  # or the comparison would say little
    assert same >= 0.99 * len(pairs)  # two sums in another order may swap guesses that are equally likely
    for vllm, here in zip(found["kept"], kept, strict=True):
        assert abs(vllm - here) <= len(ASKED)  # the last round of an answer may reach past its end


@pytest.mark.parametrize("family", WRITTEN)
def test_vllm_computes_what_we_compute(family: str, tmp_path: Path) -> None:
    save_reference(family, tmp_path, hidden_size=192, head_dim=32)  # vLLM derives a qwen2's head_dim
    weights, tokens = load_weights(tmp_path), some_tokens(60)
    model = TrainDecoder(weights, "cpu", torch.float32)
    ours = model.logits(model.features(torch.tensor([tokens]))[1])[0].log_softmax(-1)
    described = config_of(weights.shape, weights.tensors, "float32", {})
    (tmp_path / "config.json").write_text(json.dumps(described))
    asked = {"model": str(tmp_path), "tokens": tokens, "most": LIKELIEST}
    places: list[dict[str, float]] = json.loads(ran("vllm_scores.py", json.dumps(asked)))
    assert len(places) == len(tokens) - 1
    for place, row in zip(places, ours, strict=False):
        here = row[[int(token) for token in place]]
        assert len(here) >= LIKELIEST
        assert torch.allclose(torch.tensor([*place.values()]), here, rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", ["block", "eagle"])
def test_the_formats_own_library_accepts_the_settings(kind: str, place: Place, tmp_path: Path) -> None:
    folder = head(place, kind, tmp_path / "ours", 0)
    out = export(folder, place.path, tmp_path / "theirs", verifier="smollm2")
    found = json.loads(ran("speculators_reads.py", str(out)))
    assert found["type"] == METHODS[kind]
    assert (found["verifier"], found["tokens"]) == ("smollm2", GUESSES)
    assert found["missing"] == found["unexpected"] == []
