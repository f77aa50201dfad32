"""python -m bench: paceline against the peers that are installed, in one run on this machine.

python -m bench                      both models, every workload, within half an hour
python -m bench own [--write]        paceline's own figures: the agent workflow, overhead, memory
python -m bench passes               what a pass costs by its rows, prefill and long contexts
python -m bench guesses              lists of drafters: tokens per pass and time per token, as they learn
python -m bench drafters             every drafter in one table, against plain decoding in the same run
python -m bench draft-pass           what a trained drafter's draft costs beside a pass, as the text grows
python -m bench divergence           how far from the float32 model the next-token distribution is
python -m bench tools                tool calls of BFCL and tau-bench under their schemas
python -m bench schemas              every recorded schema: accepted, followed, equal with guessing
python -m bench serve                a running server: agents at once, turn n+1, cost over the engine
python -m bench soak                 a running server under good, bad and broken requests
"""

import sys

from bench import cli, divergence, draft_pass, drafters, guesses, passes, run, schemas, serve, soak, tools

COMMANDS = {
    "own": run.main,
    "passes": passes.main,
    "guesses": guesses.main,
    "drafters": drafters.main,
    "draft-pass": draft_pass.main,
    "divergence": divergence.main,
    "tools": tools.main,
    "schemas": schemas.main,
    "serve": serve.main,
    "soak": soak.main,
    "compare": cli.main,
}


def main(arguments: list[str]) -> None:
    name = arguments[0] if arguments and arguments[0] in COMMANDS else "compare"
    COMMANDS[name](arguments[1:] if arguments[:1] == [name] else arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
