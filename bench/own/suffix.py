"""The cost of the suffix drafter with a million tokens remembered.

    python -m bench.own.suffix [FOLDER]

The conversations are made up, or recorded ones: *.jsonl.gz files with a list of "messages" on each line.
"""

import gc
import gzip
import json
import random
import re
import sys
import time
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from statistics import quantiles
from typing import Any

from paceline.drafters.suffix import Suffix, SuffixSettings
from paceline.drafters.suffix.index import ContextIndex
from paceline.types import Ask, Seq

PIECE = re.compile(r" ?[^\W\d_]{1,7}|\d{1,3}|\s+|.")  # about as long as a tokenizer's
PROMPT, OUTPUT, BUDGET = 4000, 200, 8


def recorded(folder: Path) -> Iterator[str]:
    for path in sorted(folder.glob("*.jsonl.gz")):
        with gzip.open(path, "rt") as lines:
            for line in lines:
                yield "\n".join(json.dumps(message) for message in json.loads(line)["messages"])


def made_up(seed: int = 0) -> Iterator[str]:
    """Prose with a long tail of words, and calls that repeat with other ids."""
    rng = random.Random(seed)
    words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 9))) for _ in range(5000)]
    weights = [1 / (rank + 5) for rank in range(len(words))]
    while True:
        turns = []
        for _ in range(60):  # some ten thousand tokens
            call = {"name": rng.choice(words[:30]), "arguments": {"id": rng.randrange(10**8), "ok": True}}
            turns += [json.dumps(call), " ".join(rng.choices(words, weights, k=rng.randint(20, 200)))]
        yield "\n".join(turns)


def tokenized(texts: Iterator[str]) -> Iterator[list[int]]:
    ids: dict[str, int] = {}
    for text in texts:
        yield [ids.setdefault(piece, len(ids)) for piece in PIECE.findall(text)]


def resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def fill(drafter: Suffix, texts: Iterator[list[int]], tokens: int) -> tuple[float, float]:
    """Microseconds and bytes for each token learnt."""
    room, chosen = tokens, []
    for text in texts:
        chosen.append(text[:room])
        room -= len(chosen[-1])
        if not room:
            break
    gc.collect()
    memory, started = resident(), time.perf_counter()
    for i, text in enumerate(chosen):
        drafter.end(Seq(str(i), text, 0))
    seconds = time.perf_counter() - started
    gc.collect()
    return 1e6 * seconds / len(drafter.memory), (resident() - memory) / len(drafter.memory)


def time_drafts(drafter: Suffix, text: list[int]) -> list[float]:
    """Microseconds for each draft after the first, which also indexes the prompt; the text is given."""
    seq = Seq("timed", text[:PROMPT], PROMPT)
    drafter.begin(seq)
    drafter.draft([Ask(seq, BUDGET)])
    times = []
    for token in text[PROMPT : PROMPT + OUTPUT]:
        seq.tokens.append(token)
        started = time.perf_counter()
        drafter.draft([Ask(seq, BUDGET)])
        times.append(1e6 * (time.perf_counter() - started))
    return times


def time_prompt(text: list[int]) -> float:
    """Milliseconds to index a prompt of which nothing is remembered."""
    started = time.perf_counter()
    index = ContextIndex()
    index.open()
    index.extend(text)
    return 1e3 * (time.perf_counter() - started)


def measure(folder: Path | None = None, tokens: int = 1_000_000) -> dict[str, Any]:
    texts = tokenized(chain(recorded(folder) if folder else (), made_up()))
    timed = list(islice((text for text in texts if len(text) >= PROMPT + OUTPUT), 10))
    drafter = Suffix(SuffixSettings(max_tokens=tokens))
    learn_us, per_token = fill(drafter, texts, tokens * 21 // 20)  # some is known and some is evicted again
    cuts = quantiles((us for text in timed for us in time_drafts(drafter, text)), n=100)
    kind = "recorded" if folder else "made-up"
    return {
        "what": f"drafts of {BUDGET} after prompts of {PROMPT} tokens; the memory holds {kind} conversations",
        "remembered_tokens": len(drafter.memory),
        "draft_us_p50": round(cuts[49], 1),
        "draft_us_p99": round(cuts[98], 1),
        "learn_us_per_token": round(learn_us, 1),
        "bytes_per_token": round(per_token, 1),
        "prompt_ms": round(min(time_prompt(text[:PROMPT]) for text in timed), 1),
    }


if __name__ == "__main__":
    print(json.dumps(measure(Path(sys.argv[1]) if sys.argv[1:] else None), indent=1))
