"""python -m bench.train_prompts DATA OUT: the prompts of the drafters that are shipped, as one file of conversations.

Only from sets whose licences permit it: BFCL, ToolTalk, API-Bank (conversations with tools) and Spec-Bench
(questions). DATA has them in the folders `traces` and `specbench`.
"""

import gzip
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

TRACES: Final = ("bfcl_single_turn", "bfcl_multi_turn", "bfcl_irrelevance", "tooltalk", "apibank")


def conversations(data: Path) -> Iterator[dict[str, Any]]:
    for name in TRACES:
        with gzip.open(data / "traces" / f"{name}.jsonl.gz", "rt") as lines:
            for line in lines:
                record = json.loads(line)
                yield {key: record[key] for key in ("messages", "tools", "group") if record.get(key)}
    for line in (data / "specbench" / "question.jsonl").read_text().splitlines():
        question = json.loads(line)
        messages = [{"role": "user", "content": question["turns"][0]}]
        yield {"messages": messages, "group": f"spec-bench {question['question_id']}"}


def main(data: str, out: str) -> None:
    with gzip.GzipFile(out, "wb", mtime=0) as file:
        for record in conversations(Path(data)):
            file.write((json.dumps(record, ensure_ascii=False) + "\n").encode())


if __name__ == "__main__":
    main(*sys.argv[1:])
