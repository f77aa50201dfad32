"""The shell completes commands, options, and names of models, drafters and formats."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.cli.main import main
from paceline.config import ACCEPT_RULES, DTYPES
from paceline.drafters import DRAFTERS
from paceline.hub import CATALOGUE


def completed(
    words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], shell: str = "bash"
) -> list[str]:
    """What the shell is offered for the last word."""
    line = f"paceline {words}"
    monkeypatch.setenv("_PACELINE_COMPLETE", f"complete_{shell}")
    monkeypatch.setenv("COMP_WORDS", line)
    monkeypatch.setenv("COMP_CWORD", str(len(line.split(" ")) - 1))
    monkeypatch.setenv("_TYPER_COMPLETE_ARGS", line)
    monkeypatch.setenv("_TYPER_COMPLETE_FISH_ACTION", "get-args")
    with pytest.raises(SystemExit) as end:
        main([])
    assert end.value.code == 0
    return capsys.readouterr().out.split()


CASES = {
    "gen": {"generate"},
    "serve --po": {"--port"},
    "serve ": {*CATALOGUE},
    "serve smol": {"smollm2-135m"},
    "serve --draft-model smol": {"smollm2-135m"},
    "pull smol": {"smollm2-135m"},
    "generate --model smol": {"smollm2-135m"},
    "generate --dtype ": {*DTYPES},
    "generate --accept ": {*ACCEPT_RULES},
    "generate --tool-format ": {"harmony", "hermes", "llama3", "mistral", "smollm2"},
    "generate --drafters n": {"none", "ngram"},
    "generate --drafters suffix,n": {"suffix,ngram"},
    "generate --drafters suffix,": {f"suffix,{name}" for name in DRAFTERS if name != "none"},
    "serve ./weights": set(),  # the shell offers files
}


@pytest.mark.parametrize("words", CASES)
def test_bash_is_offered(
    words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    assert {*completed(words, monkeypatch, capsys)} == CASES[words]


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_are_offered_the_same(
    shell: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "smollm2-135m" in "\n".join(completed("serve smol", monkeypatch, capsys, shell))


# In a shell with --install-completion done: prints what the Tab key offers.
TAB = {
    "bash": "source ~/.bashrc; COMP_WORDS=(paceline serve smol); COMP_CWORD=2; "
    '_paceline_completion paceline; echo "${COMPREPLY[@]}"',
    "fish": 'complete --do-complete "paceline serve smol"',
    # zsh itself wants a terminal: the function is run with the widget's variables, and _arguments shown.
    "zsh": "source ~/.zshrc; autoload -Uz _paceline; _arguments() { echo $@ }; words=(paceline serve smol); "
    "CURRENT=3; compdef() { : }; source ~/.zfunc/_paceline; _paceline_completion",
}


@pytest.mark.slow
@pytest.mark.parametrize("shell", TAB)
def test_a_shell_completes_once_it_is_installed(shell: str, tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not here: apt-get install {shell}")
    program = tmp_path / "bin" / "paceline"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m paceline "$@"\n')
    program.chmod(0o755)
    environment = {**os.environ, "HOME": str(tmp_path), "PATH": f"{program.parent}:{os.environ['PATH']}"}
    environment |= {"PACELINE_HOME": str(tmp_path / "home"), "XDG_CONFIG_HOME": str(tmp_path / ".config")}
    script = f"paceline --install-completion && {TAB[shell]}"
    if shell == "fish":  # reads its folder of completions at the start
        script = f"paceline --install-completion; and exec fish -c '{TAB[shell]}'"
    done = subprocess.run(
        [shell, "-c", script], env=environment, capture_output=True, text=True, check=False, timeout=120
    )
    assert "completion installed" in done.stdout, done.stderr
    assert "smollm2-135m" in done.stdout.splitlines()[-1], done.stdout + done.stderr
