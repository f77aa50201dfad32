"""Real weights and shared data for the tests that need them; a test without them says how to get them."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported
os.environ["PACELINE_CONFIG"] = "none"  # the user's options are not those of the tests
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported

import gc
import re
import ssl
from collections import Counter
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

from paceline.errors import UnknownModel
from paceline.hub import resolve

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

    from support.servers import Running

# A GPU machine may have no server libraries.
pytest_plugins = ["support.split_server"] if find_spec("starlette") else []

gc.disable()  # until all tests are imported: modules are no garbage
# It takes 20 ms, every HTTP client asks for one, and those of the tests do not use it.
ssl.create_default_context = cache(ssl.create_default_context)  # type: ignore[assignment]
if (worker := os.environ.get("PYTEST_XDIST_WORKER")) and hasattr(os, "sched_setaffinity"):
    # A core for each worker, so a thread for each model: those of two would spin at barriers.
    own = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {own[int(worker.removeprefix("gw")) % len(own)]})
# A busy machine is no fault: neither of examples, nor of servers that answer after more than httpx's 5 s.
slow = [HealthCheck.too_slow]
settings.register_profile("full", deadline=None, derandomize=True, suppress_health_check=slow)
if find_spec("httpx"):
    from httpx._config import DEFAULT_TIMEOUT_CONFIG

    for phase in ("connect", "read", "write", "pool"):
        setattr(DEFAULT_TIMEOUT_CONFIG, phase, 120.0)
settings.register_profile("quick", settings.get_profile("full"), max_examples=10)
settings.load_profile("full")


# fixture -> marker
WEIGHTS = {"smollm2_path": "model", "qwen_path": "large", "gemma_path": "gemma", "browser": "browser"}
HOME = os.environ.get("PACELINE_HOME")
LONGEST = ("slow", "large", "model")  # markers of long files


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Imports no file of slow tests for a run without them."""
    without_slow = "slow" in config.getoption("markexpr").partition("not")[2]
    if without_slow and collection_path.suffix == ".py":
        return re.search(r"^pytestmark = .*\bslow\b", collection_path.read_text(), re.M) is not None or None
    return None


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks whoever asks for weights or a browser, and as slow all but some cases of what is sampled.

    The longest files come first, so that workers end together.
    """
    for item in items:
        for fixture, marker in WEIGHTS.items():
            if fixture in getattr(item, "fixturenames", ()):
                item.add_marker(marker)
    cases = Counter[str]()
    for item in items:
        if sampled := item.get_closest_marker("sampled"):
            name = item.nodeid.partition("[")[0]
            if cases[name] % sampled.args[0]:
                item.add_marker("slow")
            cases[name] += 1
    first = {marker: {item.path for item in items if item.get_closest_marker(marker)} for marker in LONGEST}
    items.sort(key=lambda item: [item.path not in paths for paths in first.values()])


def _pulled(name: str) -> Path:
    """In the home of the start: what a module's fixture has set meanwhile is not for the whole session."""
    with pytest.MonkeyPatch.context() as patch:
        if HOME is None:
            patch.delenv("PACELINE_HOME", raising=False)
        else:
            patch.setenv("PACELINE_HOME", HOME)
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


@pytest.fixture(scope="module")  # while it runs, its thread has a running event loop, which others cannot use
def browser() -> "Iterator[Browser]":
    from support.browser import chromium, why_no_browser

    if reason := why_no_browser():
        pytest.skip(reason)
    with chromium() as found:
        yield found


@pytest.fixture
def browser_page(browser: "Browser") -> "Iterator[Page]":
    """A tab of its own; what it logs as an error fails the test."""
    from support.browser import opened

    with opened(browser) as page:
        yield page


@pytest.fixture(scope="session")
def page_server(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> "Iterator[Running]":
    """The real server for tests in a browser, with a store of traces."""
    from support.browser import why_no_browser
    from support.servers import always_draft, running

    if reason := why_no_browser():
        pytest.skip(reason)
    store = f"sqlite:///{tmp_path_factory.mktemp('page') / 'traces.db'}"
    settings: dict[str, Any] = {
        "store": store,
        "trace_text": True,
        "single_user": True,
        "extend": always_draft,
    }
    with running("smollm2-135m", **settings) as found:
        yield found


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    """A PostgreSQL server of its own: its URL, with a place for the name of a database."""
    from support import traces

    if reason := traces.why_no_postgres():
        pytest.skip(reason)
    with traces.postgres() as url:
        yield url
