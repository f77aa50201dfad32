"""The tables in docs/scale.md, from the stored simulation."""

from pathlib import Path
from typing import Final

from bench import results_folder, scale
from bench.table import Table

PATH: Final = Path(__file__).parent.parent.parent / "docs" / "scale.md"
BEGIN: Final = "<!-- scale: written by `python -m bench pages` from bench/results -->"
END: Final = "<!-- /scale -->"


def section() -> str:
    result = results_folder.read_one(scale.RESULT)
    loads = Table.of(scale.COLUMNS, result["loads"]).markdown()
    promise = (
        f"{scale.TPOT_MS:.0f} ms per token (median), first token within {scale.TTFT_P99_MS:.0f} ms (p99)"
    )
    fleets = Table.of(scale.FLEET_COLUMNS, result["fleets"]).markdown()
    return "\n".join([BEGIN, "", *loads, f"GPUs for a promise of {promise}:", "", *fleets, END])


def update() -> None:
    text = PATH.read_text()
    PATH.write_text(text[: text.index(BEGIN)] + section() + text[text.index(END) + len(END) :])
