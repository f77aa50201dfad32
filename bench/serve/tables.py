"""The tables of `python -m bench serve` and `python -m bench soak`."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from bench.table import Column, Table, number, spread

CONCURRENCY: Final = (
    Column("turn", "turn"),
    Column("agents", "agents"),
    Column("server", "system"),
    Column("mode", "mode"),
    Column("tokens/s", lambda r: spread(r["tokens_per_s"], 1)),
    Column("first ms p50", lambda r: number(r["ttft_p50_ms"], 0)),
    Column("p99", lambda r: number(r["ttft_p99_ms"], 0)),
    Column("ms/token", lambda r: number(r["tpot_ms"], 1)),
    Column("answers", "answers"),
)
SCALING: Final = (
    Column("turn", "turn"),
    Column("server and mode", "way"),
    Column("all agents : one, tokens/s", spread),
)
AGAINST: Final = (
    Column("turn", "turn"),
    Column("agents", "agents"),
    Column("ours", "way"),
    Column("fastest of llama.cpp's", "peer"),
    Column("ratio of tokens/s", spread),
)
NEXT_TURN: Final = (
    Column("server", "system"),
    Column("mode", "mode"),
    Column("tokens", "prompt_tokens"),
    Column("unseen, first ms", lambda r: spread(r["cold_ms"], 0)),
    Column("turn n+1, first ms", lambda r: spread(r["next_ms"], 0)),
    Column("share", lambda r: spread(r["share"], 3)),
    Column("n", "repeats"),
)
OVERHEAD: Final = (
    Column("mode", "mode"),
    Column("engine ms/token", lambda r: spread(r["engine_ms_per_token"])),
    Column("server ms/token", lambda r: spread(r["server_ms_per_token"])),
    Column("ratio", lambda r: spread(r["ratio"], 3)),
    Column("of means", lambda r: number(r["ratio_of_means"], 3)),
    Column("whole answer", lambda r: spread(r["whole_answer_ratio"], 3)),
    Column("texts differ", lambda r: f"{r['differing_texts']} of {r['prompts']}"),
)
HOSTILE: Final = (
    Column("attack", "attack"),
    Column("runs", "runs"),
    Column("answers", "answers"),
    Column("expected", "expected"),
    Column("longest, s", "seconds"),
    Column("others' longest gap, ms", "gap_ms"),
    Column("longest /health, ms", "health_ms"),
)
PAIRS: Final = (
    Column("drafters", "drafters"),
    Column("chat", "/v1/chat/completions"),
    Column("completions", "/v1/completions"),
    Column("responses", "/v1/responses"),
    Column("drafted by them", "drafted"),
    Column("accepted", "accepted"),
)


def tables(result: Mapping[str, Any]) -> Iterator[Table]:
    if agents := result.get("agents"):
        yield Table.of(CONCURRENCY, agents["rows"], "agents at once")
        yield Table.of(SCALING, agents["scaling"], "all agents against one")
        if agents["against"]:
            yield Table.of(AGAINST, agents["against"], "against llama.cpp's server")
    if turns := result.get("turns"):
        yield Table.of(NEXT_TURN, turns, "turn n+1 of a conversation")
    if cost := result.get("cost"):
        yield Table.of(OVERHEAD, cost, "the server over the bare engine, one stream")
    if figures := result.get("figures"):
        yield Table(["figure", "value"], [[name, str(value)] for name, value in figures.items()], "soak")
    if pairs := result.get("pairs"):
        yield Table.of(PAIRS, pairs, "pairs of answers with drafts and without")
    if hostile := result.get("hostile"):
        yield Table.of(HOSTILE, hostile, "attacks")
