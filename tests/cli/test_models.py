"""pull, ls, show, rm, and commands whose model is not here: from a hub on this machine."""

import json
import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from paceline.atomic import read_json
from paceline.cli import models
from paceline.hub import installed, resolve
from paceline.loading import model_fingerprint
from paceline.target.kv.disk_cache import DiskCache, stored_models
from paceline.target.kv.page_file import PageFormat
from support.clients import fails, run
from support.heads import save_untrained
from support.model_hub import COMMIT, ModelHub, model_hub, use
from support.native_targets import tiny_model
from support.servers import START_S, toy_chat_model
from support.tiny_gguf import Sizes
from support.tokenizers import byte_level_facts

NAME = "owner/toy:Q8_0"
SHORT = ["--max-tokens", "4", "--seed", "1", "--cache-mb", "64", "--threads", "1"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelHub]:
    folder = tmp_path_factory.mktemp("files")
    facts = byte_level_facts("smollm")
    sizes = Sizes(1, 256, 4, 2, 64, 256, len(facts["tokens"]), 8192)
    small = tiny_model(folder / "small.gguf", kind="Q8_0", sizes=sizes, tokenizer=facts)
    with model_hub() as found:
        toy = toy_chat_model(folder).read_bytes()
        found.add("owner/toy", {"toy-Q8_0.gguf": toy, "toy-IQ1_S.gguf": b"none"}, licence="apache-2.0")
        toy_chat_model(folder, part_tensors=8)
        parts = {part.name: part.read_bytes() for part in folder.glob("toy-*-of-*.gguf")}
        found.add("owner/parts", parts)
        found.add("owner/small", {"small.gguf": small.read_bytes()})
        yield found


@pytest.fixture
def hub(server: ModelHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelHub:
    server.asked.clear()
    use(server, tmp_path, monkeypatch)
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 1 << 20)
    return server


def as_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    code, out, err = run(capsys, *arguments, "--json")
    assert code == 0, err
    return json.loads(out)


def test_a_pulled_model_is_listed_and_answers(hub: ModelHub, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "pull", "hf.co/owner/toy")
    assert code == 0
    assert out == f"hf.co/owner/toy is at {resolve(NAME)}\n"
    for command in ("models", "ls", "list"):
        line = as_json(capsys, command)[-1]
        assert (line["name"], line["format"], line["pulled"]) == (NAME, "Q8_0", True)
        assert line["size"] == resolve(NAME).stat().st_size
    assert "apache-2.0" in run(capsys, "ls")[1]
    answer = as_json(capsys, "generate", "--model", "owner/toy", "--prompt", "one two", *SHORT)
    assert len(answer["token_ids"]) == 4


def test_a_revision_is_listed_shown_run_and_removed_alone(
    hub: ModelHub, capsys: pytest.CaptureFixture[str]
) -> None:
    toy = hub.repositories["owner/toy"].files["toy-Q8_0.gguf"]
    commit, old = hub.revise("owner/toy", "v1", {"toy-Q8_0.gguf": toy}), "owner/toy@v1:Q8_0"
    for name in (NAME, old):
        assert run(capsys, "pull", name)[0] == 0
    assert {line["name"]: line["revision"] for line in as_json(capsys, "ls")[-2:]} == {
        NAME: COMMIT,
        old: commit,
    }
    assert old in run(capsys, "ls")[1]
    assert as_json(capsys, "show", "owner/toy@v1")["revision"] == commit
    assert commit in run(capsys, "show", old)[1]
    assert len(as_json(capsys, "generate", old, "--prompt", "one two", *SHORT)["token_ids"]) == 4
    assert as_json(capsys, "rm", "owner/toy@v1", "--yes")["name"] == old
    assert "is not here" in fails(capsys, "rm", "owner/toy@v1", "--yes")
    assert [line.name for line in installed()][-1] == NAME


def test_what_a_hub_says_is_shown_as_it_is(hub: ModelHub, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "pull", NAME)[0] == 0
    manifest = resolve(NAME).parent / "paceline.json"
    manifest.write_text(json.dumps(read_json(manifest) | {"licence": "[/mine]"}))
    code, out, err = run(capsys, "models")
    assert code == 0, err
    assert "[/mine]" in out


@pytest.mark.slow
def test_a_split_model_answers_as_the_whole_one(hub: ModelHub, capsys: pytest.CaptureFixture[str]) -> None:
    whole, split = (
        as_json(capsys, "generate", "--model", name, "--prompt", "one two three", "--pull", *SHORT)
        for name in ("owner/toy", "owner/parts")
    )
    assert split["token_ids"] == whole["token_ids"]
    assert as_json(capsys, "show", "owner/parts")["size"] > as_json(capsys, "show", NAME)["size"]


def test_a_missing_model_is_an_error_that_says_the_commands(
    hub: ModelHub, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in (
        ["generate", "--model", NAME, "--prompt", "x"],
        ["chat", "--model", NAME],
        ["serve", NAME],
    ):
        told = fails(capsys, *command)
        assert f"`paceline pull {NAME}`" in told
        assert "--pull" in told
    assert "--pull" in fails(capsys, "serve", "gemma3-270m")
    assert "--pull" not in fails(capsys, "serve", "no-such-model")
    assert hub.asked == []


def test_pull_brings_the_model_and_its_draft_model(hub: ModelHub, capsys: pytest.CaptureFixture[str]) -> None:
    draft = ["--draft-model", "owner/small", "--drafters", "model"]
    answer = as_json(capsys, "generate", "--model", NAME, *draft, "--prompt", "x", "--pull", *SHORT)
    assert len(answer["token_ids"]) == 4
    assert [line.name for line in installed() if line.pulled] == ["owner/small:small.gguf", NAME]


def asked_on_terminal(answer: str, *arguments: str) -> tuple[int, str, str]:
    """Exit code, standard output, and what the terminal showed."""
    code = "from paceline.cli import main; main()"
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdin=theirs,
        stdout=subprocess.PIPE,
        stderr=theirs,
        text=True,
    ) as process:
        os.close(theirs)
        os.write(ours, answer.encode())  # the terminal keeps it until it is read
        with ThreadPoolExecutor(1) as reader:
            shown = reader.submit(_read_all, ours)
            out, _ = process.communicate(timeout=START_S)
    os.close(ours)
    return process.returncode, out, shown.result().decode()


def _read_all(terminal: int) -> bytes:
    shown = b""
    with suppress(OSError):  # the other end is closed
        while block := os.read(terminal, 1 << 16):
            shown += block
    return shown


@pytest.mark.slow
def test_on_a_terminal_it_asks_first(hub: ModelHub) -> None:
    command = ["generate", "--model", "owner/toy", "--prompt", "one two", *SHORT, "--json"]
    code, _, shown = asked_on_terminal("n\n", *command)
    assert code == 2
    assert "owner/toy:Q8_0 is not here. Pull 1 MB? [Y/n]" in shown
    assert not installed()[-1].name.startswith("owner/")


@pytest.mark.slow
def test_on_a_terminal_yes_is_a_pull_and_an_answer(hub: ModelHub) -> None:
    command = ["generate", "--model", "owner/toy", "--prompt", "one two", *SHORT, "--json"]
    code, out, _ = asked_on_terminal("y\n", *command)
    assert code == 0
    assert len(json.loads(out)["token_ids"]) == 4


def test_show_tells_what_can_be_known_before_loading(
    hub: ModelHub, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in (NAME, "owner/small"):
        run(capsys, "pull", name)
    facts = as_json(capsys, "show", NAME, "--cache-mb", "64")
    assert (facts["family"], facts["quantisation"], facts["context"]) == ("llama", "Q8_0", 8192)
    assert facts["size"] == resolve(NAME).stat().st_size
    assert facts["parameters"] == pytest.approx(facts["size"] * 32 / 34, rel=0.05)
    knows = {"template": True, "template_knows_tools": True}
    assert facts["chat"] == knows | {"tool_format": "hermes", "channels": False}
    assert facts["engine"] in ("native", "torch")
    assert facts["memory"]["cache"] == 64 << 20
    assert facts["memory"]["fits"] in (True, None)
    assert facts["drafters"]["built_in"] == ["grammar", "suffix", "ngram", "recycle", "prediction"]
    found = {"name": "owner/small:small.gguf", "same_tokenizer": True, "trained_here": False}
    assert facts["drafters"]["models"] == [found]
    code, out, _ = run(capsys, "show", NAME, "--cache-mb", "4")
    assert code == 0
    assert "one text of 8,192 tokens: give --cache-mb 64" in out
    small = as_json(capsys, "show", "owner/small")
    assert small["drafters"]["models"] == []  # the other is no smaller
    assert small["chat"]["template"] is False


def test_show_says_if_memory_is_too_short(
    hub: ModelHub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run(capsys, "pull", NAME)
    monkeypatch.setattr("paceline.limits.available_memory", lambda: 200 << 20)
    out = run(capsys, "show", NAME, "--device", "cpu")[1]
    assert "200 MiB that are free: DOES NOT FIT, use --cache-mb 19" in out
    assert as_json(capsys, "show", NAME, "--device", "cpu")["memory"]["fits"] is False


@pytest.mark.slow
def test_rm_removes_the_model_and_what_was_made_of_it(
    hub: ModelHub, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    home = tmp_path / "home"
    run(capsys, "pull", NAME)
    prompt = "one two three four five six seven eight nine ten " * 8
    as_json(capsys, "generate", "--model", NAME, "--prompt", prompt, *SHORT, "--cache-disk-mb", "16")
    path, fingerprint = resolve(NAME), model_fingerprint(resolve(NAME))
    save_untrained(home / "drafters" / "mine", path, tokens=64)
    assert read_json(home / "cost.json")
    size = path.stat().st_size
    if native := list((home / "packed").glob(f"{fingerprint[:32]}*.bin")):
        assert stored_models(home / "kv")
    namesake = PageFormat(bytes(32), lambda page: 0)
    disk = DiskCache(home / "kv", namesake, 1 << 24, lambda rows: 100 * rows, 16, path.stem, "other weights")
    disk.offer(disk.keys("", range(16))[1], 16, lambda page: page.fill(1))
    assert disk.flush()
    assert "give --yes" in fails(capsys, "rm", NAME)
    assert path.exists()
    told = as_json(capsys, "rm", "owner/toy", "--yes")
    assert (told["name"], told["kept_drafters"]) == (NAME, ["mine"])
    assert told["removed"][NAME] == pytest.approx(size, abs=1000)  # the manifest
    assert set(told["removed"]) == {NAME, *(("packed weights", "cached prefixes") if native else ())}
    assert told["bytes"] == sum(told["removed"].values())
    assert not path.parent.exists()
    assert not list((home / "packed").glob("*.bin"))
    assert [model.weights for model in stored_models(home / "kv")] == ["other weights"]
    assert not [key for key in read_json(home / "cost.json") if fingerprint[:32] in key]
    assert "is not here" in fails(capsys, "rm", NAME, "--yes")


def test_rm_takes_the_drafters_along_if_told(
    hub: ModelHub, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run(capsys, "pull", NAME)
    head = tmp_path / "home" / "drafters" / "mine"
    save_untrained(head, resolve(NAME), tokens=64)
    told = as_json(capsys, "rm", NAME, "--yes", "--drafters")
    assert "drafter mine" in told["removed"]
    assert not head.exists()


def test_rm_asks_on_a_terminal(
    hub: ModelHub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run(capsys, "pull", NAME)
    monkeypatch.setattr(models, "_on_terminal", lambda: True)
    for answer, stays in (("n", True), ("y", False)):
        monkeypatch.setattr(sys, "stdin", StringIO(f"{answer}\n"))
        code, _, err = run(capsys, "rm", NAME)
        assert (code == 0) is not stays
        assert f"{NAME}: 1 MB" in err
        assert (installed()[-1].name == NAME) is stays


def test_rm_removes_an_unfinished_pull(hub: ModelHub, capsys: pytest.CaptureFixture[str]) -> None:
    hub.cuts = [1 << 20, *(20 * [0])]
    code, _, err = run(capsys, "pull", NAME)  # a slow machine draws the bar, too
    assert code == 2
    assert "what has arrived is kept" in err
    hub.cuts = []
    assert as_json(capsys, "ls")[-1]["arrived"] == 1 << 20
    assert run(capsys, "ls")[1].splitlines()[-2].split() == [NAME, "1", "MB", "1", "MB", "unknown"]
    assert as_json(capsys, "rm", "owner/toy", "--yes")["bytes"] == 1 << 20
    assert installed()[-1].name == "gemma3-270m"


def test_rm_leaves_what_was_not_pulled(
    hub: ModelHub, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    own = toy_chat_model(tmp_path)
    assert "was not pulled: delete it yourself" in fails(capsys, "rm", str(own), "--yes")
    assert own.exists()
    assert "is not here" in fails(capsys, "rm", "smollm2-135m", "--yes")
    assert "no model" in fails(capsys, "rm", "smolm2", "--yes")


def test_rm_of_a_repository_with_several_quantisations_wants_one(
    hub: ModelHub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {"m-Q8_0.gguf": b"8", "m-Q4_0.gguf": b"4"}
    monkeypatch.setitem(hub.repositories, "owner/two", type(hub.repositories["owner/toy"])(files))
    for name in ("owner/two:Q8_0", "owner/two:Q4_0"):
        run(capsys, "pull", name)
    assert "name one of owner/two:Q4_0, owner/two:Q8_0" in fails(capsys, "rm", "owner/two", "--yes")
    assert as_json(capsys, "rm", "owner/two:q4_0", "--yes")["name"] == "owner/two:Q4_0"
    assert [line.name for line in installed()[3:]] == ["owner/two:Q8_0"]
