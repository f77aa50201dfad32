"""Block heads as DSpark checkpoints of the speculators format.

The format marks empty slots by a token, which ours have none: they get one more row than the target has
tokens. Its table of pairs tells all of the target's tokens apart; ours those that it can guess.
"""

from typing import Final

import torch
from torch import Tensor

from paceline.convert.foreign_checkpoint import (
    OURS,
    WHOLE_TEXT,
    Found,
    Taken,
    Target,
    Written,
    draft_order,
    is_targets,
    offsets,
    require_target,
    taps_of,
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


def written(net: BlockHead, card: Card, target: Target, verifier: str) -> Written:
    shape, ids = net.shape, net.draft_ids.cpu()
    own = net.state_dict()
    pairs = own["markov_in.weight"]
    tensors = {theirs: own[ours] for ours, theirs in _names(shape.layers).items()} | {
        EMBED: torch.cat((target.embed, own["mask"])),
        MARKOV_IN: torch.cat((pairs[net.number], pairs[-1:])),
        MARKOV_OUT: own["markov_out.weight"],
        f"{SURE}.weight": own["sure.weight"],
        f"{SURE}.bias": own["sure.bias"],
    }
    if shape.draft_vocab < shape.vocab:
        tensors[HEAD] = target.pieces.head[ids]
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
    config[OURS] = {**config[OURS], "window": shape.window}
    return Written(config, tensors | offsets(ids, shape.vocab, more=1))


def taken(found: Found, target: Target) -> Taken:
    layer, config, vocab = (
        found.config.fields("transformer_layer_config"),
        found.config,
        len(target.pieces.embed),
    )
    _require_known(found, layer)
    common = decoder_shape(found, layer)
    reads = layer.whole("vocab_size")
    require_target(found, target, common["width"], vocab if reads == vocab + 1 else reads)
    ids, rows = draft_order(found, target)
    shape = BlockConfig(
        **common,
        vocab=vocab,
        draft_vocab=len(ids),
        taps=taps_of(found, config.raw("aux_hidden_state_layer_ids"), target),
        layers=layer.whole("num_hidden_layers", most=1000),
        block=config.whole("block_size", speculative_tokens(found, 8), 1000),
        markov_rank=config.whole("markov_rank"),
        window=config.fields(OURS).whole("window", WHOLE_TEXT),
    )
    _require_targets_own(found, shape, reads, target, ids, rows)
    return Taken("block", shape, ids, _weights(found, shape, reads, target, ids, rows))


def _names(layers: int) -> dict[str, str]:
    within = {
        f"layers.{i}.{ours}.weight": f"layers.{i}.{theirs}.weight"
        for i in range(layers)
        for ours, theirs in LAYER.items()
    }
    return OUTER | within


def _require_known(found: Found, layer: Fields) -> None:
    config, kind = found.config, layer.raw("model_type") or "qwen3"
    markov = config.raw("markov_head_type") or "vanilla"
    if kind != "qwen3":
        raise unusable(found, f"layers of type {str(kind)[:40]!r}", "qwen3")
    if markov != "vanilla":
        raise unusable(found, f"a Markov head of type {str(markov)[:40]!r}", "vanilla")
    if not config.flag("sample_from_anchor", False):
        raise unusable(found, "no guess for the anchor's place", "sample_from_anchor")
    if "sliding_attention" in str(layer.raw("layer_types")):
        raise unusable(found, "layers with a sliding window", "full attention")


def _require_targets_own(
    found: Found, shape: BlockConfig, reads: int, target: Target, ids: Tensor, rows: Tensor
) -> None:
    """Of these a block head has none of its own."""
    own = {
        EMBED: (reads, torch.arange(shape.vocab), target.embed),
        HEAD: (len(rows), rows, target.pieces.head[ids]),
    }
    for name, (size, some, theirs) in own.items():
        if name not in found.tensors:
            continue
        found.weight(name, size, shape.width)
        if not is_targets(found.tensors[name][some], theirs):
            raise DrafterMismatch(
                f"{found.name}: {name} is not that of {target.name}, which block heads borrow: "
                "import it for the model that it was trained for, with the very weights"
            )


def _weights(
    found: Found, shape: BlockConfig, reads: int, target: Target, ids: Tensor, rows: Tensor
) -> dict[str, Tensor]:
    width, rank = shape.width, shape.markov_rank
    sizes = decoder_sizes(shape, width) | {"context_norm": (width,), "attn_norm": (width,)}
    weights = parts_of(found, _names(shape.layers), sizes, LEFT)
    weights["mask"] = _mask(found, shape, reads, target)
    weights["markov_in.weight"] = _pairs(found, shape, ids)
    weights["markov_out.weight"] = found.weight(MARKOV_OUT, shape.draft_vocab, rank)[rows]
    sure, bias = torch.zeros(1, width + rank), torch.zeros(1)
    if found.config.flag("enable_confidence_head", False):
        given = found.weight(f"{SURE}.weight", 1, None)
        if given.shape[1] != width:  # it reads the pairs, too
            given = found.weight(f"{SURE}.weight", 1, width + rank)
        sure[:, : given.shape[1]] = given
        bias = found.weight(f"{SURE}.bias", 1)
    return weights | {"sure.weight": sure, "sure.bias": bias}


def _mask(found: Found, shape: BlockConfig, reads: int, target: Target) -> Tensor:
    """[1, width]: the row that stands in empty slots."""
    mask = found.config.whole(MASK, most=reads - 1)
    borrowed = mask < shape.vocab and EMBED not in found.tensors
    table = target.embed if borrowed else found.weight(EMBED, reads, shape.width)
    return table[mask : mask + 1]


def _pairs(found: Found, shape: BlockConfig, ids: Tensor) -> Tensor:
    table = found.weight(MARKOV_IN, None, shape.markov_rank)
    if len(table) < shape.vocab:
        found.weight(MARKOV_IN, shape.vocab, shape.markov_rank)
    others = torch.ones(len(table), dtype=torch.bool)
    others[ids] = False
    rest = table[others]
    if not len(rest):
        rest = torch.zeros(1, table.shape[1])
    if not torch.equal(rest, rest[:1].expand_as(rest)):
        raise unusable(
            found, f"a {MARKOV_IN} that tells tokens apart which it cannot guess", "one row for all"
        )
    return torch.cat((table[ids], rest[:1]))
