"""A checkpoint with anything wrong in it is refused by an error of ours that names it, or it serves."""

import json
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from paceline.convert import dspark, eagle3, import_
from paceline.convert.foreign_checkpoint import TargetModel
from paceline.drafters.heads import drafter_of
from paceline.errors import CorruptModel, PacelineError
from paceline.heads.head_checkpoint import load
from paceline.train.evaluate import RecordedText, replay
from support.checkpoints import MODEL, PIECES, TARGET, Eagle3, Eagle3Config, a_card, an_eagle, medusa_heads
from support.heads import random_net, target_text
from support.models import VOCAB

Checkpoint = tuple[dict[str, Any], dict[str, Tensor]]  # config.json and weights
Keys = tuple[str, ...]


def published_eagle() -> Checkpoint:
    made = Eagle3(Eagle3Config(48, 4, 2, 64, VOCAB, 40, norm_before_fc=True, attention_bias=True))
    read = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 5]}}
    return {"architectures": ["LlamaForCausalLMEagle3"], **asdict(made.config), **read}, made.state_dict()


def speculator(kind: str) -> Checkpoint:
    net = an_eagle(own_embed=True) if kind == "eagle" else random_net(draft_vocab=60)
    output = (eagle3 if kind == "eagle" else dspark).to_checkpoint(net, a_card(kind, net), TARGET, "tiny")
    return json.loads(json.dumps(output.config)), dict(output.tensors)


def published_medusa() -> Checkpoint:
    config = {"medusa_num_heads": 2, "medusa_num_layers": 1}
    return config, {
        f"medusa_head.{name}": t for name, t in medusa_heads(48, VOCAB, 2, 1).state_dict().items()
    }


GOOD = {
    "EAGLE-3": published_eagle(),
    "eagle3": speculator("eagle"),
    "dspark": speculator("block"),
    "Medusa": published_medusa(),
}
HARMS: dict[str, Callable[[Tensor], Tensor]] = {
    "one number": lambda t: t.flatten()[0],
    "a rank more": lambda t: t[None],
    "flat": lambda t: torch.cat((t.flatten(), t.flatten()[:1])),
    "a row less": lambda t: t[1:],
    "a row more": lambda t: torch.cat((t, t[:1])),
    "a column more": lambda t: torch.cat((t, t[..., :1]), -1),
    "empty": lambda t: t[:0],
    "whole numbers": lambda t: t.to(torch.int32),
    "complex numbers": lambda t: t.to(torch.complex64),
    "bytes": lambda t: t.to(torch.uint8),
    "huge": lambda t: torch.full_like(t, 2**30),
    "below nothing": lambda t: torch.full_like(t, -(2**30)),
}
VALUES: tuple[object, ...] = (
    None,
    True,
    0,
    -1,
    1,
    3,
    1.5,
    2**31 - 1,
    2**70,
    10**400,
    "x",
    "",
    [],
    [0],
    [[]],
    [None],
    {},
    {"a": 1},
)


@pytest.fixture(scope="module", autouse=True)
def tiny_target() -> Iterator[None]:
    """Stands in for a model on disk."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TargetModel, "open", lambda path: TARGET)
        yield


def save(tensors: dict[str, Tensor], file: Path) -> None:
    save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, file)


def refusal(config: Any, tensors: dict[str, Tensor]) -> str | None:
    """The error; None: it was imported, and serves."""
    with tempfile.TemporaryDirectory() as folder:
        theirs, out = Path(folder) / "theirs", Path(folder) / "out"
        theirs.mkdir()
        (theirs / "config.json").write_text(json.dumps(config))
        save_file(
            {name: t.detach().contiguous() for name, t in tensors.items()}, theirs / "model.safetensors"
        )
        try:
            import_(theirs, Path("tiny"), out)
        except PacelineError as error:
            assert not out.exists()
            return str(error)
        text = RecordedText(target_text()[0].tolist(), [at > 36 for at in range(40)])
        assert len(replay(drafter_of(load(out, PIECES).net), MODEL, [text], 2)) == 2
        return None


def paths(table: dict[str, Any], before: Keys = ()) -> Iterator[Keys]:
    for key, value in table.items():
        yield (*before, key)
        if isinstance(value, dict):
            yield from paths(value, (*before, key))


def with_value(table: dict[str, Any], path: Keys, value: object) -> dict[str, Any]:
    first, *rest = path
    return table | {first: with_value(table[first], tuple(rest), value) if rest else value}


@pytest.mark.parametrize("kind", GOOD)
def test_as_it_is_it_serves(kind: str) -> None:
    assert refusal(*GOOD[kind]) is None


TENSORS = [(kind, name) for kind, (_, tensors) in GOOD.items() for name in tensors]
SETTINGS = [(kind, path) for kind, (config, _) in GOOD.items() for path in paths(config)]


@given(st.sampled_from(TENSORS), st.data())
def test_a_wrong_tensor_is_named(which: tuple[str, str], data: st.DataObject) -> None:
    kind, name = which
    config, tensors = GOOD[kind]
    harm = data.draw(st.sampled_from(["missing", *HARMS]))
    changed = {n: t for n, t in tensors.items() if n != name}
    if harm != "missing":
        changed[name] = HARMS[harm](tensors[name])
    told = refusal(config, changed)
    if told is not None and "was made for a model of" not in told:
        assert any(plain in told for plain in (n.split("midlayer.")[-1].split("head.")[-1] for n in tensors))


@given(
    st.sampled_from([(kind, path) for kind, (config, _) in GOOD.items() for path in paths(config)]), st.data()
)
def test_a_wrong_value_is_refused_or_does_no_harm(which: tuple[str, Keys], data: st.DataObject) -> None:
    kind, path = which
    config, tensors = GOOD[kind]
    refusal(with_value(config, path, data.draw(st.sampled_from(VALUES))), tensors)


WRONG_VALUES: list[tuple[str, Keys, object, str]] = [
    ("EAGLE-3", ("num_key_value_heads",), 3, "num_key_value_heads"),
    ("EAGLE-3", ("rms_norm_eps",), 10**400, "rms_norm_eps"),
    ("EAGLE-3", ("rope_theta",), 2**70, "rope_theta"),
    ("EAGLE-3", ("intermediate_size",), 2**31 - 1, "mlp.gate_proj.weight"),
    ("eagle3", ("speculators_model_type",), ["eagle3"], "cannot be imported"),
    ("eagle3", ("transformer_layer_config", "head_dim"), 15, "head_dim"),
    ("eagle3", ("paceline", "acceptance"), [10**400], "paceline"),
    ("dspark", ("mask_token_id",), VOCAB + 1, "mask_token_id"),
    ("dspark", ("markov_rank",), 2**31 - 1, "markov_head.markov_w1.weight"),
    ("Medusa", ("medusa_num_heads",), 3, "2.0.linear.weight"),
]


@pytest.mark.parametrize(("kind", "path", "value", "named"), WRONG_VALUES)
def test_a_wrong_value_is_named(kind: str, path: Keys, value: object, named: str) -> None:
    config, tensors = GOOD[kind]
    told = refusal(with_value(config, path, value), tensors)
    assert told is not None
    assert named in told


PICKLES: list[object] = [
    [1, 2],
    torch.zeros(3),
    {1: torch.zeros(3)},
    {"state_dict": {"fc.weight": torch.zeros(3)}},
    {"fc.weight": torch.zeros(2, 2).to_sparse()},
    Path("x"),
]


def checkpoint(folder: Path, kind: str = "EAGLE-3") -> Path:
    (folder / "config.json").write_text(json.dumps(GOOD[kind][0]))
    return folder


@pytest.mark.parametrize("content", PICKLES, ids=[type(content).__name__ for content in PICKLES])
def test_pickled_weights_of_another_kind_are_refused(content: object, tmp_path: Path) -> None:
    torch.save(content, checkpoint(tmp_path) / "pytorch_model.bin")
    with pytest.raises(CorruptModel, match="are damaged"):
        import_(tmp_path, Path("tiny"), tmp_path / "out")


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin", "model.safetensors.index.json"])
@pytest.mark.parametrize(
    "content", [b"", b"{}", b'{"weight_map": [1]}', b'{"weight_map": {"a": [2]}}', b"\0" * 99]
)
def test_files_of_weights_that_hold_nothing_are_refused(file: str, content: bytes, tmp_path: Path) -> None:
    (checkpoint(tmp_path) / file).write_bytes(content)
    with pytest.raises(CorruptModel):
        import_(tmp_path, Path("tiny"), tmp_path / "out")


@given(st.integers(0, 2000))
def test_weights_that_end_too_soon_are_refused(length: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = checkpoint(Path(folder)) / "model.safetensors"
        save(GOOD["EAGLE-3"][1], file)
        file.write_bytes(file.read_bytes()[:length])
        with pytest.raises(CorruptModel, match="damaged"):
            import_(Path(folder), Path("tiny"), Path(folder) / "out")


def test_a_config_that_is_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").mkdir()
    with pytest.raises(CorruptModel, match=r"config\.json cannot be read"):
        import_(tmp_path, Path("tiny"), tmp_path / "out")
