"""Imports point one way, and the core needs only torch and numpy."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "src" / "paceline"

# A layer may import itself and every layer on a lower level. Layers on one level are strangers.
LEVEL = {
    "errors": 0,
    "paths": 0,
    "log": 0,
    "limits": 0,
    "atomic": 1,
    "recent_file": 2,
    "config": 1,
    "native_build": 1,
    "gguf_header": 1,
    "types": 2,
    "sampling": 3,
    "text": 3,
    "hub": 3,
    "heads": 4,
    "target": 5,
    "drafters": 5,
    "constraints": 5,
    "trace": 5,
    "testing": 5,
    "engine": 6,
    "convert": 6,
    "notebook": 6,
    "loading": 7,
    "output": 7,
    "batches": 8,
    "tool_loop": 8,
    "llm": 9,
    "async_llm": 10,
    "web": 11,
    "server": 12,
    "train": 12,
    "advise": 12,
    "gate": 12,
    "vllm": 12,
    "agent": 12,
    "split": 13,
    "cli": 14,
    "__main__": 15,
}
CORE = set(LEVEL) - {
    "text",
    "hub",
    "output",
    "batches",
    "tool_loop",
    "llm",
    "async_llm",
    "web",
    "server",
    "train",
    "advise",
    "gate",
    "vllm",
    "agent",
    "split",
    "cli",
    "__main__",
}
SHARED = ("support",)  # what drafters may import besides themselves
NOT_CORE = {ROOT / "trace" / "store"}  # the database, which no pass needs
CORE_MAY_IMPORT = {"torch", "numpy", "paceline"}


def files() -> list[Path]:
    return sorted(p for p in ROOT.rglob("*.py") if p != ROOT / "__init__.py")


def layer(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported(path: Path, top_level_only: bool = False) -> Iterator[str]:
    tree = ast.parse(path.read_text())
    nodes = tree.body if top_level_only else list(ast.walk(tree))
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module
            whole = node.module == "paceline"
            yield from (f"{node.module}.{a.name}" if whole else node.module for a in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


LAYERS = sorted({layer(path) for path in files()})


@pytest.mark.parametrize("here", LAYERS)
def test_imports_point_one_way(here: str) -> None:
    assert here in LEVEL, f"give the new layer {here} a level"
    for path in (path for path in files() if layer(path) == here):
        for name in imported(path):
            parts = name.split(".")
            if parts[0] != "paceline" or len(parts) == 1 or parts[1] == "__version__":
                continue
            there = parts[1]
            allowed = there == here or LEVEL[there] < LEVEL[here]
            assert allowed, f"{here} must not import {there}: {path.relative_to(ROOT)}"


def test_no_drafter_imports_another() -> None:
    folder = ROOT / "drafters"
    for path in sorted(folder.rglob("*.py")):
        here = path.relative_to(folder).parts[0].removesuffix(".py")
        for name in imported(path):
            parts = name.split(".")
            if parts[:2] == ["paceline", "drafters"] and here != "__init__":
                assert parts[2] in (here, *SHARED), f"{here} imports {name}"


@pytest.mark.parametrize("here", [here for here in LAYERS if here in CORE])
def test_the_core_needs_little(here: str) -> None:
    for path in (path for path in files() if layer(path) == here and NOT_CORE.isdisjoint(path.parents)):
        for name in imported(path, top_level_only=True):
            top = name.split(".")[0]
            known = top in CORE_MAY_IMPORT or top in sys.stdlib_module_names
            assert known, f"{path.relative_to(ROOT)} imports {top}"


def test_nobody_needs_a_database_to_record() -> None:
    code = "import sys, paceline.trace.recorder; sys.exit(bool({'sqlalchemy', 'torch'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.slow
def test_a_bare_gpu_machine_can_make_answers_and_train_on_them() -> None:
    """It has torch, numpy, tokenizers and what these need, and nothing else."""
    absent = ("llguidance", "pydantic", "sqlalchemy", "starlette", "platformdirs", "typer", "rich", "gguf")
    trained = ("data.target_answers", "data.text_kind", "train_decoder", "trainer", "evaluate", "publish")
    names = ("llm", *(f"train.{name}" for name in trained))
    code = f"import sys; sys.modules.update(dict.fromkeys({absent}))\n"
    code += "\n".join(f"import paceline.{name}" for name in names)
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def modules_of(code: str) -> set[str]:
    """Every module that is loaded after it ran."""
    show = "import sys; sys.stderr.write('\\n'.join(sys.modules))"
    command = [sys.executable, "-c", f"{code}\n{show}"]
    return {*subprocess.run(command, capture_output=True, text=True, check=True).stderr.split()}


def test_importing_paceline_imports_next_to_nothing() -> None:
    """Its public names load what they need when they are used. 29 modules, all but one of Python's own."""
    made = modules_of("import paceline") - modules_of("")
    assert {name for name in made if name.partition(".")[0] not in sys.stdlib_module_names} == {"paceline"}
    assert len(made) < 60


def test_the_command_line_shows_its_help_without_heavy_libraries() -> None:
    """Those of a command load when it runs. 355 modules, most of them of typer and rich."""
    code = "from paceline.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass"
    made = modules_of(code)
    heavy = {"torch", "numpy", "pydantic", "tokenizers", "llguidance", "jinja2", "sqlalchemy", "starlette"}
    assert not (heavy | {"asyncio", "yaml", "safetensors", "aiohttp"}) & made
    assert "typer" in made
    ours = {name for name in made if name.startswith("paceline.")}
    light = {"cli", "config", "errors", "hub", "paths", "atomic", "limits"}
    assert {name.split(".")[1] for name in ours} <= light
    assert len(made) < 550
