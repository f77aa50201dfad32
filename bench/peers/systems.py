"""Which systems there are, where they are installed, and in which modes they run."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from bench.peers.child import ROOT

PEERS: Final = ROOT / ".peers"
READY: Final = "ready"  # a file in a finished environment: the requirements that were installed


@dataclass(frozen=True)
class Build:
    """One installation of a system and the modes it is measured in."""

    system: str
    driver: str  # module under bench.peers
    environment: str  # folder under .peers; "" is paceline's own
    modes: tuple[str, ...]
    full: tuple[str, ...] = ()  # further modes of a full run
    models: tuple[str, ...] = ()  # the only ones it is measured with; (): all
    name: str = ""  # of this build, where a system has several
    spare: bool = False  # in a short run only where the system's other builds are absent
    dense: bool = False  # reads a folder of float32 weights instead of the GGUF file
    runs: str = ""  # weights and activations, as the tables state them
    remembers: tuple[str, ...] = ()  # modes that learn from one request for another
    learns: tuple[str, ...] = ()  # modes that are first shown other conversations of each workload
    files: dict[str, str] = field(default_factory=dict, hash=False)  # its driver needs

    @cached_property
    def python(self) -> Path:
        if not self.environment:
            return Path(sys.executable)
        return PEERS / self.environment / "bin" / "python"

    @property
    def home(self) -> Path:
        return PEERS / self.environment

    @property
    def installed(self) -> bool:
        if not self.environment:
            return True
        return all((self.home / file).exists() for file in (READY, *self.files.values()))

    @property
    def command(self) -> list[str]:
        return [str(self.python), "-m", f"bench.peers.{self.driver}"]

    @property
    def settings(self) -> dict[str, Any]:
        return {name: str(self.home / file) for name, file in self.files.items()}


LLAMA_SHORT: Final = ("plain", "ngram-short", "ngram-cache")
LLAMA_NGRAM: Final = ("ngram-simple", "ngram-map-k", "ngram-map-k-short", "ngram-mod")

LLAMA_RUNS: Final = "weights as in the GGUF file, 8-bit activations"
FLOAT32: Final = "weights of the GGUF file decoded to float32, float32 activations"

BUILDS: Final = (
    Build(
        "paceline",
        "paceline",
        "",
        ("plain", "suffix+ngram", "suffix+ngram+learned"),
        runs="weights as in the GGUF file, 8-bit activations",
        learns=("suffix+ngram+learned",),
    ),
    Build(
        "llama.cpp",
        "llama_server",
        "llama.cpp",
        LLAMA_SHORT,
        (*LLAMA_NGRAM, "draft"),
        runs=LLAMA_RUNS,
        name="server",
        remembers=(*LLAMA_NGRAM, *LLAMA_SHORT[1:]),
        files={"binary": "build/bin/llama-server"},
    ),
    Build(
        "llama.cpp",
        "llama_python",
        "llama.cpp",
        ("plain",),
        ("lookup",),
        runs=LLAMA_RUNS,
        name="python",
        files={"library": "build/bin"},
    ),
    Build(
        "llama.cpp",
        "llama_server",
        "xllamacpp",
        LLAMA_SHORT,
        runs=LLAMA_RUNS,
        name="wheel",
        spare=True,
        remembers=LLAMA_SHORT[1:],
    ),
    Build(
        "openvino", "openvino", "openvino", ("plain", "lookup"), runs="the GGUF file as OpenVINO converts it"
    ),
    Build(
        "transformers",
        "transformers",
        "transformers",
        ("plain",),
        ("lookup", "assisted"),
        dense=True,
        runs=FLOAT32,
    ),
    Build(
        "vllm",
        "vllm",
        "vllm",
        ("plain", "ngram"),
        ("plain-compiled",),
        ("smollm2-135m",),
        dense=True,
        runs=FLOAT32,
    ),
)
SYSTEMS: Final = tuple(dict.fromkeys(build.system for build in BUILDS))
SELF_DRAFTING: Final = "smollm2-135m"  # small enough to stand in as its own draft model
NEED_DRAFT: Final = ("draft", "assisted")  # modes with a draft model, which must share the tokenizer


def precision(system: str, result: Mapping[str, Any]) -> str:
    """The arithmetic that a system ran: recorded with the result, or else that of all its builds."""
    recorded = result.get("precision", {})
    return str(recorded.get(system) or next(build.runs for build in BUILDS if build.system == system))


@dataclass(frozen=True)
class Entry:
    """A build in one mode: what a row of results is about."""

    build: Build
    mode: str

    @property
    def system(self) -> str:
        return self.build.system

    @property
    def label(self) -> str:
        """The mode, with the build where there are several."""
        return f"{self.mode} ({self.build.name})" if self.build.name else self.mode

    @property
    def remembers(self) -> bool:
        return self.mode in self.build.remembers

    @property
    def learns(self) -> bool:
        return self.mode in self.build.learns or self.mode.endswith("+learned")

    @property
    def plain(self) -> bool:
        return self.mode.startswith("plain")


def taking_part(systems: Sequence[str], model: str, full: bool) -> list[Build]:
    found = [b for b in BUILDS if b.system in systems and b.installed and (model in b.models or not b.models)]
    first = {build.system for build in found if not build.spare}
    return [build for build in found if full or not build.spare or build.system not in first]


def entries(
    systems: Sequence[str], model: str, full: bool = False, paceline_modes: Sequence[str] = ()
) -> Iterator[Entry]:
    """The systems that are installed here and fit the model, in the order of the list."""
    for build in taking_part(systems, model, full):
        modes = (*build.modes, *build.full) if full else build.modes
        if build.system == "paceline" and paceline_modes:
            modes = tuple(dict.fromkeys(("plain", *paceline_modes)))
        for mode in modes:
            if mode not in NEED_DRAFT or model == SELF_DRAFTING:
                yield Entry(build, mode)


def left_out(systems: Sequence[str], model: str, full: bool = False) -> Iterator[str]:
    """One line for each thing asked for that is not measured, with the reason."""
    for build in BUILDS:
        label = f"{build.system} {build.name}".strip()
        if build.system not in systems:
            continue
        if not build.installed:
            yield f"{label}: not installed; run `make bench-peers`"
        elif build.spare and not full:
            continue
        elif build.models and model not in build.models:
            yield f"{label}: measured with {', '.join(build.models)} only: in float32 {model} is too slow"
        elif set(NEED_DRAFT) & set(build.full):
            if not full:
                yield f"{label}: no draft model: it would be the model itself; --full measures that"
            elif model != SELF_DRAFTING:
                yield f"{label}: no draft model: no smaller model here shares {model}'s tokenizer"
