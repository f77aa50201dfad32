"""Block heads as DSpark checkpoints (arXiv 2607.05147) of the speculators format.

The format fills empty slots with a mask token, where our heads have a vector: it becomes one more row of the
embedding. The format's Markov table has a row for each token of the target, ours for each draft token.
"""

from typing import Final

import torch
from torch import Tensor

from paceline.convert.foreign_checkpoint import (
    METADATA,
    WHOLE_TEXT,
    ImportedHead,
    OutputCheckpoint,
    SourceCheckpoint,
    TargetModel,
    draft_order,
    equals_target,
    require_target,
    taps_of,
    vocab_maps,
)
from paceline.convert.speculators import (
    PARTS,
    decoder_shape,
    decoder_sizes,
    layer_config,
    parts_of,
    speculative_tokens,
    speculators_config,
    unusable,
)
from paceline.errors import DrafterMismatch
from paceline.heads.block import BlockConfig, BlockHead
from paceline.heads.head_checkpoint import Card
from paceline.target.weights.checkpoint import Fields

OUTER: Final = {
    "fc.weight": "fc.weight",
    "context_norm.weight": "hidden_norm.weight",
    "norm.weight": "norm.weight",
}
LAYER: Final = {"attn_norm": "input_layernorm", **PARTS}
MASK: Final = "mask_token_id"
EMBED: Final = "embed_tokens.weight"
HEAD: Final = "lm_head.weight"
MARKOV_IN: Final = "markov_head.markov_w1.weight"
MARKOV_OUT: Final = "markov_head.markov_w2.weight"
SURE: Final = "confidence_head.proj"
LEFT: Final = (MARKOV_IN, MARKOV_OUT, EMBED, HEAD, f"{SURE}.weight", f"{SURE}.bias", "d2t")


def to_checkpoint(net: BlockHead, card: Card, target: TargetModel, verifier: str) -> OutputCheckpoint:
    shape, ids = net.shape, net.draft_ids.cpu()
    own = net.state_dict()
    pairs = own["markov_in.weight"]
    tensors = {theirs: own[ours] for ours, theirs in _names(shape.layers).items()} | {
        EMBED: torch.cat((target.embed, own["mask"])),
        MARKOV_IN: torch.cat((pairs[net.draft_index], pairs[-1:])),
        MARKOV_OUT: own["markov_out.weight"],
        f"{SURE}.weight": own["sure.weight"],
        f"{SURE}.bias": own["sure.bias"],
    }
    if shape.draft_vocab < shape.vocab:
        tensors[HEAD] = target.embeddings.head[ids]
    config = {
        "architectures": ["DSparkSpeculator"],
        **speculators_config("dspark", card, target, verifier),
        "transformer_layer_config": {
            **layer_config(shape, target, "qwen3"),
            "num_hidden_layers": shape.layers,
            "vocab_size": shape.vocab + 1,
            "attention_bias": False,
            "use_sliding_window": False,
        },
        "aux_hidden_state_layer_ids": [tap + 1 for tap in shape.taps],
        MASK: shape.vocab,
        "block_size": shape.block,
        "sample_from_anchor": True,
        "markov_rank": shape.markov_rank,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }
    config[METADATA] = {**config[METADATA], "window": shape.window}
    return OutputCheckpoint(config, tensors | vocab_maps(ids, shape.vocab, more=1))


def from_checkpoint(source: SourceCheckpoint, target: TargetModel) -> ImportedHead:
    layer, config, vocab = (
        source.config.fields("transformer_layer_config"),
        source.config,
        len(target.embeddings.embed),
    )
    _require_known(source, layer)
    common = decoder_shape(source, layer)
    reads = layer.integer("vocab_size")
    require_target(source, target, common["width"], vocab if reads == vocab + 1 else reads)
    ids, rows = draft_order(source, target)
    shape = BlockConfig(
        **common,
        vocab=vocab,
        draft_vocab=len(ids),
        taps=taps_of(source, config.raw("aux_hidden_state_layer_ids"), target),
        layers=layer.integer("num_hidden_layers", maximum=1000),
        block=config.integer("block_size", speculative_tokens(source, 8), 1000),
        markov_rank=config.integer("markov_rank"),
        window=config.fields(METADATA).integer("window", WHOLE_TEXT),
    )
    _require_targets_own(source, shape, reads, target, ids, rows)
    return ImportedHead("block", shape, ids, _weights(source, shape, reads, target, ids, rows))


def _names(layers: int) -> dict[str, str]:
    within = {
        f"layers.{i}.{ours}.weight": f"layers.{i}.{theirs}.weight"
        for i in range(layers)
        for ours, theirs in LAYER.items()
    }
    return OUTER | within


def _require_known(source: SourceCheckpoint, layer: Fields) -> None:
    config, kind = source.config, layer.raw("model_type") or "qwen3"
    markov = config.raw("markov_head_type") or "vanilla"
    if kind != "qwen3":
        raise unusable(source, f"layers of type {str(kind)[:40]!r}", "qwen3")
    if markov != "vanilla":
        raise unusable(source, f"a Markov head of type {str(markov)[:40]!r}", "vanilla")
    if not config.flag("sample_from_anchor", False):
        raise unusable(source, "no prediction for the anchor's slot", "sample_from_anchor")
    if "sliding_attention" in str(layer.raw("layer_types")):
        raise unusable(source, "layers with a sliding window", "full attention")


def _require_targets_own(
    source: SourceCheckpoint, shape: BlockConfig, reads: int, target: TargetModel, ids: Tensor, rows: Tensor
) -> None:
    """Block heads use the target's embedding and lm_head: the checkpoint's must be equal."""
    own = {
        EMBED: (reads, torch.arange(shape.vocab), target.embed),
        HEAD: (len(rows), rows, target.embeddings.head[ids]),
    }
    for name, (size, some, theirs) in own.items():
        if name not in source.tensors:
            continue
        source.weight(name, size, shape.width)
        if not equals_target(source.tensors[name][some], theirs):
            raise DrafterMismatch(
                f"{source.name}: {name} is not that of {target.name}, which block heads borrow: "
                "import it for the model that it was trained for, with the very weights"
            )


def _weights(
    source: SourceCheckpoint, shape: BlockConfig, reads: int, target: TargetModel, ids: Tensor, rows: Tensor
) -> dict[str, Tensor]:
    width, rank = shape.width, shape.markov_rank
    sizes = decoder_sizes(shape, width) | {"context_norm": (width,), "attn_norm": (width,)}
    weights = parts_of(source, _names(shape.layers), sizes, LEFT)
    weights["mask"] = _mask(source, shape, reads, target)
    weights["markov_in.weight"] = _pairs(source, shape, ids)
    weights["markov_out.weight"] = source.weight(MARKOV_OUT, shape.draft_vocab, rank)[rows]
    sure, bias = torch.zeros(1, width + rank), torch.zeros(1)
    if source.config.flag("enable_confidence_head", False):
        weight = source.weight(f"{SURE}.weight", 1, None)
        if weight.shape[1] != width:  # it reads the pairs, too
            weight = source.weight(f"{SURE}.weight", 1, width + rank)
        sure[:, : weight.shape[1]] = weight
        bias = source.weight(f"{SURE}.bias", 1)
    return weights | {"sure.weight": sure, "sure.bias": bias}


def _mask(source: SourceCheckpoint, shape: BlockConfig, reads: int, target: TargetModel) -> Tensor:
    """[1, width]: the input of empty slots."""
    mask = source.config.integer(MASK, maximum=reads - 1)
    borrowed = mask < shape.vocab and EMBED not in source.tensors
    table = target.embed if borrowed else source.weight(EMBED, reads, shape.width)
    return table[mask : mask + 1]


def _pairs(source: SourceCheckpoint, shape: BlockConfig, ids: Tensor) -> Tensor:
    table = source.weight(MARKOV_IN, None, shape.markov_rank)
    if len(table) < shape.vocab:
        source.weight(MARKOV_IN, shape.vocab, shape.markov_rank)
    others = torch.ones(len(table), dtype=torch.bool)
    others[ids] = False
    rest = table[others]
    if not len(rest):
        rest = torch.zeros(1, table.shape[1])
    if not torch.equal(rest, rest[:1].expand_as(rest)):
        raise unusable(
            source,
            f"a {MARKOV_IN} with different rows for tokens outside the draft vocabulary",
            "one row for all",
        )
    return torch.cat((table[ids], rest[:1]))
