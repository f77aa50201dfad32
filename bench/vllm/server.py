"""`vllm serve` on this machine's CPU, in the environment of `make vllm` or of PACELINE_VLLM_PYTHON."""

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from bench.peers.child import ROOT
from bench.peers.systems import BUILDS
from bench.serve.servers import RunningServer, free_port, start
from paceline.vllm.serve_command import ServeSettings, serve_command

START_S: Final = 900.0  # importing vLLM takes a minute on a busy machine
CPU: Final[Mapping[str, Any]] = {  # float32: its bfloat16 kernels need AMX; eager: compiling takes minutes
    "dtype": "float32",
    "enforce_eager": True,
    "max_num_seqs": 4,
}
ENVIRONMENT: Final = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
}
MISSING: Final = "vLLM is not here: run `make vllm`, or set PACELINE_VLLM_PYTHON to a Python that has it"


def vllm_python() -> Path | None:
    """The Python that has vLLM and speculators; None: there is none."""
    if given := os.environ.get("PACELINE_VLLM_PYTHON"):
        return Path(given)
    build = next(build for build in BUILDS if build.environment == "vllm")
    return build.python if build.installed else None


def started(
    model: Path,
    speculative_config: Mapping[str, Any] | None = None,
    options: Sequence[str] = (),
    threads: int | None = None,
    **settings: Any,
) -> RunningServer:
    """options: of `vllm serve`. settings: of `ServeSettings`."""
    python, port, folder = vllm_python(), free_port(), tempfile.TemporaryDirectory()
    if python is None:
        raise RuntimeError(MISSING)
    chosen = ServeSettings(port=port, **CPU, **settings)
    command = [*_in(python, serve_command(str(model), speculative_config, chosen)), *options]
    environment = _environment() | ({} if threads is None else {"OMP_NUM_THREADS": str(threads)})
    return start("vllm", command, port, "/health", environment, folder, START_S)


@contextmanager
def serving(
    model: Path, speculative_config: Mapping[str, Any] | None = None, **settings: Any
) -> Iterator[RunningServer]:
    """settings: of `ServeSettings`."""
    if vllm_python() is None:
        raise SystemExit(MISSING)
    served = started(model, speculative_config, **settings)
    try:
        yield served
    finally:
        served.close()


def _in(python: Path, command: Sequence[str]) -> list[str]:
    """The same by vLLM's module: its command line needs a package called `vllm`, and this is `vllm-cpu`."""
    _, _, model, *flags = command
    return [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", model, *flags]


def _environment() -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    return {**ENVIRONMENT, "PYTHONPATH": path}
