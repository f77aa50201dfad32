"""paceline vllm command."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

import paceline
from paceline.advise.engine_flags import NGRAM_NOTE, Speculation, vllm_flags
from paceline.cli import main
from paceline.target.weights.reader import open_checkpoint
from support.models import save_reference

ROUTES = """\
routes:
  - name: edits
    match: {tools: [edit_file]}
    drafters: [prediction, suffix]
    max_draft: 16
  - name: chat
    match: {prompt: chat}
    enabled: false
  - name: rest
"""


PROPOSED = "vLLM with paceline's proposer drafts by ngram only; left out: grammar"


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as end:
        main(["vllm", "command", "folder/model", *arguments])
    out, err = capsys.readouterr()
    return int(end.value.code or 0), out, err


def words(capsys: pytest.CaptureFixture[str], *arguments: str, note: str = "") -> list[str]:
    """note: what is told beside the command."""
    code, out, err = run(capsys, *arguments)
    assert (code, err.strip()) == (0, note)
    return shlex.split(out)


def option(command: list[str], name: str) -> Any:
    return json.loads(command[command.index(name) + 1])


def fails(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    code, _, err = run(capsys, *arguments)
    assert code == 2
    return err


@pytest.fixture
def routes(tmp_path: Path) -> str:
    path = tmp_path / "routes.yaml"
    path.write_text(ROUTES)
    return str(path)


def test_suffix_and_ngram_run_by_the_proposer(capsys: pytest.CaptureFixture[str]) -> None:
    command = words(capsys, "--max-draft", "6", "--port", "8001", "--tensor-parallel-size", "2")
    assert command[:7] == ["vllm", "serve", "folder/model", "--port", "8001", "--tensor-parallel-size", "2"]
    assert option(command, "--speculative-config") == {
        "method": "custom_class",
        "model": "paceline.vllm.proposer.Proposer",
        "num_speculative_tokens": 6,
    }
    assert "--additional-config" not in command


def test_the_proposers_settings_are_given_where_they_differ(capsys: pytest.CaptureFixture[str]) -> None:
    given = ("--drafters", "ngram", "--default-tenant", "all", "--min-first-chance", "0.6")
    command = words(capsys, *given)
    expected = {"paceline": {"drafters": ["ngram"], "default_tenant": "all", "min_first_chance": 0.6}}
    assert option(command, "--additional-config") == expected


def test_the_class_of_the_proposer_exists() -> None:
    from paceline.vllm import proposer

    module, _, name = proposer.CLASS.rpartition(".")
    assert (module, hasattr(proposer, name)) == (proposer.__name__, True)


def test_without_the_plugin_vllm_drafts_itself(capsys: pytest.CaptureFixture[str]) -> None:
    command = words(capsys, "--drafters", "ngram", "--no-plugin", note=NGRAM_NOTE)
    config = option(command, "--speculative-config")
    assert (config["method"], config["num_speculative_tokens"]) == ("ngram", 8)


@pytest.mark.parametrize(("route", "length"), [("edits", 16), ("rest", 8), ("chat", None)])
def test_a_route_decides(
    route: str, length: int | None, routes: str, capsys: pytest.CaptureFixture[str]
) -> None:
    dropped = "vLLM with paceline's proposer drafts by suffix only; left out: prediction"
    command = words(capsys, "--routes", routes, "--route", route, note=dropped if route == "edits" else "")
    if length is None:
        assert command == ["vllm", "serve", "folder/model"]
    else:
        assert option(command, "--speculative-config")["num_speculative_tokens"] == length


def test_a_route_is_named_where_there_are_several(routes: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "edits, chat, rest" in fails(capsys, "--routes", routes)
    assert "edits" in fails(capsys, "--routes", routes, "--route", "edit")


def test_an_exported_drafter_decides_method_and_length(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    methods = [{"proposal_type": "greedy", "speculative_tokens": 5}]
    config = {"speculators_model_type": "eagle3", "speculators_config": {"proposal_methods": methods}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    command = words(capsys, "--trained", str(tmp_path))
    expected = {"method": "eagle3", "model": str(tmp_path), "num_speculative_tokens": 5}
    assert option(command, "--speculative-config") == expected


def test_a_model_folder_is_a_draft_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    config = option(words(capsys, "--trained", str(tmp_path), "--max-draft", "4"), "--speculative-config")
    assert config == {"method": "draft_model", "model": str(tmp_path), "num_speculative_tokens": 4}


def test_drafters_that_are_left_out_are_told(
    tmp_path: Path, routes: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text("{}")
    note = "vLLM drafts by model only; left out: prediction, suffix"
    given = ("--trained", str(tmp_path), "--routes", routes, "--route", "edits")
    assert option(words(capsys, *given, note=note), "--speculative-config")["method"] == "draft_model"
    shown = json.loads(run(capsys, *given, "--json")[1])
    assert shown["notes"] == [note]
    assert "left out: ngram" in run(capsys, "--no-plugin")[2]


def test_the_command_drafts_as_the_report_of_advise_says(
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = words(capsys, "--drafters", "grammar,ngram", note=PROPOSED)
    flags = vllm_flags(Speculation(("grammar", "ngram"), 8))
    assert flags.notes == (PROPOSED,)
    for name, value in zip(flags.words[::2], flags.words[1::2], strict=True):
        assert option(command, name) == json.loads(value)


def test_drafters_that_vllm_cannot_run_say_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "paceline drafters export" in fails(capsys, "--drafters", "grammar,block")
    assert "paceline drafters export" in fails(capsys, "--trained", str(tmp_path))


def test_json_has_the_words_and_the_config(capsys: pytest.CaptureFixture[str]) -> None:
    shown = json.loads(run(capsys, "--json")[1])
    assert shown["command"][:2] == ["vllm", "serve"]
    assert shown["speculative_config"]["method"] == "custom_class"


def test_hidden_states_are_written_to_a_folder_in_place_of_drafts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_reference("llama", tmp_path)
    with pytest.raises(SystemExit):
        main(["vllm", "command", str(tmp_path), "--hidden-states", str(tmp_path / "states")])
    command = shlex.split(capsys.readouterr().out)
    config = option(command, "--speculative-config")
    assert (config["method"], config["num_speculative_tokens"]) == ("extract_hidden_states", 1)
    layers = config["draft_model_config"]["hf_config"]["eagle_aux_hidden_state_layer_ids"]
    assert layers[-1] == open_checkpoint(tmp_path).shape.layers
    connector = option(command, "--kv-transfer-config")
    assert connector["kv_connector_extra_config"] == {"shared_storage_path": str(tmp_path / "states")}
    source = Path(paceline.__file__).parents[1] / connector["kv_connector_module_path"].replace(".", "/")
    assert f"class {connector['kv_connector']}(" in source.with_suffix(".py").read_text()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--trained", "out/support"], "--trained"),
        (["--routes", "routes.yaml", "--route", "edits"], "--routes, --route"),
        (["--drafters", "ngram", "--max-draft", "3"], "--drafters, --max-draft"),
        (["--no-plugin"], "--no-plugin"),
        (["--min-first-chance", "0.5", "--default-tenant", "team"], "--default-tenant, --min-first-chance"),
    ],
)
def test_hidden_states_go_with_no_options_of_drafts(
    arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = fails(capsys, "--hidden-states", "states", *arguments)
    assert f"--hidden-states is in place of drafts: leave {named} out" in " ".join(shown.split())


def test_the_layers_of_a_model_that_is_not_here_are_not_known(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "--hidden-states", "states")
    assert (code, "folder/model" in err) == (2, True)
