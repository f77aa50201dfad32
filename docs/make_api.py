"""Writes docs/api.md from the docstrings and comments of what `paceline` exports: python docs/make_api.py"""

import ast
import inspect
import re
from dataclasses import is_dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import paceline
from paceline.batches import Batches
from paceline.tool_loop import ToolRuns

PAGE = Path(__file__).parent / "api.md"
BAR = "\\|"
MADE_ELSEWHERE = ("Stream", "Turns", "AsyncStream", "AsyncTurns", "Drafter")  # not by calling the class
# Called by the engine, the server and AsyncLLM.
HIDDEN = (
    "rules",
    "next_round",
    "prepare",
    "prepare_prefill",
    "request",
    "prefill_request",
    "encode_embedded",
    "prepare_embedding",
    "forget_embedded",
    "embedding_requests",
    "check_unused",
    "another_choice",
    "cancel",
)
# Fields of a Result that are not exported, and where they are.
RECORDS = {"ToolCall": "paceline.text", "TokenLogprob": "paceline.types"}
ORDER = (
    ("Models", ("LLM", "Stream", "Piece", "Result", *RECORDS)),
    ("Tools", ("Tool", "Run", "Turn", "ToolResult", "Turns")),
    ("asyncio", ("AsyncLLM", "AsyncStream", "AsyncTurns")),
    ("Settings", ("SamplingParams", "SpecConfig", "EngineConfig")),
    ("Constraints", ("Json", "Regex", "Lark", "Choice", "Template")),
    ("Drafters", ("Drafter", "Ask", "Draft", "Seq")),
    ("Errors", ("PacelineError", "BatchError")),
)


INTRODUCTION = """\
Written by `python docs/make_api.py` from the docstrings of what `paceline` exports.

```python
from paceline import LLM, EngineConfig, SamplingParams

llm = LLM("smollm2-135m", config=EngineConfig(device="auto", cache_mb=256))
answer = llm.generate("One, two, three,", SamplingParams(max_tokens=8, seed=1))
print(repr(answer.text), answer.finish)

# Several prompts share passes of the model. Messages are a chat.
chats = [[{"role": "user", "content": f"Name a {thing}."}] for thing in ("river", "city")]
for answer in llm.batch(chats, max_tokens=12, seed=1):
    print(repr(answer.text))
```

[Python](python.md) has functions as tools, asyncio, batches and notebooks.

`device` is `auto` (a GPU if torch sees one), `cpu`, `cuda` or `cuda:N`; on the command line, `--device`. The
engine's settings belong to the `LLM`; sampling and speculation may differ from request to request.

An `LLM` has no `close`: its weights and its cache are freed with the last reference to it (`del llm`). On
a GPU, PyTorch may hold the freed memory for later use: `torch.cuda.empty_cache()` returns it."""


def page() -> str:
    listed = {name for _, names in ORDER for name in names} - set(RECORDS)
    assert listed == set(paceline.__all__), listed ^ set(paceline.__all__)
    lines = ["# API", "", *INTRODUCTION.splitlines(), ""]
    for part, names in ORDER:
        lines += [f"## {part}", ""]
        for name in names:
            home = import_module(RECORDS[name]) if name in RECORDS else paceline
            lines += _class(name, getattr(home, name))
    return "\n".join(lines)


def _class(name: str, cls: type[Any]) -> list[str]:
    lines = [f"### `{name}`", ""]
    if cls.__doc__ and not cls.__doc__.startswith(f"{name}("):
        lines += [inspect.cleandoc(cls.__doc__), ""]
    if name in RECORDS:
        lines += [f"In `{RECORDS[name]}`.", ""]
    if is_dataclass(cls):
        lines += _fields(cls)
    elif (
        cls.__init__ is not object.__init__ and not issubclass(cls, Exception) and name not in MADE_ELSEWHERE
    ):
        lines += _call(name, cls.__init__)
    for member, value in _members(cls).items():
        function = value.__func__ if isinstance(value, staticmethod | classmethod) else value
        if member.startswith("_") or member in HIDDEN:
            continue
        if isinstance(value, property):
            doc = inspect.getdoc(value)
            lines += [f"`.{member}`" + (f": {doc}" if doc else ""), ""]
        elif inspect.isfunction(function):
            lines += _call(f"{name}.{member}", function)
            if doc := inspect.getdoc(function):
                lines += [doc, ""]
    return lines


def _members(cls: type[Any]) -> dict[str, Any]:
    """Those of a dataclass with the inherited ones, as for its fields; last, what LLM and AsyncLLM share."""
    bases = [base for base in reversed(cls.__mro__[1:]) if is_dataclass(base)]
    shared = [base for base in (Batches, ToolRuns) if issubclass(cls, base)]
    return {name: value for base in (*bases, cls, *shared) for name, value in vars(base).items()}


def _call(name: str, function: Any) -> list[str]:
    parameters = inspect.signature(function).parameters.values()
    shown = [
        p.replace(annotation=inspect.Parameter.empty) for p in parameters if p.name not in ("self", "cls")
    ]
    return ["```text", *_wrapped(f"{name}{inspect.Signature(shown)}"), "```", ""]


def _wrapped(text: str) -> list[str]:
    lines = [""]
    for word in text.split(" "):
        if len(lines[-1]) + len(word) > 100:
            lines.append("   ")
        lines[-1] = f"{lines[-1]} {word}" if lines[-1] else word
    return lines


def _fields(cls: type[Any]) -> list[str]:
    """A row for each field, inherited ones included."""
    rows = [row for base in reversed(cls.__mro__) if is_dataclass(base) for row in _own_fields(base)]
    return ["| field | type | default | |", "|---|---|---|---|", *rows, ""]


def _own_fields(cls: type[Any]) -> list[str]:
    """The meaning of a field is the comment beside it, or those right above it."""
    source = inspect.getsource(cls)
    rows, code = [], source.splitlines()
    for node in ast.parse(inspect.cleandoc(source)).body[0].body:  # type: ignore[attr-defined]
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        default = ast.unparse(node.value) if node.value else ""
        default = "" if default.startswith("field(") else default
        comment = _comment(code, node.lineno, node.end_lineno or node.lineno)
        cells = [
            f"`{node.target.id}`",
            f"`{_type(node.annotation)}`",
            f"`{default}`" if default else "",
            comment,
        ]
        rows.append(f"| {' | '.join(cell.replace('|', BAR) for cell in cells)} |")
    return rows


def _comment(code: list[str], first: int, last: int) -> str:
    beside = re.search(r"  # (.*)$", code[last - 1])
    if beside and not beside.group(1).startswith("type:"):
        return beside.group(1)
    above: list[str] = []
    while first >= 2 and code[first - 2].strip().startswith("# "):
        first -= 1
        above.insert(0, code[first - 1].strip()[2:])
    return " ".join(above)


def _type(annotation: ast.expr) -> str:
    """An InitVar, which is a second name of a field, by the type within."""
    return re.sub(r"^InitVar\[(.*)\]$", r"\1", ast.unparse(annotation))


if __name__ == "__main__":
    PAGE.write_text(page())
