"""Resident memory of a loaded model, beyond that of importing torch, against the size of its weights."""

import json
import subprocess
import sys
from typing import Any

CHILD = """
import json, resource, sys
import torch

def rss():
    for line in open("/proc/self/status"):
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1024

torch.zeros(8, 8) @ torch.zeros(8, 8)
base = rss()
from paceline import LLM, EngineConfig
llm = LLM(sys.argv[1], config=EngineConfig(cache_mb=64))
llm.generate("Hello, my name is", max_tokens=16, seed=0)
print(json.dumps({"base": base, "now": rss(), "held": llm.target.bytes_held / 2**20, "cache": 64}))
"""


def measure(model: str) -> dict[str, Any]:
    done = subprocess.run([sys.executable, "-c", CHILD, model], capture_output=True, text=True, check=True)
    mb = json.loads(done.stdout.splitlines()[-1])
    beyond = mb["now"] - mb["base"]
    return {
        "what": "MB resident beyond importing torch, with a 64 MB KV cache",
        "resident_mb": round(beyond),
        "weights_as_held_mb": round(mb["held"]),
        "ratio": round((beyond - mb["cache"]) / mb["held"], 2),
    }
