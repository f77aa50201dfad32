"""python -m bench: paceline against the peers that are installed, in one run on this machine.

python -m bench                      both models, every workload, within half an hour
python -m bench runs                 whole agent runs over HTTP, turn by turn, against llama.cpp's server
python -m bench agents               what each habit of a fast agent is worth, to the first token
python -m bench restarts             the first token of a prompt that an earlier process has read
python -m bench own                  decoding, the agent example, overhead, memory
python -m bench passes               what a pass costs by its rows, prefill and long contexts
python -m bench reading              what a prompt token costs by the length of the prompt before it
python -m bench experts              what a pass of a mixture of experts costs by its rows
python -m bench lists                lists of drafters as they learn: tokens per pass, time per token
python -m bench drafters             every drafter in one table, against plain decoding in the same run
python -m bench control              the controller against plain decoding and fixed lengths, as load rises
python -m bench control-cost         microseconds that the controller takes for a sequence and round
python -m bench draft-pass           what a trained drafter's draft costs beside a pass, as the text grows
python -m bench divergence           how far from the float32 model the next-token distribution is
python -m bench tools                tool calls of BFCL and tau-bench under their schemas
python -m bench tool-calls           calls that a model makes under auto, and who reads them
python -m bench schemas              every recorded schema: accepted, followed, equal with drafts
python -m bench serve                a running server: agents at once, turn n+1, cost over the engine
python -m bench browser              the page in Chromium: first paint, frames while an answer streams
python -m bench prefetch             tool calls of recorded agents, predicted before they are written
python -m bench prefetch-served      recorded runs with slow tools, with and without prefetching
python -m bench soak                 a running server under good, bad and broken requests, and pairs
                                     of answers with drafts and without, of every drafter and endpoint
python -m bench soak --hostile       attacks beside ordinary streams and pairs: gaps, /health, memory
python -m bench gate                 the release gate: false verdicts and pairs to a true one, by simulation
python -m bench gate-served          the release gate on a real model: good, equal and spoiled candidates
python -m bench gateway              what the gate adds to a stream's latency, 1 and 200 at a time
python -m bench split                a split deployment against plain streaming, as the round trip grows
python -m bench browser-drafters     the model drafters of a browser: download, start, time of a token
python -m bench vllm                 paceline's drafters inside vLLM against its own n-gram drafter
python -m bench scale                the gain from speculation as load rises, simulated
python -m bench pages                docs/numbers.md, bench/results/README.md, README.md from bench/results
python -m bench advise               what `paceline advise` predicts, against what is measured
python -m bench golden               the recorded token ids of a fixed set of requests

--write keeps the results in bench/results and writes the pages anew.
"""

import sys
from importlib import import_module

COMMANDS = {
    "compare": "bench.compare.command",
    "runs": "bench.runs.command",
    "agents": "bench.runs.effects",
    "restarts": "bench.runs.restarts",
    "own": "bench.own.command",
    "passes": "bench.own.passes",
    "reading": "bench.own.reading",
    "experts": "bench.own.experts",
    "advise": "bench.advise",
    "lists": "bench.drafters.lists",
    "guesses": "bench.drafters.lists",  # its name before 0.2
    "drafters": "bench.drafters.command",
    "control": "bench.control",
    "control-cost": "bench.control_cost",
    "draft-pass": "bench.drafters.draft_pass",
    "divergence": "bench.own.divergence",
    "tools": "bench.constraints.tools",
    "tool-calls": "bench.constraints.auto_calls",
    "schemas": "bench.constraints.schemas",
    "serve": "bench.serve.command",
    "browser": "bench.browser",
    "prefetch": "bench.prefetch",
    "prefetch-served": "bench.runs.tool_waits",
    "soak": "bench.serve.soak",
    "gateway": "bench.serve.gateway",
    "gate": "bench.gate.command",
    "gate-served": "bench.gate.served",
    "split": "bench.split",
    "browser-drafters": "bench.browser_drafters",
    "vllm": "bench.vllm.command",
    "scale": "bench.scale",
    "pages": "bench.pages.command",
    "golden": "bench.golden",
}


def main(arguments: list[str]) -> None:
    given = bool(arguments) and arguments[0] in COMMANDS
    name, rest = (arguments[0], arguments[1:]) if given else ("compare", arguments)
    import_module(COMMANDS[name]).main(rest)


if __name__ == "__main__":
    main(sys.argv[1:])
