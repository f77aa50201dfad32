"""The cost of the server at one stream: the same prompts and seeds over HTTP and by LLM.stream in a process.

The two take turns prompt by prompt; a ratio is over one prompt, and its spread over all.
"""

import random
import sys
from collections.abc import Sequence
from dataclasses import asdict
from itertools import count
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from bench.peers.child import Child
from bench.peers.wire import Answer
from bench.serve.http_client import Reading, read
from bench.serve.servers import COMPLETIONS, ServerMode
from bench.spread import Spread
from paceline.text import Detokenizer, Tokenizer

PATIENCE: Final = 300.0
TEMPERATURES: Final = (0.0, 0.7)
_users = count()


def measure(
    ways: Sequence[ServerMode],
    tokenizer: Tokenizer,
    model: Path,
    threads: int,
    prompts: Sequence[list[int]],
    max_tokens: int,
) -> list[dict[str, Any]]:
    """A row for each way of asking the server."""
    child = Child([sys.executable, "-m", "bench.peers.in_process"])
    try:
        child.load(PATIENCE, model=str(model), threads=threads)
        return [_row(way, tokenizer, child, prompts, max_tokens) for way in ways]
    finally:
        child.close()


def _row(
    way: ServerMode, tokenizer: Tokenizer, child: Child, prompts: Sequence[list[int]], max_tokens: int
) -> dict[str, Any]:
    rng, pairs, differing = random.Random(0), list[tuple[Reading, Answer]](), 0
    for number, prompt in enumerate([prompts[0], *prompts]):  # the first is for warming
        how = {"temperature": TEMPERATURES[number % 2], "seed": number}
        body = way.body(prompt, max_tokens, f"cost-{next(_users)}", 0, 0) | how
        request = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "user": way.mode, **how}
        if rng.random() < 0.5:
            answer = child.generate(PATIENCE, **request)
            reading = read(way.served.port, COMPLETIONS, body)
        else:
            reading = read(way.served.port, COMPLETIONS, body)
            answer = child.generate(PATIENCE, **request)
        if number:
            pairs.append((reading, answer))
            differing += _text(tokenizer, answer.tokens) != reading.text
    steps = max_tokens - 1
    engine = [1000 * (answer.total - answer.ttft) / steps for _, answer in pairs]
    served = [1000 * (reading.last - reading.first) / steps for reading, _ in pairs]
    return {
        "mode": way.mode,
        "engine_ms_per_token": asdict(Spread.of(engine)),
        "server_ms_per_token": asdict(Spread.of(served)),
        "ratio": asdict(Spread.of([s / e for s, e in zip(served, engine, strict=True)])),
        "ratio_of_means": fmean(served) / fmean(engine),
        "whole_answer_ratio": asdict(Spread.of([r.last / a.total for r, a in pairs])),
        "first_token_extra_ms": asdict(Spread.of([1000 * (r.first - a.ttft) for r, a in pairs])),
        "prompts": len(pairs),
        "differing_texts": differing,
    }


def _text(tokenizer: Tokenizer, tokens: Sequence[int]) -> str:
    """As an answer shows them."""
    stream = Detokenizer(tokenizer, ())
    return "".join(stream.push(token) for token in tokens) + stream.flush()
