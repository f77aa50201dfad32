"""Exported heads come back as they were, and what cannot be carried is named."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from paceline.convert import dspark, eagle3, export, import_
from paceline.convert import export as the_export
from paceline.convert.foreign_checkpoint import (
    OutputCheckpoint,
    SourceCheckpoint,
    TargetModel,
    read_folder,
    write_folder,
)
from paceline.errors import (
    CorruptModel,
    DrafterMismatch,
    PacelineError,
    UnknownArchitecture,
    UnknownModel,
    UsageError,
)
from paceline.heads.base import DraftHead
from paceline.heads.calibration import Calibration
from paceline.heads.eagle import EagleConfig, EagleHead
from paceline.heads.head_checkpoint import Card, load, save
from paceline.target.weights.checkpoint import Fields
from paceline.target.weights.reader import load as load_weights
from paceline.target.weights.reader import load_embeddings
from paceline.train.evaluate import RecordedText, replay
from paceline.train.recipe import default_taps
from paceline.train.train_decoder import TrainDecoder
from support.checkpoints import PIECES, TARGET, a_card, an_eagle
from support.heads import medusa_net, random_net
from support.models import VOCAB


def found(output: OutputCheckpoint) -> SourceCheckpoint:
    config = json.loads(json.dumps(output.config))
    return SourceCheckpoint("theirs", Fields("config.json", config), output.tensors)


def same(net: DraftHead, back: Any) -> None:
    assert back.shape == net.shape
    assert torch.equal(back.draft_ids, net.draft_ids)
    own = net.state_dict()
    assert set(own) == set(back.weights)
    assert all(torch.equal(weight, back.weights[name]) for name, weight in own.items())


@given(
    st.sampled_from([20, 40, VOCAB]),
    st.integers(0, 50),
    st.fixed_dictionaries(
        {
            "tap_norm": st.sampled_from(["each", "all", "none"]),
            "normed_residual": st.booleans(),
            "feeds_normed": st.booleans(),
            "biased": st.booleans(),
            "own_embed": st.booleans(),
        }
    ),
)
def test_any_eagle_comes_back(draft_vocab: int, seed: int, settings: dict[str, Any]) -> None:
    net = an_eagle(draft_vocab, seed, **settings)
    same(
        net,
        eagle3.from_checkpoint(
            found(eagle3.to_checkpoint(net, a_card("eagle", net), TARGET, "tiny")), TARGET
        ),
    )


@given(st.sampled_from([20, 60, VOCAB]), st.integers(0, 50))
def test_any_block_comes_back(draft_vocab: int, seed: int) -> None:
    net = random_net(seed, draft_vocab)
    same(
        net,
        dspark.from_checkpoint(
            found(dspark.to_checkpoint(net, a_card("block", net), TARGET, "tiny")), TARGET
        ),
    )


def test_a_scaled_embedding_is_written_as_the_layers_read_it() -> None:
    scaled = replace(TARGET, embeddings=replace(PIECES, embed_scale=3.0))
    block, eagle = random_net(), an_eagle()
    for output in (
        dspark.to_checkpoint(block, a_card("block", block), scaled, "tiny"),
        eagle3.to_checkpoint(eagle, a_card("eagle", eagle), scaled, "tiny"),
    ):
        assert torch.equal(output.tensors["embed_tokens.weight"][:VOCAB], PIECES.embed * 3)
    back = eagle3.from_checkpoint(found(output), scaled)
    assert back.shape == eagle.shape


@pytest.mark.model
@pytest.mark.parametrize("kind", ["block", "eagle"])
def test_drafts_on_the_real_model_stay_the_same(kind: str, smollm2_path: Path, tmp_path: Path) -> None:
    """Through the files, from int8: the exported weights are those that are served."""
    from paceline.drafters.heads import drafter_of
    from paceline.heads.block import BlockConfig, BlockHead

    embeddings = load_embeddings(smollm2_path)
    model = TrainDecoder(load_weights(smollm2_path), "cpu", torch.float32)
    of, ids = model.shape, torch.arange(0, 900, 3)
    sizes = (of.width, of.heads, of.kv_heads, of.head_dim, 256, of.vocab_size, len(ids))
    taps = default_taps(of.layers, 3)
    net: DraftHead
    if kind == "block":
        net = BlockHead(BlockConfig(*sizes, taps, 1, 4, 8, norm_eps=of.norm_eps), embeddings, ids)
    else:
        net = EagleHead(EagleConfig(*sizes, taps, 4, norm_eps=of.norm_eps), embeddings, ids)
    net.init_weights(embeddings, torch.Generator().manual_seed(0))
    card = Card(kind, net.shape, "smollm2", embeddings.fingerprint)
    save(tmp_path / "ours", card, net)
    export(tmp_path / "ours", smollm2_path, tmp_path / "theirs")
    back = import_(tmp_path / "theirs", smollm2_path, tmp_path / "back")
    assert (back.kind, back.shape, back.weights) == (kind, net.shape, "float32")
    tokens = torch.randint(0, 900, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    texts = [RecordedText(tokens, [False] * 4 + [True] * 36)]
    nets = [load(tmp_path / name, embeddings).net for name in ("ours", "back")]
    first, second = ([replay(drafter_of(n), model, texts, 4)] for n in nets)
    assert first == second
    assert all(torch.equal(a, b) for a, b in zip(nets[0].parameters(), nets[1].parameters(), strict=True))


@pytest.fixture
def theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An exported eagle head; the tiny target stands in for a model on disk."""
    monkeypatch.setattr(TargetModel, "open", lambda path: TARGET)
    net = an_eagle()
    save(tmp_path / "ours", a_card("eagle", net), net)
    return export(tmp_path / "ours", tmp_path / "tiny", tmp_path / "theirs")


def changed(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    def apply(folder: Path) -> None:
        table = json.loads((folder / "config.json").read_text())
        change(table)
        (folder / "config.json").write_text(json.dumps(table))

    return apply


def retensored(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    def apply(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")

    return apply


def layer(**values: Any) -> Callable[[Path], object]:
    return changed(lambda t: t["transformer_layer_config"].update(values))


BROKEN: list[tuple[Callable[[Path], object], type[PacelineError], str]] = [
    (layer(hidden_size=64), DrafterMismatch, "hidden size 64, and tiny has 48"),
    (layer(vocab_size=VOCAB + 9), DrafterMismatch, "vocabulary size"),
    (
        changed(lambda t: t.update(eagle_aux_hidden_state_layer_ids=[1, 3, 6])),
        DrafterMismatch,
        "reads layer 6, and tiny has 1 to 5",
    ),
    (
        changed(lambda t: t.update(eagle_aux_hidden_state_layer_ids="all")),
        CorruptModel,
        "that are read",
    ),
    (
        retensored(lambda t: t.pop("layers.0.mlp.up_proj.weight")),
        CorruptModel,
        "no tensor layers.0.mlp",
    ),
    (retensored(lambda t: t.pop("d2t")), CorruptModel, "no tensor d2t"),
    (retensored(lambda t: t.update(d2t=t["d2t"] + VOCAB)), DrafterMismatch, "different tokens of tiny"),
    (
        retensored(lambda t: t.update({"layers.0.mlp.up_proj.bias": torch.zeros(64)})),
        UnknownArchitecture,
        "a tensor layers.0.mlp.up_proj.bias",
    ),
    (layer(intermediate_size=65), CorruptModel, r"gate_proj.weight is \(64, 48\)"),
    (layer(num_hidden_layers=2), UnknownArchitecture, "2 layers"),
    (layer(model_type="qwen3"), UnknownArchitecture, "type 'qwen3'"),
    (layer(hidden_act="gelu"), UnknownArchitecture, "activation 'gelu'"),
    (layer(rope_scaling={"rope_type": "yarn"}), UnknownArchitecture, "type 'yarn'"),
    (changed(lambda t: t.update(target_hidden_size=96)), UnknownArchitecture, "target's of 96"),
    (changed(lambda t: t.update(speculators_model_type="peagle")), UnknownArchitecture, "'peagle'"),
    (changed(lambda t: t.update(paceline={"acceptance": ["x"]})), CorruptModel, "paceline in config.json"),
    (lambda f: (f / "config.json").write_text("{"), CorruptModel, "not JSON"),
    (lambda f: (f / "model.safetensors").write_bytes(b"no"), CorruptModel, "damaged"),
    (lambda f: (f / "model.safetensors").unlink(), CorruptModel, "has no weights"),
    (lambda f: (f / "config.json").unlink(), CorruptModel, "has no config.json"),
]


@pytest.mark.parametrize(("harm", "error", "says"), BROKEN, ids=[says for *_, says in BROKEN])
def test_what_cannot_be_taken_is_named(
    theirs: Path, tmp_path: Path, harm: Callable[[Path], object], error: type[PacelineError], says: str
) -> None:
    import_(theirs, tmp_path / "tiny", tmp_path / "whole")
    harm(theirs)
    with pytest.raises(error, match=says):
        import_(theirs, tmp_path / "tiny", tmp_path / "out")
    assert not (tmp_path / "out").exists()


BLOCKS: list[tuple[Callable[[Path], object], type[PacelineError], str]] = [
    (changed(lambda t: t.update(sample_from_anchor=False)), UnknownArchitecture, "sample_from_anchor"),
    (changed(lambda t: t.update(markov_head_type="rnn")), UnknownArchitecture, "type 'rnn'"),
    (layer(layer_types=["sliding_attention"] * 2), UnknownArchitecture, "sliding window"),
    (
        retensored(lambda t: t["embed_tokens.weight"].mul_(2)),
        DrafterMismatch,
        "embed_tokens.weight is not",
    ),
    (retensored(lambda t: t["lm_head.weight"].mul_(2)), DrafterMismatch, "lm_head.weight is not that of"),
    (
        retensored(lambda t: t["markov_head.markov_w1.weight"].add_(torch.rand(VOCAB + 1, 8))),
        UnknownArchitecture,
        "different rows for tokens",
    ),
]


@pytest.mark.parametrize(("harm", "error", "says"), BLOCKS, ids=[says for *_, says in BLOCKS])
def test_what_a_block_cannot_be_is_named(
    tmp_path: Path, harm: Callable[[Path], object], error: type[PacelineError], says: str
) -> None:
    net = random_net(draft_vocab=60)
    output = dspark.to_checkpoint(net, a_card("block", net), TARGET, "tiny")
    write_folder(tmp_path / "theirs", output, torch.float32)
    dspark.from_checkpoint(read_folder(tmp_path / "theirs"), TARGET)
    harm(tmp_path / "theirs")
    with pytest.raises(error, match=says):
        dspark.from_checkpoint(read_folder(tmp_path / "theirs"), TARGET)


def test_nothing_is_written_over(theirs: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is there already"):
        export(tmp_path / "ours", tmp_path / "tiny", theirs)
    with pytest.raises(UsageError, match="is there already"):
        import_(theirs, tmp_path / "tiny", tmp_path / "ours")


def test_what_cannot_be_written_is_named(theirs: Path, tmp_path: Path) -> None:
    net = medusa_net()
    save(tmp_path / "medusa", Card("medusa", net.shape, "tiny", PIECES.fingerprint), net)
    with pytest.raises(UnknownArchitecture, match="a medusa drafter"):
        export(tmp_path / "medusa", tmp_path / "tiny", tmp_path / "out")
    with pytest.raises(UsageError, match="'onnx' is not known: expected one of speculators"):
        the_export(tmp_path / "ours", tmp_path / "tiny", tmp_path / "out", "onnx")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="weights='int4'"):
        import_(theirs, tmp_path / "tiny", tmp_path / "out", "int4")  # type: ignore[arg-type]
    with pytest.raises(UnknownModel, match="there is no folder"):
        import_(tmp_path / "nowhere", tmp_path / "tiny", tmp_path / "out")


def test_what_was_measured_comes_along(theirs: Path, tmp_path: Path) -> None:
    card = import_(theirs, tmp_path / "tiny", tmp_path / "back")
    assert card.calibration == Calibration((1.5,) * 3, (0.25,) * 3)
    assert card.data == {"imported": "theirs"}
