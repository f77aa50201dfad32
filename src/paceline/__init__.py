"""Lossless speculative decoding for agents: an inference engine whose drafts never change the text.

`LLM` is the Python API. Public names load when they are first used.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.async_llm import AsyncLLM, AsyncStream
    from paceline.config import EngineConfig, SamplingParams, SpecConfig
    from paceline.constraints import Choice, Json, Lark, Regex, Template, Tool
    from paceline.errors import BatchError, PacelineError
    from paceline.llm import LLM
    from paceline.output import Piece, Result, Stream
    from paceline.tool_loop import AsyncTurns, Run, ToolResult, Turn, Turns
    from paceline.types import Ask, Draft, Drafter, Seq

__version__ = "0.2.0.dev0"

# Threads of a pass wait for one another hundreds of times. Spinning long at each wait makes a pass many times
# slower as soon as another program keeps a core busy. libgomp reads this when torch is first imported.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "5000")

_HOME = {
    "AsyncLLM": "async_llm",
    "AsyncStream": "async_llm",
    "AsyncTurns": "tool_loop",
    "BatchError": "errors",
    "Choice": "constraints",
    "EngineConfig": "config",
    "Json": "constraints",
    "Lark": "constraints",
    "Regex": "constraints",
    "Template": "constraints",
    "Tool": "constraints",
    "PacelineError": "errors",
    "LLM": "llm",
    "Piece": "output",
    "Result": "output",
    "Stream": "output",
    "Run": "tool_loop",
    "ToolResult": "tool_loop",
    "Turn": "tool_loop",
    "Turns": "tool_loop",
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
    "AsyncLLM",
    "AsyncStream",
    "AsyncTurns",
    "BatchError",
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
    "Run",
    "SamplingParams",
    "Seq",
    "SpecConfig",
    "Stream",
    "Template",
    "Tool",
    "ToolResult",
    "Turn",
    "Turns",
]


def __getattr__(name: str) -> Any:
    """Loads a public name when it is first used: a command that needs no model starts without torch."""
    if name not in _HOME:
        raise AttributeError(f"module 'paceline' has no attribute {name!r}")
    return getattr(import_module(f"paceline.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
