"""README and docs are true: their code runs, their numbers are those of the bench."""

import contextlib
import io
import re
import runpy
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.pages import numbers, readme, results_page
from bench.peers.systems import FLOAT32
from paceline.cli import main

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]


@dataclass(frozen=True)
class Example:
    """A block of a page, and the output shown below it, if there is one."""

    code: str
    shown: str | None


def examples(page: Path, language: str) -> list[Example]:
    found = re.findall(rf"```{language}\n(.*?)```\n(?:\n```text\n(.*?)```)?", page.read_text(), re.S)
    return [Example(code, shown or None) for code, shown in found]


def write_files(page: Path, folder: Path) -> None:
    """Those that the page shows: a name and a colon, then a block."""
    for name, text in re.findall(r"^`([\w.]+)`:\n\n```\w+\n(.*?)```", page.read_text(), re.S | re.M):
        (folder / name).write_text(text)


def compare(example: Example, printed: str) -> None:
    """The outputs shown are those of a CPU; other rounding may choose other words."""
    if example.shown is not None and not torch.cuda.is_available():
        assert printed == example.shown, example.code


@pytest.mark.model
@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_python_blocks_run(page: Path, smollm2_path: Path) -> None:
    names: dict[str, Any] = {"__name__": "example"}  # later blocks go on from earlier ones
    for example in examples(page, "python"):
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(compile(example.code, str(page), "exec"), names)
        compare(example, out.getvalue())


@pytest.mark.model
@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_commands_run(
    page: Path, smollm2_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_files(page, tmp_path)
    for example in examples(page, "sh"):
        printed = [output_of(line) for line in example.code.strip().splitlines()]
        compare(example, "".join(printed))


def output_of(line: str) -> str:
    program, *arguments = shlex.split(line, comments=True)
    assert program == "paceline"
    with contextlib.redirect_stdout(io.StringIO()) as out, pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code in (0, None), line
    assert out.getvalue().strip()
    return out.getvalue()


def test_make_targets_exist() -> None:
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M)
    for name in re.findall(r"make ([a-z]+)", (ROOT / "README.md").read_text()):
        assert name in targets


def test_numbers_are_those_of_the_bench() -> None:
    assert numbers.PATH.read_text() == numbers.page()
    assert results_page.PATH.read_text() == results_page.page()
    assert readme.section() in readme.PATH.read_text()


def test_the_numbers_fit_on_a_page_and_say_when_not_to_use_drafts() -> None:
    page = numbers.page()
    assert len(page.encode()) <= 9_500
    assert "16 agents at once" in page
    assert "tokens/s than plain" in page
    assert "16 answers at once" in page


def test_comparisons_say_what_each_side_ran() -> None:
    """Transformers and vLLM run float32 where paceline runs the weights of the file: pages must say so."""
    for page in (numbers.page(), results_page.page()):
        assert FLOAT32 in page
        assert "8-bit activations" in page
    assert "transformers" not in readme.section().lower()
    assert "no time for it" not in results_page.page()


def test_the_api_page_is_current() -> None:
    made = runpy.run_path(str(ROOT / "docs" / "make_api.py"))["page"]()
    assert (ROOT / "docs" / "api.md").read_text() == made, "run python docs/make_api.py"


def test_the_readme_begins_with_what_people_search_for() -> None:
    opening = "\n".join((ROOT / "README.md").read_text().splitlines()[:6])
    assert "speculative decoding" in opening
    assert "inference engine" in opening
    picture = (ROOT / "docs" / "images" / "generate.svg").read_text()
    assert "docs/images/generate.svg" in "\n".join((ROOT / "README.md").read_text().splitlines()[:10])
    assert "identical&#160;to&#160;plain:&#160;yes" in picture


def test_links_lead_somewhere() -> None:
    for page in (*PAGES, results_page.PATH):
        for path, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)", page.read_text()):
            if "://" in path:
                continue
            linked = page.parent / path if path else page
            assert linked.exists(), f"{page.name}: {path}"
            assert not anchor or anchor in anchors(linked), f"{page.name}: {path}#{anchor}"


def anchors(page: Path) -> set[str]:
    """Anchors of the headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_tests_named_in_the_docs_exist(page: Path) -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", page.read_text())
    assert named or page.name != "lossless.md"
    for file, name in named:
        assert f"def {name}(" in (ROOT / file).read_text() if name else (ROOT / file).exists(), (
            f"{file}::{name}"
        )


def test_the_architecture_page_knows_every_folder_and_only_files_that_exist() -> None:
    page, source = (ROOT / "docs" / "architecture.md").read_text(), ROOT / "src" / "paceline"
    named = re.findall(r"`((?:[a-z_]+/)*(?:[a-z_]+/|[a-z_]+\.py))`", page)
    outside = ("tests", "bench", "docs", "examples", "src")
    for path in named:
        base = ROOT if path.split("/")[0] in outside else source
        assert (base / path).exists() or path == "__init__.py", path
    tree = page[page.index("```text") :]
    for init in source.rglob("__init__.py"):
        assert init.parent == source or f"{init.parent.name}/" in tree, (
            f"{init.parent.name} is not in the tree"
        )
