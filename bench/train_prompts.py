"""The prompts that the shipped drafter is trained on: python -m bench.train_prompts DATA -o prompts.jsonl.gz

Only sets whose licences allow it: BFCL and Spec-Bench (Apache-2.0), ToolTalk (MIT), API-Bank (Apache-2.0).
A record has messages, tools and a group, and nothing else; the answers are the target's own.
"""

import argparse
import gzip
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

TRACES: Final = ("bfcl_single_turn", "bfcl_multi_turn", "bfcl_irrelevance", "tooltalk", "apibank")
QUESTIONS: Final = Path("specbench", "question.jsonl")


def records(data: Path) -> Iterator[dict[str, Any]]:
    for name in TRACES:
        with gzip.open(data / "traces" / f"{name}.jsonl.gz") as lines:
            for line in lines:
                record = json.loads(line)
                yield {key: record[key] for key in ("group", "tools", "messages")}
    with (data / QUESTIONS).open("rb") as lines:
        for line in lines:
            question = json.loads(line)
            first = {"role": "user", "content": question["turns"][0]}
            yield {"group": group_of(question), "tools": [], "messages": [first]}


def group_of(question: Mapping[str, Any]) -> str:
    """The name of a Spec-Bench question; "" for any other record."""
    return f"specbench:{question['question_id']}" if "question_id" in question else ""


def write(path: Path, found: Iterator[dict[str, Any]]) -> int:
    """The same records give the same bytes."""
    lines = [json.dumps(record, ensure_ascii=False, separators=(",", ":")) + "\n" for record in found]
    path.write_bytes(gzip.compress("".join(lines).encode(), 9, mtime=0))
    return len(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path, help="the folder with traces/ and specbench/")
    parser.add_argument("-o", "--output", type=Path, default=Path("prompts.jsonl.gz"))
    given = parser.parse_args()
    count = write(given.output, records(given.data))
    print(f"{count} conversations, {given.output.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
