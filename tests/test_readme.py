"""What the README and the docs say is true: their code runs, their numbers are those of the bench."""

import contextlib
import io
import json
import re
import shlex
from pathlib import Path

import pytest

from bench import readme, run
from paceline.cli import main

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.S)


@pytest.mark.model
@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_python_blocks_run(page: Path, smollm2_path: Path) -> None:
    for code in blocks(page, "python"):
        exec(compile(code, str(page), "exec"), {"__name__": "example"})


@pytest.mark.model
@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_commands_run(page: Path, smollm2_path: Path) -> None:
    for block in blocks(page, "sh"):
        for line in block.strip().splitlines():
            program, *arguments = shlex.split(line, comments=True)
            assert program == "paceline"
            with contextlib.redirect_stdout(io.StringIO()) as out, pytest.raises(SystemExit) as end:
                main(arguments)
            assert end.value.code in (0, None), line
            assert out.getvalue().strip()


def test_make_targets_exist() -> None:
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M)
    for name in re.findall(r"make ([a-z]+)", (ROOT / "README.md").read_text()):
        assert name in targets


def test_numbers_are_those_of_the_bench() -> None:
    kept = json.loads((ROOT / "bench" / "results" / "cpu.json").read_text())
    assert (ROOT / "docs" / "numbers.md").read_text() == run.page(kept["machine"], kept["results"])
    assert readme.section(kept["machine"], kept["results"]) in (ROOT / "README.md").read_text()


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for link in re.findall(r"\]\(([^)#]+)", page.read_text()):
            if "://" not in link:
                assert (page.parent / link).exists(), f"{page.name}: {link}"


def test_tests_named_in_the_docs_exist() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (ROOT / "docs" / "lossless.md").read_text())
    assert named
    for file, name in named:
        assert f"def {name}(" in (ROOT / file).read_text(), f"{file}::{name}"
