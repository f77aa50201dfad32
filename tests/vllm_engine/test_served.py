"""A running vLLM server on this CPU: plain, then with paceline's proposer, directly and through the gate."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from bench.vllm.server import MISSING, serving, vllm_python
from paceline.convert import export_model
from paceline.gate.leg_recorder import speculation_figures
from paceline.gate.pair import Leg
from paceline.gate.upstream import Upstream, http_session, run_leg
from paceline.gate.upstream_metrics import UpstreamCounters, read_counters
from paceline.text import Tokenizer
from paceline.train.data.answer_plan import AnswersConfig, plan_answers
from paceline.train.data.prompts import Prompt
from paceline.train.data.rollout import Job, Rollout
from paceline.train.data.server_answers import server_answers
from paceline.vllm.serve_command import proposer_config
from paceline.web import api_keys
from support.training import user
from support.upstreams import gate

pytestmark = [
    pytest.mark.model,
    pytest.mark.vllm,
    pytest.mark.skipif(vllm_python() is None, reason=MISSING),
]

MODEL, K, MAX_TOKENS = "smollm2", 6, 40
ROLLOUT = Rollout(max_new=MAX_TOKENS)
QUESTIONS = (
    "Repeat this line three times: The order W-20471 goes to 18 Quarry Lane, Ashford.",
    "What is rain? Answer in two sentences.",
)


@pytest.fixture(scope="module")
def folder(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_model(smollm2_path, tmp_path_factory.mktemp("model") / "smollm2")


def client_of(url: str, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=300)


def answer(client: openai.OpenAI, question: str, **xargs: Any) -> tuple[str, dict[str, Any]]:
    """The text, and the figures of speculation that the gate would record."""
    reply = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": question}],
        temperature=0,
        max_tokens=MAX_TOKENS,
        extra_body={"vllm_xargs": xargs} if xargs else {},
    )
    metrics = (reply.model_extra or {}).get("metrics") or {}
    return reply.choices[0].message.content or "", speculation_figures(metrics)


def counters(url: str) -> UpstreamCounters:
    return read_counters(httpx.get(f"{url}/metrics", timeout=60).text)


@dataclass(frozen=True)
class Plain:
    """Answers of a server without speculation."""

    texts: list[str]
    planned: list[Job]  # a greedy and a sampled answer to each question
    answers: list[list[int]]
    again: list[list[int]]


@pytest.fixture(scope="module")
def plain(folder: Path, smollm2_path: Path) -> Plain:
    """One server at a time: this one has ended before the next one starts."""
    tokenizer = Tokenizer.load(smollm2_path)
    prompts = [
        Prompt(tuple(tokenizer.encode(tokenizer.render([user(question)]))), False, (user(question),))
        for question in QUESTIONS
    ]
    planned = plan_answers(prompts, AnswersConfig(greedy=1.0, per_prompt=2))
    with serving(folder, served_model_name=MODEL, max_model_len=1024) as served:
        url = f"http://127.0.0.1:{served.port}"
        texts = [answer(client_of(url), question)[0] for question in QUESTIONS]
        twice = [server_answers(url, tokenizer, planned, ROLLOUT) for _ in range(2)]
    return Plain(texts, planned, *twice)


@pytest.fixture(scope="module")
def url(folder: Path, plain: Plain) -> Iterator[str]:
    """With the proposer."""
    with serving(folder, proposer_config(K), served_model_name=MODEL, max_model_len=1024) as served:
        yield f"http://127.0.0.1:{served.port}"


def test_the_text_is_that_of_plain_decoding_and_drafts_are_accepted(url: str, plain: Plain) -> None:
    before = counters(url)
    answers = [answer(client_of(url), question) for question in QUESTIONS]
    assert [text for text, _ in answers] == plain.texts
    grown = counters(url) - before
    assert grown.accepted_tokens == sum(figures["accepted_tokens"] for _, figures in answers) > 0
    assert grown.draft_tokens == sum(figures["draft_tokens"] for _, figures in answers)
    assert grown.drafts == sum(sum(figures["acceptance_histogram"]) for _, figures in answers)
    assert sum(grown.accepted_by_position) == grown.accepted_tokens
    assert grown.tokens_per_pass > 1


def test_a_tenants_later_requests_draft_from_its_earlier_ones_and_no_one_elses(url: str) -> None:
    client, question = client_of(url), QUESTIONS[1]
    alone = answer(client, question, tenant="first")[1]["accepted_tokens"]
    again = answer(client, question, tenant="first")[1]["accepted_tokens"]
    other = answer(client, question, tenant="second")[1]["accepted_tokens"]
    nobody = answer(client, question)[1]["accepted_tokens"]
    assert again > MAX_TOKENS / 2
    assert alone == other == nobody < again


def test_a_request_that_is_not_remembered_leaves_nothing(url: str) -> None:
    client, question = client_of(url), QUESTIONS[1]
    first, second = (
        answer(client, question, tenant="third", remember=0)[1]["accepted_tokens"] for _ in range(2)
    )
    assert first == second < MAX_TOKENS / 2


def test_requests_at_once_get_their_own_texts(url: str, plain: Plain) -> None:
    async def ask_all() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=300) as client:
            replies = await asyncio.gather(
                *(
                    client.chat.completions.create(
                        model=MODEL,
                        messages=[{"role": "user", "content": question}],
                        temperature=0,
                        max_tokens=MAX_TOKENS,
                        extra_body={"vllm_xargs": {"tenant": f"at-once-{i}"}},
                    )
                    for i, question in enumerate(QUESTIONS * 2)
                )
            )
        return [reply.choices[0].message.content or "" for reply in replies]

    assert asyncio.run(ask_all()) == plain.texts * 2


def test_a_streamed_leg_of_the_gate_has_text_and_figures(url: str, plain: Plain) -> None:
    async def leg() -> Leg:
        request = {
            "model": MODEL,
            "messages": [{"role": "user", "content": QUESTIONS[0]}],
            "temperature": 0,
            "max_tokens": MAX_TOKENS,
        }
        upstream = Upstream(name="vllm", url=url, counts_chunks=True)
        async with http_session() as session:
            return await run_leg(session, upstream, "/v1/chat/completions", request)

    found = asyncio.run(leg())
    assert (found.ok, found.text) == (True, plain.texts[0])
    assert found.completion_tokens is not None
    assert found.draft_tokens
    assert found.accepted_tokens == sum(i * n for i, n in enumerate(found.acceptance_histogram)) > 0
    assert 0 < len(found.chunk_s) < found.completion_tokens  # accepted tokens come together
    assert max(found.chunk_tokens) > 1


def test_through_the_gate_the_tenant_is_the_clients_key(url: str, plain: Plain, tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    alice, bob = (api_keys.add(keys, name, {}) for name in ("alice", "bob"))
    upstream = {"name": "vllm", "url": url, "send_tenant": True}
    config = {"upstreams": [upstream], "routes": [{"name": "all", "upstreams": {"vllm": 1}}]}
    with gate(tmp_path, config, keys=str(keys)) as running:
        asked = ((alice, "bob"), (alice, "bob"), (bob, "alice"))
        answers = [answer(client_of(running.url, key), QUESTIONS[1], tenant=claims) for key, claims in asked]
    assert {text for text, _ in answers} == {plain.texts[1]}
    first, again, other = (figures["accepted_tokens"] for _, figures in answers)
    assert first == other < again


def test_a_server_writes_answers_to_train_on(plain: Plain, smollm2_path: Path) -> None:
    tokenizer = Tokenizer.load(smollm2_path)
    texts = [tokenizer.decode(ids, skip_special=True) for ids in plain.answers]
    assert texts[::2] == plain.texts
    assert plain.answers == plain.again  # by their seeds
    assert texts[1::2] != plain.texts
    assert all(len(ids) <= MAX_TOKENS for ids in plain.answers)


def test_a_server_with_drafts_writes_the_same_answers(url: str, plain: Plain, smollm2_path: Path) -> None:
    """Greedy ones: vLLM 0.32 reads temperatures wrongly where it speculates on a CPU, with any drafter."""
    greedy = [plan for plan in plain.planned if not plan.sampled]
    answers = server_answers(url, Tokenizer.load(smollm2_path), greedy, ROLLOUT)
    assert answers == plain.answers[::2]
