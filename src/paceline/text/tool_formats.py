"""How each family of models writes tool calls."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ToolFormat:
    name: str
    trigger: str
    begin: str
    end: str
    between: str
    wraps_each: bool
    call: tuple[str, str, str]
    anywhere: bool = True
