"""Block heads as DSpark checkpoints of the speculators format.

The format marks empty slots by a token, which ours have none: they get one more row than the target has
tokens. Its table of pairs tells all of the target's tokens apart; ours those that it can guess.
"""

from typing import Any, Final

import torch
from torch import Tensor

from paceline.errors import DrafterMismatch
from paceline.exchange.layers import (
    PARTS,
    decoder_shape,
    layer_config,
    speculative_tokens,
    speculators_config,
    unusable,
)
from paceline.exchange.swapped import (
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
from paceline.heads.block import BlockNet, BlockShape
from paceline.heads.folder import Card
from paceline.target.checkpoint import Fields

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
UNUSED: Final = ("t2d", "rotary_emb.inv_freq", "verifier_norm.weight", "verifier_lm_head.weight")


def written(net: BlockNet, card: Card, target: Target, verifier: str) -> Written:
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
    size = config.whole("draft_vocab_size", vocab)
    ids, rows = draft_order(found, size, target)
    shape = BlockShape(
        **common,
        vocab=vocab,
        draft_vocab=size,
        taps=taps_of(found, config.raw("aux_hidden_state_layer_ids"), target),
        layers=layer.whole("num_hidden_layers", most=1000),
        block=config.whole("block_size", speculative_tokens(found, 8), 1000),
        markov_rank=config.whole("markov_rank"),
        window=config.fields(OURS).whole("window", WHOLE_TEXT),
    )
    names = _names(shape.layers)
    surplus = {*found.tensors} - {*names.values(), *LEFT}
    surplus -= {name for name in surplus if name.endswith(UNUSED)}
    if surplus:
        raise unusable(found, f"a tensor {min(surplus)[:80]}", "the parts of a DSpark head")
    _require_targets_own(found, target, ids, rows)
    return Taken("block", shape, ids, _weights(found, shape, target, ids, rows))


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


def _require_targets_own(found: Found, target: Target, ids: Tensor, rows: Tensor) -> None:
    """Of these a block head has none of its own."""
    embed, head = found.tensors.get(EMBED), found.tensors.get(HEAD)
    different = None
    if embed is not None and not is_targets(embed[: len(target.pieces.embed)], target.embed):
        different = EMBED
    elif head is not None and not is_targets(head[rows], target.pieces.head[ids]):
        different = HEAD
    if different:
        raise DrafterMismatch(
            f"{found.name}: {different} is not that of {target.name}, which block heads borrow: "
            "import it for the model that it was trained for, with the very weights"
        )


def _weights(found: Found, shape: BlockShape, target: Target, ids: Tensor, rows: Tensor) -> dict[str, Any]:
    weights = {ours: found.tensor(theirs).float() for ours, theirs in _names(shape.layers).items()}
    mask = found.config.whole(MASK)
    table = target.embed if mask < shape.vocab and EMBED not in found.tensors else found.tensor(EMBED).float()
    weights["mask"] = table[mask : mask + 1]
    weights["markov_in.weight"] = _pairs(found, shape, ids)
    weights["markov_out.weight"] = found.tensor(MARKOV_OUT).float()[rows]
    sure = torch.zeros(1, shape.width + shape.markov_rank)
    bias = torch.zeros(1)
    if found.config.flag("enable_confidence_head", False):
        given = found.tensor(f"{SURE}.weight").float()
        sure[:, : given.shape[1]] = given
        bias = found.tensor(f"{SURE}.bias").float()
    return weights | {"sure.weight": sure, "sure.bias": bias}


def _pairs(found: Found, shape: BlockShape, ids: Tensor) -> Tensor:
    table = found.tensor(MARKOV_IN).float()
    others = torch.ones(len(table), dtype=torch.bool)
    others[ids] = False
    rest = table[others]
    if not len(rest):
        rest = torch.zeros(1, table.shape[1])
    if not torch.equal(rest, rest[:1].expand_as(rest)):
        raise unusable(
            found, "a Markov head that tells tokens apart which it cannot guess", "one row for all"
        )
    return torch.cat((table[ids], rest[:1]))
