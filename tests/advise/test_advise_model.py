"""`paceline advise` with a real model, from conversations to a routes file that the server takes."""

import json
from pathlib import Path

import pytest
import yaml

from paceline.cli import main

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "book_flight",
            "parameters": {
                "type": "object",
                "properties": {"origin": {"type": "string"}, "passengers": {"type": "integer"}},
                "required": ["origin", "passengers"],
            },
        },
    }
]
CITIES = ("Lyon", "Oslo", "Graz", "Bern", "Cork")


def conversations(folder: Path) -> Path:
    lines = []
    for city in CITIES:
        ask = f"List three facts about {city}, then repeat the list word for word."
        messages = [{"role": "user", "content": ask}, {"role": "assistant", "content": "..."}]
        lines.append(json.dumps({"id": city, "messages": messages}))
        call = [{"role": "user", "content": f"Two tickets from {city}, please."}, {"role": "assistant"}]
        lines.append(json.dumps({"id": f"{city} call", "messages": call, "tools": TOOLS}))
    file = folder / "traffic.jsonl"
    file.write_text("\n".join(lines))
    return file


@pytest.mark.slow
def test_advice_for_a_file_of_conversations(
    tmp_path: Path, smollm2_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page, routes, figures = tmp_path / "a.html", tmp_path / "routes.yaml", tmp_path / "a.json"
    given = ["--traces", str(conversations(tmp_path)), "--target", str(smollm2_path)]
    written = ["--html", str(page), "--routes", str(routes), "--json", str(figures)]
    with pytest.raises(SystemExit) as end:
        main(["advise", *given, "--requests", "4", "--max-tokens", "48", *written])
    assert end.value.code in (0, None)
    assert "tokens per" in capsys.readouterr().out
    advice = json.loads(figures.read_text())
    by_route = {one["route"]: one for one in advice["routes"]}
    assert set(by_route) == {"chat", "tools"}
    for one in by_route.values():
        default = one["candidates"][0]
        assert default["drafters"] == ["grammar", "suffix", "ngram"]
        assert default["tokens_per_pass"]["value"] >= 1
        assert one["answered"]["tokens_per_pass"] >= 1
        longest = one["lengths"][-1]["tokens_per_pass"]
        assert longest >= one["lengths"][1]["tokens_per_pass"] > 1
        assert any("block" in c["drafters"] for c in one["candidates"])
    assert {route["name"] for route in yaml.safe_load(routes.read_text())["routes"]} <= {"chat", "tools"}
    with pytest.raises(SystemExit) as end:
        main(["routes", "check", str(routes), "--drafter", "block"])
    assert end.value.code in (0, None)
    assert page.read_text().startswith("<!doctype html>")
