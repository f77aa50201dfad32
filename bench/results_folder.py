"""bench/results: one JSON file for each measurement that is kept."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

Result = dict[str, Any]
FOLDER: Final = Path(__file__).parent / "results"


def write(result: Result, name: str) -> Path:
    FOLDER.mkdir(exist_ok=True)
    path = FOLDER / f"{name.replace('/', '_')}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    return path


def read(kind: str) -> list[Result]:
    """Every kept result of a kind, by file name; peers-smollm2-135m.json is of kind peers."""
    return [json.loads(path.read_text()) for path in sorted(FOLDER.glob(f"{kind}-*.json"))]


def read_one(name: str) -> Result:
    found: Result = json.loads((FOLDER / f"{name}.json").read_text())
    return found


def write_rows(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """One row a line: a JSON list, or JSON lines if the name ends in .jsonl."""
    texts = [json.dumps(row) for row in rows]
    as_lines = path.suffix == ".jsonl"
    path.write_text("\n".join(texts) + "\n" if as_lines else "[\n" + ",\n".join(texts) + "\n]\n")
