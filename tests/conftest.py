"""Real weights and shared data for the tests that need them; a test without them says how to get them."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from paceline.errors import UnknownModel
from paceline.hub import resolve

if TYPE_CHECKING:
    from support.servers import Running

settings.register_profile("full", deadline=None, derandomize=True)  # a busy machine is no fault
settings.register_profile("quick", settings.get_profile("full"), max_examples=10)
settings.load_profile("full")


WEIGHTS = {"smollm2_path": "model", "qwen_path": "large", "gemma_path": "gemma"}  # fixture -> marker


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks whoever asks for weights. Files that hold slow tests come first, so that workers end together."""
    for item in items:
        for fixture, marker in WEIGHTS.items():
            if fixture in getattr(item, "fixturenames", ()):
                item.add_marker(marker)
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


def _pulled(name: str) -> Path:
    try:
        return resolve(name)
    except UnknownModel:
        pytest.skip(f"{name} is not here: run `paceline pull {name}`")


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    return _pulled("smollm2-135m")


@pytest.fixture(scope="session")
def qwen_path() -> Path:
    return _pulled("qwen2.5-coder-1.5b")


@pytest.fixture(scope="session")
def gemma_path() -> Path:
    return _pulled("gemma3-270m")


@pytest.fixture(scope="session")
def server(smollm2_path: Path) -> "Iterator[Running]":
    """The real server on a port of its own."""
    from support.servers import running

    with running("smollm2-135m") as found:
        yield found


@pytest.fixture(scope="session")
def toy_server(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[Running]":
    """A server of a tiny model that answers with nonsense, for all that does not depend on the words."""
    from support.servers import toy_running

    with toy_running(tmp_path_factory.mktemp("toy")) as found:
        yield found
