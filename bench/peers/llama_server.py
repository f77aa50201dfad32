"""llama.cpp's server: the one built here for this processor, or the wheel that holds it in a process.

Seconds are the server's own (`timings`), so HTTP and JSON cost it nothing.
"""

import atexit
import http.client
import json
import socket
import subprocess
import time
from typing import Any, Final

from bench.peers.wire import Answer, Ask, Load, peak_mb, serve

Running = tuple[int, int | str, str]  # port, process id, version
PATIENCE: Final = 300  # seconds until the server must be up
_kept: Any = None  # a server in this process ends with its last reference

# Its defaults suit long copies (a match of 12 tokens, 48 drafted tokens); those named short suit tool calls.
SPEC: Final[dict[str, dict[str, Any]]] = {
    "plain": {},
    "ngram-simple": {"type": "ngram-simple"},
    "ngram-short": {"type": "ngram-simple", "size_n": 3, "size_m": 5},
    "ngram-map-k": {"type": "ngram-map-k"},
    "ngram-map-k-short": {"type": "ngram-map-k", "size_n": 3, "size_m": 5},
    "ngram-mod": {"type": "ngram-mod"},
    "ngram-cache": {"type": "ngram-cache"},
    "draft": {"type": "draft-simple"},
}


class LlamaServer:
    def load(self, load: Load) -> str:
        start = start_binary if "binary" in load.settings else start_wheel
        self._port, self._pid, version = start(load)
        return version

    def generate(self, ask: Ask) -> Answer:
        reply = _post(
            self._port,
            {
                "prompt": ask.prompt,
                "n_predict": ask.max_tokens,
                "temperature": ask.temperature,
                "samplers": ["temperature"],
                "seed": ask.seed,
                "ignore_eos": ask.ignore_eos,
                "cache_prompt": False,
                "return_tokens": True,
            },
        )
        times, tokens = reply["timings"], reply["tokens"]
        if len(tokens) < times["predicted_n"]:  # the token that ended the answer is counted, not given
            tokens = tokens + [-1] * (times["predicted_n"] - len(tokens))
        seconds = times["prompt_ms"] / 1000
        passes = times["predicted_n"] - times.get("draft_n_accepted", 0)
        return Answer(tokens, seconds, seconds + times["predicted_ms"] / 1000, passes)

    def peak_mb(self) -> float:
        return peak_mb(self._pid)


def start_wheel(load: Load) -> Running:
    global _kept
    import xllamacpp as x  # type: ignore[import-not-found]

    p = x.CommonParams()
    p.model.path = load.model
    p.n_ctx, p.n_parallel, p.cache_ram_mib, p.port = load.context, 1, 0, 0
    p.cpuparams.n_threads = p.cpuparams_batch.n_threads = load.threads
    p.no_extra_bufts = bool(load.settings.get("no_extra_bufts"))
    chosen = dict(SPEC[load.mode])
    if kind := chosen.pop("type", None):
        name = kind.upper().replace("-", "_")
        p.speculative.types = [getattr(x.common_speculative_type, f"COMMON_SPECULATIVE_TYPE_{name}")]
        for setting, value in chosen.items():
            setattr(getattr(p.speculative, kind.replace("-", "_")), setting, value)
    if load.mode == "draft":
        p.speculative.draft.mparams.path = load.draft
    _kept = x.Server(p)
    port = int(_kept.listening_address.rpartition(":")[2])
    return port, "self", f"xllamacpp {x.__version__}"


def arguments(load: Load, port: int) -> list[str]:
    """The command line of llama-server for a mode."""
    chosen = dict(SPEC[load.mode])
    slots = str(load.settings.get("slots", 1))
    args = ["--model", load.model, "--host", "127.0.0.1", "--port", str(port)]
    args += ["--ctx-size", str(load.context), "--parallel", slots, "--no-webui"]
    args += ["--cache-ram", str(load.settings.get("cache_ram_mb", 0))]
    args += ["--threads", str(load.threads), "--threads-batch", str(load.threads)]
    args += ["--no-repack"] if load.settings.get("no_extra_bufts") else []
    if kind := chosen.pop("type", None):
        args += ["--spec-type", kind]
        for setting, value in chosen.items():
            args += [f"--spec-{kind}-{setting.replace('_', '-')}", str(value)]
    return [*args, "--spec-draft-model", load.draft] if load.mode == "draft" and load.draft else args


def start_binary(load: Load) -> Running:
    binary = load.settings["binary"]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen([binary, *arguments(load, port)], stdin=subprocess.DEVNULL, stdout=2)
    atexit.register(server.kill)
    until = time.monotonic() + PATIENCE
    while not _is_up(port):
        if server.poll() is not None or time.monotonic() > until:
            raise RuntimeError(f"llama-server did not start (exit {server.poll()})")
        time.sleep(0.05)
    done = subprocess.run([binary, "--version"], capture_output=True, text=True, check=False)
    version = (done.stdout + done.stderr).partition("\n")[0]
    return port, server.pid, f"llama-server {version}"


def _is_up(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def _post(port: int, body: dict[str, Any]) -> dict[str, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port)
    try:
        connection.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
        reply: dict[str, Any] = json.loads(connection.getresponse().read())
    finally:
        connection.close()
    if "error" in reply:
        raise RuntimeError(str(reply["error"]))
    return reply


if __name__ == "__main__":
    serve(LlamaServer)
