"""paceline's drafters inside vLLM, by its speculative method `custom_class`.

vLLM verifies the drafts with its own rejection sampler, so its text stays its own. It gives a custom class
the tokens of each row of the batch and nothing else: no request ids, sampling parameters, hidden states or
grammars. The runner that loads the class has ids and parameters, and is found at that moment. Drafters that
need a model or a grammar cannot run here.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate
from operator import mul
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from paceline.config import SpecConfig, freeze, require, require_between, require_min, settings
from paceline.drafters.drafter_list import DrafterList
from paceline.drafters.ngram import Ngram
from paceline.drafters.suffix import Suffix, SuffixSettings
from paceline.errors import PacelineError
from paceline.types import Ask, Draft, Drafter, Seq

CLASS: Final = "paceline.vllm.proposer.Proposer"  # the `model` of `custom_class`
KEY: Final = "paceline"  # of the settings in --additional-config
TENANT: Final = "tenant"  # in a request's vllm_xargs
REMEMBER: Final = "remember"  # in a request's vllm_xargs
DRAFTERS: Final = ("suffix", "ngram")


@dataclass(frozen=True, slots=True)
class ProposerSettings:
    """Of `--additional-config '{"paceline": {...}}'`."""

    drafters: tuple[str, ...] = DRAFTERS  # the first with a draft wins
    # Of requests that name no tenant; "": such a request drafts from its own text alone.
    default_tenant: str = ""
    max_batch: int = 64  # sequences in a pass, beyond which nothing is drafted
    max_tokens: int = 1_000_000  # remembered, of all tenants together; the oldest go first
    min_chance: float = 0.1  # a token less likely than this to be accepted is not drafted
    min_first_chance: float = 0.0  # a draft whose first token is less likely than this is not made

    def __post_init__(self) -> None:
        freeze(self, "drafters")
        expected = f"some of {', '.join(DRAFTERS)}: vLLM gives drafters neither a grammar nor hidden states"
        require(lambda names: names and set(names) <= set(DRAFTERS), "drafters", self.drafters, expected)
        require_min(self, max_batch=1, max_tokens=1)
        require_between(self, 0, 1, "min_chance", "min_first_chance")

    def changed(self) -> dict[str, Any]:
        """The values that are not defaults."""
        given = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: value for name, value in given.items() if value != getattr(ProposerSettings(), name)}


class _InputBatch(Protocol):
    """The part of vLLM's `InputBatch` that is read here."""

    req_ids: Sequence[str | None]
    num_prompt_tokens: NDArray[np.int32]


class _Runner(Protocol):
    """The part of vLLM's model runner that is read here."""

    input_batch: _InputBatch
    requests: Mapping[str, Any]  # by id; gone once a request has ended


class Proposer:
    """Suffix decoding and prompt lookup, with a memory for each tenant that its later requests draft from."""

    def __init__(self, vllm_config: Any) -> None:
        spec, extra = vllm_config.speculative_config, vllm_config.additional_config
        given = extra.get(KEY, {}) if isinstance(extra, Mapping) else {}
        self.settings = settings(ProposerSettings, given)
        self.max_draft: int = spec.num_speculative_tokens
        self.max_model_len: int = vllm_config.model_config.max_model_len
        self._drafter = DrafterList([_drafter(name, self.settings) for name in self.settings.drafters])
        self._spec = SpecConfig(self.settings.drafters, max_draft=self.max_draft)
        self._seqs: dict[str, Seq] = {}
        self._runner: _Runner | None = None

    def load_model(self, target_model: object) -> None:
        """vLLM's runner calls this once, when its model is loaded."""
        runner = sys._getframe(1).f_locals.get("self")
        if not (hasattr(runner, "input_batch") and hasattr(runner, "requests")):
            raise PacelineError(
                f"{type(runner).__name__} has no `input_batch` and `requests`, by which requests are told "
                "apart: expected the V1 model runner of vLLM 0.26 to 0.32"
            )
        self._runner = runner

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: NDArray[np.int32],
        token_ids_cpu: NDArray[np.int32],
        slot_mappings: object = None,
    ) -> list[list[int]]:
        """A draft for each row of the batch; none while its prompt is read.

        sampled_token_ids: of each row, its new tokens. num_tokens_no_spec: [rows]. token_ids_cpu:
        [rows, max_model_len].
        """
        assert self._runner is not None, "vLLM did not call load_model"
        self._end_finished()
        drafts: list[list[int]] = [[] for _ in sampled_token_ids]
        rows, asks = [], []
        for row, new in enumerate(sampled_token_ids):
            if new:
                length = int(num_tokens_no_spec[row])
                seq = self._seq(row, token_ids_cpu[row, :length])
                rows.append(row)
                asks.append(Ask(seq, max(0, min(self.max_draft, self.max_model_len - length - 1))))
        if 0 < len(asks) <= self.settings.max_batch:
            for row, draft in zip(rows, self._drafter.draft(asks), strict=True):
                drafts[row] = self._likely(draft)
        return drafts

    def _likely(self, draft: Draft) -> list[int]:
        """Its tokens up to the first that is not likely enough, by the drafter's own estimates."""
        path = list(accumulate(draft.scores, mul))  # P(this token and all before it are accepted)
        if path and path[0] < self.settings.min_first_chance:
            return []
        return [
            token
            for token, chance in zip(draft.tokens, path, strict=True)
            if chance >= self.settings.min_chance
        ]

    def _seq(self, row: int, tokens: NDArray[np.int32]) -> Seq:
        """The sequence of a row, with its new tokens; rows change places as requests come and go."""
        assert self._runner is not None
        batch = self._runner.input_batch
        request_id = batch.req_ids[row]
        assert request_id is not None
        seq = self._seqs.get(request_id)
        if seq is None:
            tenant, remember = self._tenant(request_id)
            seq = self._seqs[request_id] = Seq(
                request_id,
                tokens.tolist(),
                int(batch.num_prompt_tokens[row]),
                spec=self._spec,
                tenant=tenant or request_id,
                anonymous=not tenant,
                remember=remember,
            )
            self._drafter.begin(seq)
        else:
            seq.tokens.extend(tokens[len(seq.tokens) :].tolist())
        return seq

    def _tenant(self, request_id: str) -> tuple[str, bool]:
        """The tenant of a request, and whether the request is remembered for it."""
        assert self._runner is not None
        params = getattr(self._runner.requests.get(request_id), "sampling_params", None)
        given: Mapping[str, Any] = getattr(params, "extra_args", None) or {}
        return str(given.get(TENANT) or self.settings.default_tenant), bool(given.get(REMEMBER, True))

    def _end_finished(self) -> None:
        assert self._runner is not None
        ended = [request_id for request_id in self._seqs if request_id not in self._runner.requests]
        for request_id in ended:
            self._drafter.end(self._seqs.pop(request_id))


def _drafter(name: str, given: ProposerSettings) -> Drafter:
    if name == "ngram":
        return Ngram()
    return Suffix(SuffixSettings(max_tokens=given.max_tokens, min_chance=given.min_chance))
