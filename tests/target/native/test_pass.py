"""The whole native pass against float64, layer by layer, and against torch.

The reference rounds rows to eight bits and attention to sixteen as the pass does, so that both agree but
for the roundings of float32 sums: some 1e-7. Where a value lies within that of the border between two codes,
the two take different ones, and the rest of that row differs by a share of a step of 1/127. That befalls a
few rows in a hundred in each layer. So each layer starts from what the pass itself had before it, nearly all
rows of every segment must agree to some roundings of float32, and none may be off by more than such steps.
"""

from pathlib import Path

import numpy as np
import pytest
import torch

from paceline.config import EngineConfig
from paceline.target.eager.target import TorchTarget
from paceline.target.native.target import NativeTarget
from paceline.target.weights.reader import load
from paceline.text import Tokenizer
from paceline.types import Draft, Feed, Seq, Target
from support.models import open_with, rows_in_one_pass, save_reference, some_tokens
from support.native_targets import KINDS, SIZES, Doubles, every_path, native_target, sized, tiny_model
from support.references import FloatReference, attend, attend_in_codes

ROOT = Path(__file__).parents[3]
ROUNDINGS = 5e-6  # relative to the row's largest value; one code of a softmax weight is 1 / 261000
STEPS = 0.04  # the same, where codes were chosen differently
SEGMENT = 64  # rows
SELDOM = 0.12  # the share of a segment's rows that may be off by more than ROUNDINGS


def all_rows(target: Target, tokens: list[int], taps: tuple[int, ...] = ()) -> tuple[Doubles, list[Doubles]]:
    """Logits and hidden states after every token, in passes of many rows."""
    target.open(Seq("all", tokens, 1, tenant="nobody else"))
    scores = target.forward([Feed("all", tokens[:1], Draft(tuple(tokens[1:])))], taps)
    target.keep("all", 0)
    target.close("all")
    return scores.logits.double().numpy(), [scores.hidden[tap].double().numpy() for tap in taps]


def check_close(found: Doubles, expected: Doubles, where: str) -> None:
    error = np.abs(found - expected).max(1) / np.abs(expected).max(1)
    assert error.max() < STEPS, f"{where}: row {error.argmax()} is off by {error.max()}"
    for start in range(0, len(error), SEGMENT):
        share = (error[start : start + SEGMENT] > ROUNDINGS).mean()
        assert share < SELDOM, f"{where}: {share:.0%} of the rows from {start} on are off"


def check_every_layer(target: NativeTarget, model: Path, length: int, int8: bool = False) -> None:
    reference = FloatReference(model, target, int8)
    tokens = some_tokens(length, seed=length, vocab=target.vocab_size)
    layers = tuple(range(reference.shape.layers))
    logits, hidden = all_rows(target, tokens, layers)
    before = reference.embedded(tokens)
    for layer in layers:
        check_close(hidden[layer], reference.layer(layer, before), f"layer {layer}")
        before = hidden[layer]
    check_close(logits, reference.scores(before), "head")
    whole = reference.run(tokens)
    assert cosines(logits, whole).min() > 0.9995


def cosines(a: Doubles, b: Doubles) -> Doubles:
    return np.asarray((a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1))


CASES = {
    "llama": ("llama", None, SIZES, True),
    "llama with a head": ("llama", None, SIZES, False),
    "qwen2": ("qwen2", None, SIZES, True),
    "qwen2 with a head": ("qwen2", "Q4_K", SIZES, False),
    "qwen3": ("qwen3", None, sized(128, 4, 2), True),
    "qwen3 with a head": ("qwen3", "Q8_0", sized(64, 6, 1, 288, 97), False),
    "heads of 32": ("qwen3", None, sized(32, 8, 2), True),
    "heads of 96": ("llama", "Q4_0", sized(96, 3, 3, 96, 17), False),
    "heads of 128": ("qwen2", "Q5_1", sized(128, 7, 1, 160, 33), True),
    "gemma2": ("gemma2", None, SIZES, True),
    "gemma3": ("gemma3", None, sized(256, 4, 1), True),
    "experts": ("qwen3moe", None, SIZES, True),
    "gpt-oss": ("gpt-oss", None, SIZES, False),
    "gpt-oss in MXFP4": ("gpt-oss", "MXFP4", sized(64, 4, 2, 96, 50), False),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("case", CASES)
def test_every_layer_equals_a_float64_reference(tmp_path: Path, case: str) -> None:
    family, kind, sizes, tied = CASES[case]
    model = tiny_model(tmp_path / "m.gguf", family, kind, sizes, tied)
    check_every_layer(native_target(model), model, 330)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", KINDS)
def test_every_encoding(tmp_path: Path, kind: str) -> None:
    model = tiny_model(tmp_path / "m.gguf", "llama", kind, tied=False)
    check_every_layer(native_target(model), model, 64)


@pytest.mark.parametrize("path", every_path())
def test_every_path_over_several_chunks_of_keys(tmp_path: Path, path: str) -> None:
    model = tiny_model(tmp_path / "m.gguf", "qwen3")
    check_every_layer(native_target(model, path), model, 600)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("kind", ["plain", "sharp", "outliers"])
def test_sixteen_bits_are_nearer_than_half_precision(head_dim: int, kind: str) -> None:
    """Keys with large constant elements, as biases make them, and values of unequal size."""
    random, keys = np.random.default_rng(1), 1024
    q, k, v = (random.standard_normal((rows, head_dim)).astype(np.float32) for rows in (64, keys, keys))
    q *= head_dim**-0.5 * (4 if kind == "sharp" else 1)
    if kind == "outliers":
        k[:, 3] += 60
        v[:, 7] *= 12
    exact = attend(q, k, v)
    halves = attend(q, k.astype(np.float16), v.astype(np.float16))
    assert np.linalg.norm(attend_in_codes(q, k, v) - exact) < np.linalg.norm(halves - exact)


FOLDERS: dict[str, dict[str, int]] = {
    "llama": {},
    "qwen2": {"vocab_size": 96, "hidden_size": 128},
    "qwen3": {"head_dim": 64, "intermediate_size": 33},
    "mistral": {"num_key_value_heads": 3},
    "yarn": {},
    "phi4_mini": {"hidden_size": 128},
    "phi3": {"hidden_size": 128, "sliding_window": 280},
    "gemma2": {"num_hidden_layers": 2},
    "gemma3_text": {"head_dim": 64},
    "qwen3_moe": {"hidden_size": 96, "num_hidden_layers": 2},
    "mixtral": {"hidden_size": 64, "intermediate_size": 70, "num_hidden_layers": 1},
    "gpt_oss": {"hidden_size": 96, "intermediate_size": 70},
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("family", FOLDERS)
def test_float_weights_in_eight_bits(tmp_path: Path, family: str) -> None:
    """Widths that are no multiple of a group, biases on every projection, every setting of the decoder."""
    torch.manual_seed(0)  # where experts are all but equal, eight bits choose others
    save_reference(family, tmp_path, **{"head_dim": 32, **FOLDERS[family]})
    target = native_target(tmp_path, dtype="int8", home=tmp_path / "home")
    check_every_layer(target, tmp_path, 300, int8=True)


@pytest.mark.parametrize("window", [16, 280])
def test_windows_over_several_chunks_of_keys(tmp_path: Path, window: int) -> None:
    save_reference("phi3", tmp_path, hidden_size=128, num_hidden_layers=1, sliding_window=window)
    check_every_layer(native_target(tmp_path, dtype="int8", home=tmp_path / "home"), tmp_path, 600, int8=True)


@pytest.mark.parametrize("case", ["llama", "qwen2", "qwen3", "gemma2", "gemma3"])
def test_logits_are_near_those_of_torch(tmp_path: Path, case: str) -> None:
    family, kind, sizes, tied = CASES[case]
    model = tiny_model(tmp_path / "m.gguf", family, kind, sizes, tied)
    torch_target = TorchTarget(load(model, torch.float32), EngineConfig(device="cpu", cache_mb=16))
    tokens = some_tokens(300, vocab=sizes.vocab)
    ours, theirs = all_rows(native_target(model), tokens)[0], all_rows(torch_target, tokens)[0]
    assert cosines(ours, theirs).min() > 0.999


@pytest.mark.model
def test_smollm2_is_near_torch(smollm2_path: Path) -> None:
    from paceline.paths import home

    target = native_target(smollm2_path, home=home(), cache_mb=64)
    torch_target = TorchTarget(load(smollm2_path, torch.float32), EngineConfig(device="cpu", cache_mb=64))
    tokens = some_tokens(80, vocab=target.vocab_size)
    ours, theirs = all_rows(target, tokens)[0], all_rows(torch_target, tokens)[0]
    assert cosines(ours, theirs).min() > 0.995
    assert (ours.argmax(1) == theirs.argmax(1)).mean() > 0.85


@pytest.mark.model
def test_smollm2_says_what_float32_says(smollm2_path: Path) -> None:
    """Mean KL(float32 || native) on real text, in nats: 0.0025 with attention in 16-bit integers."""
    from paceline.paths import home

    text = (ROOT / "bench" / "workloads" / "agent.jsonl").read_text()[:3000]
    tokens = list(Tokenizer.load(smollm2_path).encode(text))[:384]
    target = native_target(smollm2_path, home=home(), cache_mb=64)
    torch_target = TorchTarget(load(smollm2_path, torch.float32), EngineConfig(device="cpu", cache_mb=64))
    ours, exact = (
        torch.from_numpy(all_rows(each, tokens)[0]).log_softmax(1) for each in (target, torch_target)
    )
    assert torch.nn.functional.kl_div(ours, exact, reduction="batchmean", log_target=True) < 0.003


@pytest.mark.gemma
def test_gemma_is_near_torch(gemma_path: Path) -> None:
    """Behind a prompt longer than its window of 512."""
    from paceline.paths import home

    target = native_target(gemma_path, home=home(), cache_mb=64)
    torch_target = TorchTarget(load(gemma_path, torch.float32), EngineConfig(device="cpu", cache_mb=64))
    tokens = some_tokens(640, vocab=target.vocab_size)
    logits = []
    for each in (target, torch_target):
        open_with(each, "s", tokens[:600])
        logits.append(rows_in_one_pass(each, "s", 600, tokens[600:]).double().numpy())
    assert cosines(*logits).min() > 0.99


@pytest.mark.model
def test_smollm2_layers_equal_the_float64_reference(smollm2_path: Path) -> None:
    """The first, a middle and the last one, as the real weights are encoded."""
    from paceline.paths import home

    target = native_target(smollm2_path, home=home(), cache_mb=64)
    reference = FloatReference(smollm2_path, target)
    tokens, taps = some_tokens(300, vocab=target.vocab_size), (13, 14, 28, 29)
    logits, hidden = all_rows(target, tokens, (0, *taps))
    check_close(hidden[0], reference.layer(0, reference.embedded(tokens)), "layer 0")
    check_close(hidden[2], reference.layer(14, hidden[1]), "layer 14")
    check_close(hidden[4], reference.layer(29, hidden[3]), "layer 29")
    check_close(logits, reference.scores(hidden[4]), "head")
