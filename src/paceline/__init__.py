"""Lossless speculative decoding for agents: an inference engine whose drafts never change the text.

`LLM` is the Python API. Public names load when they are first used.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.config import EngineConfig, SamplingParams, SpecConfig
    from paceline.constraints import Choice, Json, Lark, Regex, Template
    from paceline.errors import PacelineError
    from paceline.llm import LLM
    from paceline.output import Piece, Result, Stream
    from paceline.types import Ask, Draft, Drafter, Seq

__version__ = "0.2.0.dev0"

# Threads of a pass wait for one another hundreds of times. Spinning long at each wait makes a pass many times
# slower as soon as another program keeps a core busy. libgomp reads this when torch is first imported.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "5000")

_HOME = {
    "Choice": "constraints",
    "EngineConfig": "config",
    "Json": "constraints",
    "Lark": "constraints",
    "Regex": "constraints",
    "Template": "constraints",
    "PacelineError": "errors",
    "LLM": "llm",
    "Piece": "output",
    "Result": "output",
    "Stream": "output",
    "Ask": "types",
    "Draft": "types",
    "Drafter": "types",
    "SamplingParams": "config",
    "Seq": "types",
    "SpecConfig": "config",
}

__all__ = [
    "LLM",
    "Ask",
    "Choice",
    "Draft",
    "Drafter",
    "EngineConfig",
    "Json",
    "Lark",
    "PacelineError",
    "Piece",
    "Regex",
    "Result",
    "SamplingParams",
    "Seq",
    "SpecConfig",
    "Stream",
    "Template",
]


def __getattr__(name: str) -> Any:
    """Loads a public name when it is first used: a command that needs no model starts without torch."""
    if name not in _HOME:
        raise AttributeError(f"module 'paceline' has no attribute {name!r}")
    return getattr(import_module(f"paceline.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
