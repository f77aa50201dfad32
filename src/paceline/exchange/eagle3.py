"""Eagle heads as EAGLE-3 checkpoints: in the speculators format, and as their authors publish them."""

from typing import Any, Final

import torch
from torch import Tensor

from paceline.exchange.layers import (
    PARTS,
    decoder_shape,
    layer_config,
    speculative_tokens,
    speculators_config,
    unusable,
)
from paceline.exchange.swapped import (
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
from paceline.heads.eagle import EagleNet, EagleShape, TapNorm
from paceline.heads.folder import Card
from paceline.target.checkpoint import Fields

OUTER: Final = {
    "fc.weight": "fc.weight",
    "norm.weight": "norm.weight",
    "head.weight": "lm_head.weight",
    "embed": "embed_tokens.weight",
}
LAYER: Final = {"embed_norm": "input_layernorm", "hidden_norm": "hidden_norm", **PARTS}
UNUSED: Final = ("t2d", "rotary_emb.inv_freq", "verifier_norm.weight", "verifier_lm_head.weight")
GUESSES: Final = 5  # where a checkpoint does not say how many


def written(net: EagleNet, card: Card, target: Target, verifier: str) -> Written:
    shape, tensors = net.shape, {_name(name): weight for name, weight in net.state_dict().items()}
    if shape.tap_norm == "each":
        tensors |= {f"fc_norm.{i}.weight": torch.ones(shape.width) for i in range(len(shape.taps))}
    elif shape.tap_norm == "all":
        tensors["input_norm.weight"] = torch.ones(shape.width * len(shape.taps))
    if not shape.own_embed and target.pieces.embed_scale != 1:
        tensors["embed_tokens.weight"] = target.embed
    layer = {
        **layer_config(shape, target, "llama"),
        "num_hidden_layers": 1,
        "vocab_size": shape.vocab,
        "attention_bias": shape.biased,
        "mlp_bias": False,
        "num_aux_hidden_states": len(shape.taps),
    }
    if shape.window < target.shape.max_context:
        layer |= {"layer_types": ["sliding_attention"], "sliding_window": shape.window}
    config = {
        "architectures": ["Eagle3Speculator"],
        **speculators_config("eagle3", card, target, verifier),
        "transformer_layer_config": layer,
        "norm_before_residual": shape.normed_residual,
        "norm_before_fc": shape.tap_norm == "all",
        "fc_norm": shape.tap_norm == "each",
        "norm_output": shape.feeds_normed,
        "embed_requires_grad": False,
        "eagle_aux_hidden_state_layer_ids": [tap + 1 for tap in shape.taps],
    }
    return Written(config, tensors | offsets(net.draft_ids.cpu(), shape.vocab))


def taken(found: Found, target: Target) -> Taken:
    """From either format; exactly, or not at all."""
    layer = found.config.fields("transformer_layer_config")
    published = not layer.values
    layer = found.config if published else layer
    _require_known(found, layer)
    found = Found(found.name, found.config, {_plain(name): t for name, t in found.tensors.items()})
    vocab = layer.whole("vocab_size")
    common = decoder_shape(found, layer)
    require_target(found, target, common["width"], vocab)
    size = found.config.whole("draft_vocab_size", vocab)
    ids, rows = draft_order(found, size, target)
    embed = found.tensors.get("embed_tokens.weight")
    shape = EagleShape(
        **common,
        vocab=vocab,
        draft_vocab=size,
        taps=taps_of(found, _layers_read(found.config, target), target),
        block=speculative_tokens(found, GUESSES),
        window=layer.whole("sliding_window") if _slides(layer) else WHOLE_TEXT,
        tap_norm=_tap_norm(found.config),
        normed_residual=found.config.flag("norm_before_residual", not published),
        feeds_normed=found.config.flag("norm_output", False),
        biased=layer.flag("attention_bias", False),
        own_embed=embed is not None and not is_targets(embed, target.embed),
    )
    return Taken("eagle", shape, ids, _weights(found, shape, rows))


def _name(ours: str) -> str:
    part, _, leaf = ours.partition(".")
    return OUTER.get(ours) or f"layers.0.{LAYER[part]}.{leaf}"


def _plain(theirs: str) -> str:
    return theirs.removeprefix("model.").replace("midlayer.", "layers.0.")


def _require_known(found: Found, layer: Fields) -> None:
    kind, layers = layer.raw("model_type") or "llama", layer.whole("num_hidden_layers", 1)
    if kind != "llama":
        raise unusable(found, f"a layer of type {str(kind)[:40]!r}", "llama")
    if layers != 1:
        raise unusable(found, f"{layers} layers", "1")
    if not found.config.fields("eagle_config").flag("use_aux_hidden_state", True):
        raise unusable(found, "the target's last layer alone as its input", "several layers")
    other = found.config.raw("target_hidden_size")
    if other not in (None, layer.raw("hidden_size")):
        raise unusable(found, f"rows of {layer.raw('hidden_size')} for a target's of {other}", "the same")


def _layers_read(config: Fields, target: Target) -> object:
    """As the checkpoint says, or those that its authors' own code reads."""
    key, layers = "eagle_aux_hidden_state_layer_ids", target.shape.layers
    given = config.raw(key) or config.fields("eagle_config").raw(key)
    return given or (2, layers // 2, layers - 3)


def _slides(layer: Fields) -> bool:
    return layer.raw("layer_types") == ["sliding_attention"]


def _tap_norm(config: Fields) -> TapNorm:
    if config.flag("fc_norm", False):
        return "each"
    nested = config.fields("eagle_config").flag("norm_before_fc", False)
    return "all" if config.flag("norm_before_fc", nested) else "none"


def _weights(found: Found, shape: EagleShape, rows: Tensor) -> dict[str, Tensor]:
    """Under our names; what the norms before fc weigh becomes part of fc."""
    wanted = {**OUTER, **{f"{part}.weight": f"layers.0.{LAYER[part]}.weight" for part in LAYER}}
    for part in ("q_norm", "k_norm"):
        del wanted[f"{part}.weight"]
    if not shape.own_embed:
        del wanted["embed"]
    weights: dict[str, Any] = {ours: found.tensor(theirs).float() for ours, theirs in wanted.items()}
    weights["head.weight"] = weights["head.weight"][rows]
    used = set(wanted.values()) | {"d2t", "embed_tokens.weight"}
    norms = {"each": [f"fc_norm.{i}.weight" for i in range(len(shape.taps))], "all": ["input_norm.weight"]}
    if shape.tap_norm in norms:
        names = norms[shape.tap_norm]
        weights["fc.weight"] = weights["fc.weight"] * torch.cat([found.tensor(n).float() for n in names])
        used.update(names)
    if shape.biased:
        for part in "qkvo":
            name = f"layers.0.{LAYER[part]}.bias"
            missing = torch.zeros(shape.width) if part == "o" else None  # some have none there
            weights[f"{part}.bias"] = (
                found.tensor(name) if missing is None else found.tensors.get(name, missing)
            ).float()
            used.add(name)
    surplus = [name for name in sorted(found.tensors) if name not in used and not name.endswith(UNUSED)]
    if surplus:
        raise unusable(found, f"a tensor {surplus[0][:80]}", "the parts of an EAGLE-3 layer")
    return weights
