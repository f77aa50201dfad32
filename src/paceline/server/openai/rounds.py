"""`stream_options.include_rounds`: a chunk for each round: who drafted its tokens, what was rejected.

It reads what the round has brought and changes nothing: the text of a stream with it is that of one without.
"""

from collections.abc import Iterator
from typing import Any, Final

from paceline.output import RequestOutput
from paceline.text import Tokenizer
from paceline.types import TARGET, Draft, Round

MAX_REJECTED: Final = 64  # nodes of a round that are shown; a tree may have more


def round_report(tokenizer: Tokenizer, output: RequestOutput) -> dict[str, Any]:
    """The latest round of an output, which wrote tokens.

    `start` counts output tokens before the round. `probability` is the drafter's own, null where it has none.
    """
    r, stats = output.rounds[-1], output.stats()
    start, texts = r.start - output.seq.prompt_len, output.round_deltas[-1].texts
    return {
        "index": output.index,
        "start": start,
        "tokens": [
            {"id": token, "text": text, "source": source, "probability": probability}
            for token, text, source, probability in zip(
                r.tokens, texts, r.sources, _accepted_scores(r), strict=True
            )
        ],
        "rejected": list(_rejected(tokenizer, r, start)),
        "drafted": len(r.draft),
        "budget": r.budget,
        "batch": r.batch,
        "draft_us": r.draft_us,
        "target_us": r.target_us,
        "passes": stats.passes,
        "tokens_per_pass": stats.tokens_per_pass,
        "token_s": stats.token_s,
        "seconds": stats.seconds,
    }


def _accepted_scores(r: Round) -> list[float | None]:
    scores = [_score(r.draft, node) for node in r.path]
    return [*scores, None][: len(r.tokens)]


def _rejected(tokenizer: Tokenizer, r: Round, start: int) -> Iterator[dict[str, Any]]:
    accepted = set(r.path)
    nodes = (node for node in range(len(r.draft)) if node not in accepted)
    for node, _ in zip(nodes, range(MAX_REJECTED), strict=False):
        token = r.draft.tokens[node]
        yield {
            "position": start + r.draft.depth(node) - 1,
            "id": token,
            "text": tokenizer.piece(token).decode("utf-8", "replace"),
            "source": r.draft.sources[node] if r.draft.sources else TARGET,
            "probability": _score(r.draft, node),
        }


def _score(draft: Draft, node: int) -> float | None:
    return float(draft.scores[node]) if draft.scores else None
