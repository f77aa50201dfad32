"""The gate reads the metrics of upstreams that it compares."""

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from paceline.gate.gateway import metrics_poller
from paceline.gate.gateway.config import load
from paceline.gate.gateway.metrics import GateMetrics
from paceline.gate.gateway.metrics_poller import MetricsPoller
from paceline.gate.gateway.upstream_client import UpstreamClient
from paceline.gate.store import GateStore
from paceline.gate.upstream_metrics import UpstreamWindow
from support.servers import IDLE_S, until
from support.upstreams import gate, upstream


def page(tokens: int, drafts: int, accepted: int) -> str:
    counters = {"drafts": drafts, "draft_tokens": 4 * drafts, "accepted_tokens": accepted}
    lines = [f'vllm:spec_decode_num_{name}_total{{model_name="m"}} {n}' for name, n in counters.items()]
    return "\n".join([*lines, f'vllm:generation_tokens_total{{model_name="m"}} {tokens}', ""])


def test_the_growth_of_both_arms_becomes_a_window_where_both_tell_it(tmp_path: Path) -> None:
    saved: list[tuple[str, UpstreamWindow]] = []
    with upstream("base") as base, upstream("cand") as cand, upstream("alone") as alone:
        upstreams: list[dict[str, Any]] = [{"name": one.name, "url": one.url} for one in (base, cand, alone)]
        upstreams[1]["metrics_urls"] = [f"{alone.url}/metrics"]
        routes = [
            {"name": "one", "match": {"model": "one"}, "upstreams": {"alone": 1}},
            {"name": "all", "upstreams": {"base": 1}, "mirror": {"candidate": "cand"}},
        ]
        file = tmp_path / "gate.yaml"
        file.write_text(yaml.safe_dump({"upstreams": upstreams, "routes": routes}))
        config = load(file)

        async def read() -> str:
            client = UpstreamClient(time.monotonic)
            client.configure(config.upstreams)
            client.start()
            metrics = GateMetrics(lambda: client.states)
            reader = MetricsPoller(client, lambda: config, metrics, lambda *given: saved.append(given))
            alone.metrics = 'DCGM_FI_DEV_GPU_UTIL{gpu="0"} 50\n'
            for base.metrics, cand.metrics in (
                (page(1000, 0, 0), page(500, 40, 80)),
                (page(1400, 0, 0), page(800, 100, 200)),
                (page(1900, 0, 0), page(800, 100, 200)),  # the candidate wrote nothing
                (page(2000, 0, 0), "vllm:generation_tokens_total{ oops"),
                (None, page(900, 110, 210)),
            ):
                await reader.read()
            await client.close()
            return metrics.render()[0].decode()

        shown = asyncio.run(read())
    ((experiment, window),) = saved
    assert experiment == "all-cand"
    assert (window.baseline.generated_tokens, window.baseline.drafts) == (400, 0)
    assert (window.candidate.generated_tokens, window.candidate.accepted_tokens) == (300, 120)
    assert (window.candidate.gpu_utilization, window.candidate.gpus) == (0.5, 1)
    assert 'paceline_gate_upstream_figure{figure="acceptance",upstream="cand"} 0.5' in shown
    assert 'paceline_gate_upstream_figure{figure="gpu_utilization",upstream="cand"} 0.5' in shown
    assert 'upstream="alone"' not in shown.split("HELP paceline_gate_upstream_figure")[1]


def test_a_running_gate_reads_again_and_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_poller, "WINDOW_S", 0.02)
    url = str(tmp_path / "gate.db")
    with upstream("base") as base:
        base.metrics = page(100, 0, 0)
        mirror = {"candidate": "base", "experiment": "aa"}
        config = {
            "upstreams": [{"name": "base", "url": base.url}],
            "routes": [{"name": "all", "upstreams": {"base": 1}, "mirror": mirror}],
        }
        with gate(tmp_path, config, store=url) as running:
            until(lambda: bool(running.app.reader._last), IDLE_S)
            base.metrics = page(300, 0, 0)
            store = GateStore.open(url)
            until(lambda: bool(store.windows("aa")), IDLE_S)
            (window,) = store.windows("aa")
            store.close()
    assert window.baseline.generated_tokens == window.candidate.generated_tokens == 200
