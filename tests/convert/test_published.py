"""Published EAGLE-3 and Medusa checkpoints guess here what they guess in code that is not ours."""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from paceline.config import SamplingParams, SpecConfig
from paceline.convert import import_
from paceline.drafters.heads.eagle import EagleDrafter
from paceline.drafters.heads.medusa import MedusaDrafter
from paceline.drafters.heads.tree_growth import Position
from paceline.heads.base import DenseTargetEmbeddings
from paceline.heads.eagle import EagleHead
from paceline.heads.head_checkpoint import load
from paceline.heads.medusa import MedusaHead
from paceline.target.weights.reader import load as load_weights
from paceline.target.weights.reader import load_embeddings
from paceline.train.train_decoder import TrainDecoder
from paceline.types import Ask, HiddenRows, Seq
from support.checkpoints import Eagle3, Eagle3Config, medusa_heads, shaken
from support.models import save_reference, some_tokens

GUESSES = 4
DRAFT_VOCAB = 500


@dataclass(frozen=True)
class Read:
    """Hidden rows of a model for a text, without its last token."""

    path: Path
    embeddings: DenseTargetEmbeddings
    model: TrainDecoder
    tokens: list[int]
    hidden: dict[int, Tensor]  # [n, width]
    final: Tensor  # [n, width]

    def seen(self, taps: tuple[int, ...]) -> tuple[Seq, HiddenRows]:
        params = SamplingParams(max_tokens=64)
        seq = Seq("one", list(self.tokens), len(self.tokens), params, SpecConfig(("eagle",), adaptive=False))
        return seq, HiddenRows(seq, 0, {tap: self.hidden[tap] for tap in taps})


def read_by(path: Path, tokens: list[int]) -> Read:
    model = TrainDecoder(load_weights(path), "cpu", torch.float32)
    hidden, final = model.features(torch.tensor([tokens]), range(model.shape.layers))
    rows = {layer: states[0, :-1] for layer, states in hidden.items()}
    return Read(path, load_embeddings(path), model, tokens, rows, final[0, :-1])


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory) -> Read:
    """By a random model with as many layers as the real one."""
    folder = tmp_path_factory.mktemp("target")
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "head_dim": 16, "vocab_size": 800}
    save_reference("qwen3", folder, num_hidden_layers=30, **sizes)
    return read_by(folder, some_tokens(24, vocab=800))


def saved(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor], pickled: str = "") -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    if pickled:
        torch.save(tensors, folder / pickled)
    else:
        save_file(tensors, folder / "model.safetensors")
    return folder


def eagle3(read: Read, **settings: Any) -> Eagle3:
    """A head of the model's size, with a draft vocabulary in no order."""
    of = read.model.shape
    config = Eagle3Config(of.width, of.heads, of.kv_heads, 96, of.vocab_size, DRAFT_VOCAB, **settings)
    made = shaken(Eagle3(config), 1)
    ids = torch.randperm(of.vocab_size, generator=torch.Generator().manual_seed(2))[:DRAFT_VOCAB]
    made.d2t.copy_(ids - torch.arange(DRAFT_VOCAB))
    with torch.no_grad():
        made.embed_tokens.weight.copy_(read.embeddings.embed)
    return made


PUBLISHED = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1}
WAYS: list[tuple[str, dict[str, Any], tuple[int, ...]]] = [
    ("as the authors publish it", {}, (2, 15, 27)),
    ("other layers", {"norm_before_residual": True}, (3, 10, 30)),
    ("biases", {"attention_bias": True, "rope_theta": 1e5}, (2, 15, 27)),
    ("one norm before fc", {"norm_before_fc": True}, (2, 15, 27)),
    ("norms before fc and on what is fed back", {"fc_norm": True, "norm_output": True}, (2, 15, 27)),
]


@pytest.mark.parametrize(("way", "settings", "inputs"), WAYS, ids=[way for way, *_ in WAYS])
@pytest.mark.parametrize("own_embed", [False, True])
def test_eagle3(
    way: str, settings: dict[str, Any], inputs: tuple[int, ...], own_embed: bool, read: Read, tmp_path: Path
) -> None:
    theirs = eagle3(read, **settings)
    if own_embed:
        with torch.no_grad():
            theirs.embed_tokens.weight.mul_(1.25)
    tensors = dict(theirs.state_dict())
    if not own_embed:
        del tensors["embed_tokens.weight"]
    config = PUBLISHED | asdict(theirs.config)
    if settings:
        config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": list(inputs)}
    pickled = "" if settings else "pytorch_model.bin"
    import_(saved(tmp_path / "theirs", config, tensors, pickled), read.path, tmp_path / "ours")
    net = load(tmp_path / "ours", read.embeddings).net
    assert isinstance(net, EagleHead)
    assert net.shape.own_embed == own_embed

    layers = [read.hidden[i - 1] for i in inputs]
    said, logits = theirs.draft(torch.tensor(read.tokens), layers, GUESSES)
    drafter = EagleDrafter(net)
    seq, seen = read.seen(net.shape.taps)
    drafter.begin(seq)
    drafter.on_hidden([seen])
    assert list(drafter.draft([Ask(seq, GUESSES)])[0].tokens) == said
    ids = torch.arange(DRAFT_VOCAB) + theirs.d2t
    for step, wanted in enumerate(logits):
        known = drafter._row(Position(Ask(seq, 1), tuple(said[:step]), None))
        assert known is not None
        row = torch.from_numpy(known)
        assert torch.allclose(row[ids], wanted, atol=2e-4, rtol=1e-4)
        assert int(torch.isfinite(row).sum()) == DRAFT_VOCAB


@pytest.mark.parametrize("layers", [1, 2])
def test_medusa(layers: int, read: Read, tmp_path: Path) -> None:
    of = read.model.shape
    theirs = shaken(medusa_heads(of.width, of.vocab_size, 3, layers), 3)
    prefix, file = ("", "medusa_lm_head.pt") if layers == 1 else ("medusa_head.", "")
    tensors = {prefix + name: tensor.detach() for name, tensor in theirs.state_dict().items()}
    config = {"medusa_num_heads": 3, "medusa_num_layers": layers, "base_model_name_or_path": "smollm2"}
    import_(saved(tmp_path / "theirs", config, tensors, file), read.path, tmp_path / "ours")
    net = load(tmp_path / "ours", read.embeddings).net
    assert isinstance(net, MedusaHead)
    drafter = MedusaDrafter(net)
    seq, seen = read.seen(net.shape.taps)
    drafter.begin(seq)
    drafter.on_hidden([seen])
    draft = drafter.draft([Ask(seq, 3)])[0]
    with torch.no_grad():
        wanted = torch.stack([head(read.final[-1]) for head in theirs])
        found = net(read.hidden[of.layers - 1][-1])
    assert torch.allclose(found, wanted, atol=2e-4, rtol=1e-4)
    assert list(draft.tokens) == wanted.argmax(-1).tolist()


@pytest.mark.model
def test_drafts_of_an_imported_head_cost_nothing_but_time(smollm2_path: Path, tmp_path: Path) -> None:
    """It serves, and the text is the real model's own."""
    from paceline import LLM

    read = read_by(smollm2_path, [1, 2])
    theirs = eagle3(read)
    tensors = {n: t for n, t in theirs.state_dict().items() if n != "embed_tokens.weight"}
    config = PUBLISHED | asdict(replace(theirs.config))
    import_(saved(tmp_path / "theirs", config, tensors), read.path, tmp_path / "ours", weights="int8")
    spec = SpecConfig(("eagle",), max_draft=3, adaptive=False)
    llm = LLM("smollm2-135m", trained=[tmp_path / "ours"], spec=spec)
    guessed, plain = (
        llm.generate("What do bees make?", max_tokens=12, spec=s)
        for s in (spec, SpecConfig(("none",), adaptive=False))
    )
    assert guessed.token_ids == plain.token_ids
