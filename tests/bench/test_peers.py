"""Drivers and installation, as far as they can be checked without any peer."""

from pathlib import Path

import numpy as np
import pytest

from bench.compare import command as cli
from bench.own import bandwidth
from bench.own.divergence import divergences, summary
from bench.own.passes import cells
from bench.own.passes import summary as pass_summary
from bench.peers import amx, install, paceline, systems
from bench.peers.llama_server import SPEC, arguments
from bench.peers.wire import Ask, Load


def test_every_paceline_prompt_has_a_tenant_of_its_own() -> None:
    driver = paceline.Paceline()
    driver._spec = paceline.PLAIN
    first, again = (driver.sequence(Ask([1, 2, 3], ignore_eos=True)) for _ in "12")
    assert first.tenant != again.tenant
    assert first.tokens == again.tokens == [1, 2, 3]
    assert first.prompt_len == 3


def test_every_build_has_a_driver_and_its_pinned_requirements() -> None:
    folder = Path(systems.__file__).parent
    for build in systems.BUILDS:
        assert (folder / f"{build.driver}.py").is_file()
        if build.environment:
            assert build.environment in install.NAMES
    for name in install.NAMES:
        wanted = (folder / "requirements" / f"{name}.txt").read_text().splitlines()
        assert all("==" in line for line in wanted if not line.startswith("#"))


def test_a_missing_package_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(systems, "PEERS", tmp_path)
    found = list(systems.entries(systems.SYSTEMS, "smollm2-135m"))
    assert {entry.system for entry in found} == {"paceline"}
    reasons = list(systems.left_out(systems.SYSTEMS, "smollm2-135m"))
    assert len(reasons) == len(systems.BUILDS) - 1
    assert all("make bench-peers" in reason for reason in reasons)


def test_an_install_that_fails_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(name: str) -> str:
        raise install.InstallFailed("no wheel\nfor this machine")

    monkeypatch.setattr(install, "PEERS", tmp_path)
    monkeypatch.setattr(install, "install", fail)
    monkeypatch.setattr(install, "prepare_pulled", lambda: None)
    install.main(["vllm", "openvino"])
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        f"{name}: left out, could not be installed: no wheel for this machine"
        for name in ("vllm", "openvino")
    ]


def test_llama_server_gets_its_mode() -> None:
    for build in systems.BUILDS:
        if build.driver == "llama_server":
            assert set(build.modes) | set(build.full) <= set(SPEC)
    line = " ".join(arguments(Load("m.gguf", "ngram-short", draft=None), 80))
    assert "--spec-type ngram-simple --spec-ngram-simple-size-n 3 --spec-ngram-simple-size-m 5" in line
    assert "--spec-type" not in arguments(Load("m.gguf"), 80)
    assert arguments(Load("m.gguf", "draft", draft="d.gguf"), 80)[-2:] == ["--spec-draft-model", "d.gguf"]


def test_without_amx_there_is_nothing_to_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(amx, "faults", lambda: False)
    assert amx.choices("llama_server") == [amx.Choice()]
    monkeypatch.setattr(amx, "faults", lambda: True)
    monkeypatch.setattr(amx, "refusal", lambda: Path("refuse.so"))
    assert len(amx.choices("llama_server")) == 2
    assert amx.choices("openvino")[0].environment == {"ONEDNN_MAX_CPU_ISA": "AVX10_1_512"}


def test_divergence_is_none_from_itself_and_known_from_another() -> None:
    p = np.log(np.array([[0.5, 0.25, 0.25]], dtype=np.float32))
    q = np.log(np.array([[0.25, 0.5, 0.25]], dtype=np.float32)) + 3
    assert divergences(p, p) == pytest.approx([0.0], abs=1e-12)
    assert divergences(p, q) == pytest.approx([0.25 * np.log(2)], rel=1e-6)
    assert summary(p, q)["same_first_choice"] == 0.0


def test_pass_rows_are_ratios_to_one_row() -> None:
    groups = list(cells([300, 3000], [512]))
    assert groups[0] == [(0, 512)]
    assert groups[-1] == [(3000, 1)]
    times = {(0, 512): [512.0], (300, 1): [10.0], (300, 8): [20.0]}
    found = pass_summary({"paceline": times, "llama.cpp": {c: [2 * t for t in v] for c, v in times.items()}})
    by_rows = {(row["context"], row["rows"]): row for row in found}
    assert by_rows[0, 512]["paceline"]["median"] == 1.0
    assert by_rows[300, 8]["paceline"]["times_one_row"] == 2.0
    assert all(row["ratio"]["median"] == 2.0 for row in found)


def test_the_floor_is_bytes_over_bandwidth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert bandwidth.read_gb_per_s(1, repeats=1, size=2**22) > 0.1
    monkeypatch.setattr(bandwidth, "read_gb_per_s", lambda threads: 20.0)
    model = tmp_path / "m.gguf"
    model.write_bytes(bytes(10**6))
    assert bandwidth.floor(model, 2)["floor_ms"] == 0.05


def test_options_of_the_issue_are_understood() -> None:
    line = "--model smollm2-135m --workload a.jsonl --limit 3 --systems paceline,llama.cpp --json out.json"
    options = cli.settled(
        cli.parser().parse_args([*line.split(), "--temperature", "0,0.7", "--repeats", "2"])
    )
    assert options.systems == ["paceline", "llama.cpp"]
    assert options.temperature == [0.0, 0.7]
    assert (options.limit, options.repeats, options.max_prompt) == (3, 2, 1500)
    with pytest.raises(SystemExit, match="no system is called 'sglang'"):
        cli.settled(cli.parser().parse_args(["--systems", "sglang"]))
