"""Time to first token of turn n+1 of a long conversation, against a conversation no cache has seen.

Between turn n and turn n+1 the other conversation is asked, so that what is kept must outlast it.
"""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from bench.serve.cut_prompts import after
from bench.serve.http_client import Reading, read
from bench.serve.servers import COMPLETIONS, ServerMode
from bench.spread import Spread
from paceline.text import Tokenizer

ANSWER = 32  # tokens of turn n


def measure(
    way: ServerMode, tokenizer: Tokenizer, prompts: Sequence[list[int]], others: Sequence[list[int]]
) -> dict[str, Any]:
    """A repeat for each prompt. `others` are longer: cut to the length of turn n+1."""
    cold, warm = list[float](), list[float]()
    for number, (prompt, other) in enumerate(zip(prompts, others, strict=True)):
        user = f"{way.mode}-turns-{number}"
        said = _ask(way, prompt, ANSWER, user, 0, 0)
        told = after(tokenizer, prompt, said.text)
        if len(other) < len(told):
            raise ValueError(f"a conversation of {len(told)} tokens needs others as long")
        cold.append(1000 * _ask(way, other[-len(told) :], 1, f"{user}-other", 1, 0).first)
        warm.append(1000 * _ask(way, told, 1, user, 0, 1).first)
    return {
        "system": way.system,
        "mode": way.mode,
        "prompt_tokens": len(prompts[0]),
        "cold_ms": asdict(Spread.of(cold)),
        "next_ms": asdict(Spread.of(warm)),
        "share": asdict(Spread.of([b / a for a, b in zip(cold, warm, strict=True)])),
        "repeats": len(cold),
    }


def _ask(way: ServerMode, prompt: list[int], max_tokens: int, user: str, slot: int, turn: int) -> Reading:
    return read(way.served.port, COMPLETIONS, way.body(prompt, max_tokens, user, slot, turn))
