"""`paceline serve` as a process of its own, as its users run it."""

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import httpx
import openai

START_S = 300  # on a machine that has much else to do
MODEL = "smollm2-135m"
COMMAND = (sys.executable, "-c", "from paceline.cli import main; main()")


@dataclass(frozen=True, slots=True)
class Process:
    process: "subprocess.Popen[str]"
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=600)

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def exit_code(self, seconds: float) -> int:
        return self.process.wait(seconds)

    def answers_at(self, address: str) -> bool:
        """Whether a connection can be opened."""
        with socket.socket() as probe:
            probe.settimeout(1)
            return probe.connect_ex((address, self.port)) == 0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def served(*options: str) -> Iterator[Process]:
    """Ready for requests; killed at the end, if it still runs."""
    port = free_port()
    command = [*COMMAND, "serve", MODEL, "--port", str(port), "--cache-mb", "256", "--threads", "1", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        started = Process(process, port)
        _wait_until_ready(started)
        yield started
    finally:
        process.kill()
        process.communicate()


def _wait_until_ready(started: Process) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if started.process.poll() is not None:
            raise AssertionError(f"the server ended before it began: {started.process.communicate()[0]}")
        try:
            if httpx.get(f"{started.url}/ready", trust_env=False).status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.1)
    raise AssertionError("the server did not start in time")
