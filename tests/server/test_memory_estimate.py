"""Memory for a process that learns: estimated from the files, before anything is loaded."""

from dataclasses import replace
from pathlib import Path

import pytest

from paceline.heads.head_checkpoint import WEIGHTS, Card, save
from paceline.server.online.process import BASE_BYTES, MB, memory_shortage, needed_bytes
from paceline.trace.online import OnlineTrainingConfig
from support.heads import random_net, tiny_model

pytestmark = pytest.mark.model

CONFIG = OnlineTrainingConfig()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    net = random_net(draft_vocab=60)
    save(tmp_path / "mine", Card("block", net.shape, "tiny", tiny_model().fingerprint), net)
    return tmp_path / "mine"


def test_a_float32_copy_of_the_target_and_what_loading_it_takes(root: Path, smollm2_path: Path) -> None:
    """All 134.5 million weights, and the 69.7 million that are joined with others once more."""
    little = replace(CONFIG, train_tokens=512, batch_tokens=64, max_len=512)
    needed = needed_bytes(smollm2_path, [root], little)
    assert needed - BASE_BYTES == pytest.approx(4 * (134_515_008 + 69_672_960), rel=1e-6)


def test_more_to_learn_from_needs_more(root: Path, smollm2_path: Path) -> None:
    much = replace(CONFIG, train_tokens=1 << 20)
    more = needed_bytes(smollm2_path, [root], much) - needed_bytes(smollm2_path, [root], CONFIG)
    assert more > 4 * (1 << 20) * 576  # states of the target alone


def test_the_largest_drafter_counts(root: Path, smollm2_path: Path, tmp_path: Path) -> None:
    large = tmp_path / "large"
    net = random_net(draft_vocab=60)
    save(large, Card("block", net.shape, "tiny", tiny_model().fingerprint), net)
    with (large / WEIGHTS).open("ab") as file:
        file.truncate(100 * MB)
    both = needed_bytes(smollm2_path, [root, large], CONFIG)
    assert both == needed_bytes(smollm2_path, [large], CONFIG) > needed_bytes(smollm2_path, [root], CONFIG)


def test_too_little_memory_is_reported_with_a_remedy(root: Path, smollm2_path: Path) -> None:
    needed = needed_bytes(smollm2_path, [root], CONFIG)
    assert memory_shortage(smollm2_path, [root], CONFIG, available=needed) == ""
    against = memory_shortage(smollm2_path, [root], CONFIG, available=300 * MB)
    assert against.startswith(
        f"online training needs about {needed // MB} MB of memory for a copy of the model, and 300"
    )
    assert "leave out --online-training" in against
