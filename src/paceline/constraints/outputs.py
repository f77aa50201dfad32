from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
import json
from paceline.constraints.grammars import Constraint, Whitespace, Json

@dataclass(frozen=True, slots=True)
class Output:
    constraint: Constraint
    parse: Callable[[str], Any]

def output(of: Any, whitespace: Whitespace = "fixed") -> Output:
    return Output(of, json.loads if isinstance(of, Json) else str)
