"""The connector of hidden states on a CPU, on a stand-in for vLLM's."""

import os
import runpy
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import paceline.vllm

THEIRS = "vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector"
OURS = Path(paceline.vllm.__file__).with_name("hidden_states_connector.py")
BLOCKS, LAYERS, BLOCK, WIDTH = 3, 2, 4, 5


class Theirs:
    """The fields of a worker's connector that writing a file takes."""

    def __init__(self, rank: int, cache: torch.Tensor, locks: dict[str, int]) -> None:
        self._is_tp_rank_zero = rank == 0
        self._kv_cache, self._block_size = cache, BLOCK
        self._lock_fds = locks
        self._req_copy_events: dict[str, Any] = {}


def extract(cache: torch.Tensor, slots: torch.Tensor, tokens: int) -> torch.Tensor:
    return cache.transpose(1, 2).flatten(0, 1)[slots[:tokens]]


@pytest.fixture
def connector(monkeypatch: pytest.MonkeyPatch) -> Any:
    module = ModuleType(THEIRS)
    vars(module).update(ExampleHiddenStatesConnector=Theirs, extract_from_kv_cache=extract)
    monkeypatch.setitem(sys.modules, THEIRS, module)
    return runpy.run_path(str(OURS))["HiddenStatesConnector"]


@pytest.mark.parametrize("rank", [0, 1])
def test_one_rank_writes_the_file_and_the_others_nothing(rank: int, connector: Any, tmp_path: Path) -> None:
    cache = torch.arange(BLOCKS * LAYERS * BLOCK * WIDTH, dtype=torch.float32)
    cache = cache.view(BLOCKS, LAYERS, BLOCK, WIDTH)
    path = tmp_path / "states" / "one.safetensors"
    lock = os.open(tmp_path / "one.lock", os.O_CREAT | os.O_RDWR)
    writer = connector(rank, cache, {"one": lock} if rank == 0 else {})
    tokens = torch.tensor([7, 8, 9, 7, 8, 9])
    writer._submit_async_write(
        SimpleNamespace(req_id="one", filename=str(path), token_ids=tokens, block_ids=[2, 0])
    )
    if rank:
        assert not path.parent.exists()
        assert not writer._req_copy_events
        os.close(lock)
        return
    written = load_file(path)
    assert torch.equal(written["token_ids"], tokens)
    assert torch.equal(written["hidden_states"][:, 1], torch.cat([cache[2, 1], cache[0, 1, :2]]))
    assert writer._req_copy_events["one"].query()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(lock)
