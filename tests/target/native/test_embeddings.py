"""Embeddings of a native target: the rows that float32 copies would hold, for every kind of head."""

from pathlib import Path

import pytest
import torch

from paceline.heads.base import DenseTargetEmbeddings, DraftHead, TargetEmbeddings
from paceline.heads.block import BlockConfig, BlockHead
from paceline.heads.eagle import EagleConfig, EagleHead
from paceline.heads.head_checkpoint import Card, StoredHead, read, save
from paceline.heads.medusa import MedusaConfig, MedusaHead
from paceline.heads.runner import BlockRunner, ChainStart, TorchBlock
from paceline.target.weights.reader import load_embeddings
from support.native_targets import KINDS as ENCODINGS
from support.native_targets import a_text, native_target, tiny_model

WIDTH, VOCAB, TOKENS = 256, 131, 48  # of tiny_model; tokens that can be guessed
BLOCK = BlockConfig(WIDTH, 4, 2, 64, 96, VOCAB, TOKENS, (0, 1), 2, 5, 32)
EAGLE = EagleConfig(WIDTH, 4, 2, 64, 96, VOCAB, TOKENS, (0, 1))
MEDUSA = MedusaConfig(WIDTH, VOCAB, TOKENS, (1,), 3)
IDS = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(3))[:TOKENS].sort().values


def shaken(net: DraftHead, pieces: DenseTargetEmbeddings) -> None:
    """Every weight matters."""
    generator = torch.Generator().manual_seed(0)
    net.init_weights(pieces, generator)
    with torch.no_grad():
        for weight in net.parameters():
            scale = 0.3 if weight.dim() == 1 else weight.shape[1] ** -0.5
            weight.add_(scale * torch.randn(weight.shape, generator=generator))


def stored(folder: Path, pieces: DenseTargetEmbeddings) -> StoredHead:
    net = BlockHead(BLOCK, pieces, IDS)
    shaken(net, pieces)
    save(folder, Card("block", BLOCK, "tiny", pieces.fingerprint, "float32"), net)
    return read(folder, pieces.fingerprint, VOCAB)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("tied", [True, False])
def test_rows_are_those_of_the_file(tmp_path: Path, encoding: str, tied: bool) -> None:
    model = tiny_model(tmp_path / "model.gguf", kind=encoding, tied=tied)
    lent, pieces = native_target(model).embeddings(), load_embeddings(model)
    tokens = torch.tensor([[VOCAB - 1, 0, 7], [16, 16, 100]])
    for table, whole in ((lent.embed, pieces.embed), (lent.head, pieces.head)):
        assert len(table) == len(whole)
        assert torch.equal(table[tokens], whole[tokens])
        assert table[torch.empty(0, dtype=torch.int64)].shape == (0, WIDTH)
        for strange in (-1, VOCAB):
            with pytest.raises(IndexError, match="131"):
                table[torch.tensor([strange])]
    assert torch.equal(lent.norm, pieces.norm)
    assert (lent.fingerprint, lent.embed_scale) == (pieces.fingerprint, pieces.embed_scale)


def test_rounded_floats_are_lent_as_the_target_reads_them(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model.gguf", kind="F16")
    lent, pieces = native_target(model, dtype="int8").embeddings(), load_embeddings(model)
    every = torch.arange(VOCAB)
    step = pieces.embed.view(VOCAB, -1, 32).abs().amax(2, keepdim=True) / 127
    off = (lent.embed[every] - pieces.embed).view(VOCAB, -1, 32).abs()
    assert bool((off <= 0.51 * step).all())
    assert bool(off.any())


def test_heads_of_torch_say_the_same_with_lent_rows(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model.gguf", kind="Q4_K", tied=False)
    lent, pieces = native_target(model).embeddings(), load_embeddings(model)

    def both(net: type[DraftHead], shape: object) -> list[DraftHead]:
        def made(of: TargetEmbeddings) -> DraftHead:
            new = net(shape, of, IDS)
            shaken(new, pieces)
            return new

        return [made(lent), made(pieces)]

    tokens, positions = torch.tensor([[3, 130, 77]]), torch.arange(3)[None]
    hidden = torch.randn(1, 3, WIDTH, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        eagles = [
            net.rows(tokens, hidden, positions)
            for net in both(EagleHead, EAGLE)
            if isinstance(net, EagleHead)
        ]
        assert torch.equal(eagles[0].queries, eagles[1].queries)
        assert torch.equal(eagles[0].keys_values, eagles[1].keys_values)
        first, second = (net(hidden) for net in both(MedusaHead, MEDUSA))
        assert torch.equal(first, second)
        texts = []
        for net in both(BlockHead, BLOCK):
            assert isinstance(net, BlockHead)
            texts.append(filled(TorchBlock(net))[0])
        assert torch.equal(*texts)


def filled(runner: BlockRunner) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks behind two tokens: the rows before the output matrix, and logits of first positions."""
    hidden, logits = [], []
    for seed in (0, 90):
        (block,) = runner.fill([a_text(runner, BLOCK, 20, seed)], BLOCK.block)
        hidden.append(block.hidden[: BLOCK.block])
        logits.append(torch.from_numpy(runner.logits_at([ChainStart(block, 0, 5)])[0]))
    return torch.stack(hidden), torch.stack(logits)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_native_block_reads_the_targets_own_rows(tmp_path: Path, encoding: str) -> None:
    model = tiny_model(tmp_path / "model.gguf", kind=encoding, tied=False)
    target, pieces = native_target(model), load_embeddings(model)
    head = stored(tmp_path / "head", pieces)
    runner, net = target.block_runner(head), head.net(pieces)
    assert runner is not None
    assert isinstance(net, BlockHead)
    for ours, theirs in zip(filled(runner), filled(TorchBlock(net)), strict=True):
        assert (ours - theirs).norm() < 0.05 * theirs.norm()  # weights, rows and keys are rounded


def test_the_targets_memory_stays_as_long_as_rows_may_be_read(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model.gguf", kind="Q8_0")
    pieces = load_embeddings(model)
    target = native_target(model)
    runner = target.block_runner(stored(tmp_path / "head", pieces))
    assert runner is not None
    before, rows = filled(runner), target.embeddings().embed[torch.arange(VOCAB)]
    embed = target.embeddings().embed
    del target
    assert torch.equal(embed[torch.arange(VOCAB)], rows)
    assert torch.equal(filled(runner)[0], before[0])
