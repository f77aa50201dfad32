"""The shipped drafter's prompts come from sets that may be trained on, and from no other."""

import gzip
import json
from pathlib import Path

from bench.train_prompts import QUESTIONS, TRACES, records, write

FORBIDDEN = ("tau2_bench", "swe_moatless_claude35", "community_tau2")


def test_only_permitted_sets_are_read(tmp_path: Path) -> None:
    (tmp_path / "traces").mkdir()
    (tmp_path / QUESTIONS).parent.mkdir()
    for name in (*TRACES, *FORBIDDEN):
        talk = {"id": name, "reward": 1, "group": name, "tools": [], "messages": [{"role": "user"}]}
        (tmp_path / "traces" / f"{name}.jsonl.gz").write_bytes(gzip.compress(json.dumps(talk).encode()))
    (tmp_path / QUESTIONS).write_text('{"question_id": 81, "category": "x", "turns": ["Why?", "More?"]}\n')
    found = list(records(tmp_path))
    assert [record["group"] for record in found] == [*TRACES, "specbench:81"]
    assert {frozenset(record) for record in found} == {frozenset({"group", "tools", "messages"})}
    assert found[-1]["messages"] == [{"role": "user", "content": "Why?"}]
    first, second = tmp_path / "a.jsonl.gz", tmp_path / "b.jsonl.gz"
    assert write(first, iter(found)) == write(second, iter(found)) == 6
    assert first.read_bytes() == second.read_bytes()
    assert [json.loads(line) for line in gzip.decompress(first.read_bytes()).splitlines()] == found
