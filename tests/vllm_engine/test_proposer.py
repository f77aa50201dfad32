"""The proposer against a stand-in for vLLM's runner, which has the fields that are read and nothing else."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from paceline.advise.replay import replay
from paceline.drafters.drafter_list import DrafterList
from paceline.drafters.ngram import Ngram
from paceline.drafters.suffix import Suffix
from paceline.errors import PacelineError, SettingError, UsageError
from paceline.vllm.proposer import Proposer, ProposerSettings

MAX_LEN, ROWS, K = 256, 4, 6
TEXT = [7, 3, 9, 4, 1, 8, 2, 6, 5, 11, 14, 12, 13, 19, 17, 15, 16, 18, 21, 20]


class Runner:
    """Persistent rows as in vLLM: a request keeps its row until another ends and the last one moves there."""

    def __init__(self, max_draft: int = K, **settings: Any) -> None:
        spec = SimpleNamespace(num_speculative_tokens=max_draft)
        model = SimpleNamespace(max_model_len=MAX_LEN)
        config = SimpleNamespace(
            speculative_config=spec, model_config=model, additional_config={"paceline": settings}
        )
        self.requests: dict[str, Any] = {}
        self.input_batch = SimpleNamespace(req_ids=[], num_prompt_tokens=np.zeros(ROWS, np.int32))
        self.ids, self.lengths = np.zeros((ROWS, MAX_LEN), np.int32), np.zeros(ROWS, np.int32)
        self.drafter = Proposer(config)
        self.drafter.load_model(object())

    def add(self, request: str, prompt: list[int], **extra: Any) -> None:
        row = len(self.input_batch.req_ids)
        self.input_batch.req_ids.append(request)
        self.requests[request] = SimpleNamespace(sampling_params=SimpleNamespace(extra_args=extra or None))
        self.input_batch.num_prompt_tokens[row] = self.lengths[row] = len(prompt)
        self.ids[row, : len(prompt)] = prompt

    def remove(self, request: str) -> None:
        row, last = self.input_batch.req_ids.index(request), len(self.input_batch.req_ids) - 1
        del self.requests[request]
        for rows in (self.ids, self.lengths, self.input_batch.num_prompt_tokens):
            rows[row] = rows[last]
        self.input_batch.req_ids[row] = self.input_batch.req_ids[last]
        self.input_batch.req_ids.pop()

    def step(self, **new: list[int]) -> dict[str, list[int]]:
        """New tokens of each request; its draft after them."""
        sampled = [new.get(request, []) for request in self.input_batch.req_ids]
        for row, tokens in enumerate(sampled):
            start = self.lengths[row]
            self.ids[row, start : start + len(tokens)] = tokens
            self.lengths[row] = start + len(tokens)
        drafts = self.drafter.propose(sampled, self.lengths, self.ids, slot_mappings=None)
        return dict(zip(self.input_batch.req_ids, drafts, strict=True))

    def answer(self, request: str, output: list[int]) -> tuple[int, int]:
        """Writes an output with its drafts, as a greedy target would; passes and accepted tokens."""
        written, passes, accepted = 1, 1, 0
        draft = self.step(**{request: output[:1]})[request]
        while written < len(output):
            rest = output[written:]
            right = next((i for i, (a, b) in enumerate(zip(draft, rest, strict=False)) if a != b), len(draft))
            right = min(right, len(rest) - 1)
            draft = self.step(**{request: rest[: right + 1]})[request]
            written, passes, accepted = written + right + 1, passes + 1, accepted + right
        return passes, accepted


def test_a_request_drafts_from_its_own_text() -> None:
    runner = Runner()
    runner.add("a", [*TEXT, 40])
    assert runner.step(a=TEXT[:3]) == {"a": TEXT[3:9]}


def test_it_drafts_as_the_same_drafters_do_outside_vllm() -> None:
    prompt, output = [*TEXT, 50, *TEXT[5:15]], [*TEXT[2:9], 51, *TEXT[12:18], 52, 53, *TEXT[2:9], 51]
    stats = replay(DrafterList([Suffix(), Ngram()]), [*prompt, output[0]], output[1:], K)
    runner = Runner()
    runner.add("a", prompt)
    passes, accepted = runner.answer("a", output)
    assert (passes - 1, accepted) == (stats.passes, stats.accepted)
    assert accepted > len(output) / 2


def test_later_requests_of_a_tenant_draft_from_earlier_ones() -> None:
    runner = Runner()
    runner.add("a", [1, 2], tenant="acme")
    runner.step(a=TEXT)
    runner.remove("a")
    runner.add("b", [3, 4], tenant="acme")
    assert runner.step(b=TEXT[:6]) == {"b": TEXT[6:12]}


def test_no_tenant_drafts_from_another() -> None:
    runner = Runner()
    runner.add("a", [1, 2], tenant="acme")
    runner.step(a=TEXT)
    runner.remove("a")
    runner.add("b", [3, 4], tenant="other")
    runner.add("c", [3, 4])
    assert runner.step(b=TEXT[:6], c=TEXT[:6]) == {"b": [], "c": []}


@pytest.mark.parametrize("extra", [{}, {"tenant": "acme", "remember": 0}])
def test_requests_without_a_tenant_or_not_to_be_remembered_leave_nothing(extra: dict[str, Any]) -> None:
    runner = Runner()
    runner.add("a", [1, 2], **extra)
    runner.step(a=TEXT)
    runner.remove("a")
    runner.add("b", [3, 4], tenant="acme")
    runner.add("c", [3, 4])
    assert runner.step(b=TEXT[:6], c=TEXT[:6]) == {"b": [], "c": []}


def test_requests_without_a_tenant_displace_no_memory() -> None:
    runner = Runner(max_tokens=40)
    runner.add("a", [1, 2], tenant="acme")
    runner.step(a=TEXT)
    runner.remove("a")
    for i in range(3):
        runner.add(f"b{i}", list(range(100, 120)))
        runner.step(**{f"b{i}": [5]})
        runner.remove(f"b{i}")
    runner.add("c", [3, 4], tenant="acme")
    assert runner.step(c=TEXT[:6]) == {"c": TEXT[6:12]}


def test_a_default_tenant_is_that_of_all_who_name_none() -> None:
    runner = Runner(default_tenant="all")
    runner.add("a", [1, 2])
    runner.step(a=TEXT)
    runner.remove("a")
    runner.add("b", [3, 4])
    assert runner.step(b=TEXT[:6]) == {"b": TEXT[6:12]}


def test_requests_keep_their_text_when_rows_move() -> None:
    runner = Runner()
    runner.add("a", [1, 2])
    runner.add("b", TEXT)
    runner.step(a=[3], b=[30])
    runner.remove("a")  # b moves to the first row
    assert runner.step(b=TEXT[:3])["b"] == TEXT[3:9]


def test_nothing_is_drafted_while_a_prompt_is_read() -> None:
    runner = Runner()
    runner.add("a", TEXT)
    runner.add("b", [*TEXT, *TEXT[:3]])
    assert runner.step(a=TEXT[:3]) == {"a": TEXT[3:9], "b": []}


def test_a_draft_ends_before_the_longest_context() -> None:
    runner = Runner()
    runner.add("a", [*TEXT, *range(30, 30 + MAX_LEN - len(TEXT) - 6)])
    assert runner.step(a=TEXT[:3]) == {"a": TEXT[3:5]}  # room for two and one more
    assert runner.step(a=TEXT[3:6]) == {"a": []}


def test_a_large_batch_is_not_drafted_for() -> None:
    runner = Runner(max_batch=1)
    runner.add("a", TEXT)
    assert runner.step(a=TEXT[:3])["a"]
    runner.add("b", TEXT)
    assert runner.step(a=TEXT[3:6], b=TEXT[:3]) == {"a": [], "b": []}
    runner.remove("b")
    assert runner.step(a=TEXT[6:8])["a"] == TEXT[8:14]


def test_a_draft_that_begins_unsurely_is_not_made() -> None:
    default, sure = Runner(), Runner(min_first_chance=0.6)
    for runner in (default, sure):
        runner.add("a", [*TEXT, 40])
    assert default.step(a=TEXT[:1]) == {"a": TEXT[1:3]}  # one matching token
    assert sure.step(a=TEXT[:1]) == {"a": []}
    assert sure.step(a=TEXT[1:5]) == {"a": TEXT[5:11]}  # five


@pytest.mark.parametrize("drafters", [["ngram"], ["suffix"]])
def test_a_draft_ends_where_it_becomes_unlikely_whoever_made_it(drafters: list[str]) -> None:
    short, long = Runner(min_chance=0.4, drafters=drafters), Runner(min_chance=0.0, drafters=drafters)
    for runner in (short, long):
        runner.add("a", [*TEXT, 40])
    all_of_it, likely = long.step(a=TEXT[:3])["a"], short.step(a=TEXT[:3])["a"]
    assert all_of_it == TEXT[3:9]
    assert 0 < len(likely) < len(all_of_it)
    assert likely == all_of_it[: len(likely)]


def test_unknown_settings_name_the_known_ones() -> None:
    with pytest.raises(UsageError, match="default_tenant"):
        Runner(default_tennant="x")
    with pytest.raises(SettingError, match="some of suffix, ngram"):
        ProposerSettings(drafters=("grammar",))


def test_a_runner_without_request_ids_is_an_error_at_the_start() -> None:
    runner = Runner()

    class OtherRunner:
        def load_model(self) -> None:
            runner.drafter.load_model(object())

    with pytest.raises(PacelineError, match="OtherRunner has no `input_batch`"):
        OtherRunner().load_model()
