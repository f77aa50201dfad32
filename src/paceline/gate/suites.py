"""Public sets with known answers, as cases. Their files are read from a folder and never shipped.

schemas    answers under JSON Schemas (SchemaStore, MaskBench): do they follow them?
bfcl       Berkeley function calling: are the calls the right ones, and are there none where none fits?
ragtruth   questions on passages: is the answer grounded in them?
halueval   questions on a paragraph: grounded, and with the right answer in it?
code       HumanEval: does the function pass its tests?
"""

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from paceline.errors import DataError, SettingError, unknown_name
from paceline.gate.cases import Case, cases_of, json_lines
from paceline.gate.evaluators import Reference

FOLDER_VARIABLE: Final = "PACELINE_DATA"


def schemas(record: Mapping[str, Any]) -> Iterator[Case]:
    if record.get("python_jsonschema_agrees") is False:  # what checks the answers reads this schema otherwise
        return
    schema = record["schema"]
    name = str(schema.get("title") or record["category"]) if isinstance(schema, dict) else record["category"]
    format_ = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    prompt = f"Write one small JSON document: {name[:200]}."
    yield _case(record["id"], prompt, cohort=record["source"], response_format=format_)


def bfcl(record: Mapping[str, Any]) -> Iterator[Case]:
    for case in cases_of(record, record["id"]):
        yield replace(case, cohort="no call" if record.get("expect") == "no_tool_call" else "call")


def ragtruth(record: Mapping[str, Any]) -> Iterator[Case]:
    known = Reference(context=record["context"])
    yield _case(f"ragtruth/{record['source_id']}", record["prompt"], known)


def halueval(record: Mapping[str, Any]) -> Iterator[Case]:
    prompt = f"{record['knowledge']}\n\nAnswer in a few words: {record['question']}"
    known = Reference(context=record["knowledge"], answer=record["right_answer"])
    yield _case(record["id"], prompt, known)


def code(record: Mapping[str, Any]) -> Iterator[Case]:
    prompt = (
        f"Complete this function. Answer with all of it in one code block.\n```python\n{record['prompt']}```"
    )
    known = Reference(tests=record["test"], entry_point=record["entry_point"])
    yield _case(record["task_id"], prompt, known)


def _case(id: str, prompt: str, reference: Reference | None = None, cohort: str = "", **more: Any) -> Case:
    request = {"messages": [{"role": "user", "content": prompt}], **more}
    return Case(id=id, request=request, cohort=cohort, conversation=id, reference=reference)


SUITES: Final[Mapping[str, tuple[Callable[[Mapping[str, Any]], Iterator[Case]], tuple[str, ...]]]] = {
    "schemas": (schemas, ("schemas/schemastore.jsonl", "schemas/jsonschemabench.jsonl")),
    "bfcl": (bfcl, ("traces/bfcl_single_turn.jsonl.gz", "traces/bfcl_irrelevance.jsonl.gz")),
    "ragtruth": (ragtruth, ("rag/ragtruth_qa.jsonl",)),
    "halueval": (halueval, ("rag/halueval_qa.jsonl",)),
    "code": (code, ("code/HumanEval.jsonl.gz",)),
}


def suite_cases(name: str, folder: Path | None = None) -> Iterator[Case]:
    """folder: of the data; None: that of PACELINE_DATA. The files take turns, and an id comes once."""
    if name not in SUITES:
        raise SettingError("suite", name, f"one of {', '.join(SUITES)}", unknown_name("suite", name, SUITES))
    given = folder or (Path(os.environ[FOLDER_VARIABLE]) if os.environ.get(FOLDER_VARIABLE) else None)
    if given is None:
        raise DataError(
            f"the suite {name} needs its data: name their folder with --data or {FOLDER_VARIABLE}"
        )
    make, files = SUITES[name]
    return _once(_in_turn([_cases(given / file, make, name) for file in files]))


def _cases(path: Path, make: Callable[[Mapping[str, Any]], Iterator[Case]], route: str) -> Iterator[Case]:
    for record in json_lines(path):
        yield from (replace(case, route=route) for case in make(record))


def _in_turn(streams: list[Iterator[Case]]) -> Iterator[Case]:
    while streams:
        for stream in list(streams):
            if (case := next(stream, None)) is None:
                streams.remove(stream)
            else:
                yield case


def _once(cases: Iterator[Case]) -> Iterator[Case]:
    seen: set[str] = set()
    for case in cases:
        if case.id not in seen:
            seen.add(case.id)
            yield case
