"""Random schemas, a random model over a real vocabulary, wild guesses: the same text, and valid."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.config import SamplingParams, SpecConfig
from paceline.constraints import Compiler, Json
from paceline.drafters import model_free
from paceline.engine.control import Fixed
from paceline.engine.engine import Engine
from paceline.sampling import Doubles
from paceline.testing import ToyTarget
from paceline.text import Tokenizer
from paceline.types import ROOT, Ask, Draft, Drafter, Round, Seq
from support import examples

pytestmark = pytest.mark.model
PLAIN = SpecConfig(("none",), max_draft=0)

leaves = st.one_of(
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.builds(
        lambda low, n: {"type": "integer", "minimum": low, "maximum": low + n},
        st.integers(-99, 99),
        st.integers(0, 9),
    ),
    st.builds(lambda n: {"type": "string", "maxLength": n}, st.integers(0, 8)),
    st.builds(
        lambda p: {"type": "string", "pattern": p}, st.sampled_from(["^[a-f]{2,4}$", "^(yes|no)$", "^\\d+$"])
    ),
    st.builds(
        lambda e: {"enum": e},
        st.lists(st.sampled_from(["a", "ab", "é", 1, -2.5, True, None]), min_size=1, max_size=4),
    ),
)


def nested(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    def an_object(names: dict[str, Any], some: list[bool]) -> dict[str, Any]:
        needed = [name for name, must in zip(names, some, strict=False) if must]
        return {"type": "object", "properties": names, "required": needed, "additionalProperties": False}

    return st.one_of(
        st.builds(
            an_object,
            st.dictionaries(st.sampled_from(["a", "name", "Ünit", "is_it", "x y"]), inner, max_size=3),
            st.lists(st.booleans(), min_size=3, max_size=3),
        ),
        st.builds(lambda i, n: {"type": "array", "items": i, "maxItems": n}, inner, st.integers(0, 3)),
        st.builds(lambda parts: {"anyOf": parts}, st.lists(inner, min_size=1, max_size=3)),
    )


schemas = nested(st.one_of(leaves, nested(st.one_of(leaves, nested(leaves)))))


class Babbler(ToyTarget):
    """Random logits over a real vocabulary, with a liking for what brings a text to its end."""

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        super().__init__(tokenizer.vocab_size, seed=seed)
        self._liked = [
            t
            for mark in ('"', "]", "}", '"}', '"]', ",", '",')
            for t in tokenizer.encode(mark, special=False)
        ]
        self._liked += sorted(tokenizer.eos_ids)

    def logits(self, text: Sequence[int]) -> Doubles:
        rows = np.random.default_rng([self._seed, *text[-2:]]).standard_normal(self.vocab_size)
        rows[self._liked] += 4
        return np.asarray(rows)


class Wild(Drafter):
    """Trees of random tokens, of tokens that came before, and of what the grammar spells."""

    name = "wild"

    def __init__(self, vocab: int, seed: int) -> None:
        self._vocab = vocab
        self._rng = np.random.default_rng(seed)

    def draft(self, asks: Sequence[Ask]) -> list[Draft]:
        return [self._one(ask) for ask in asks]

    def _one(self, ask: Ask) -> Draft:
        n = int(self._rng.integers(0, ask.budget + 1))
        spelled = [] if ask.cursor is None else [*ask.cursor.forced(), *ask.cursor.canonical()]
        known = [*ask.seq.tokens, *spelled]
        tokens = tuple(
            int(self._rng.choice(known)) if self._rng.random() < 0.8 else int(self._rng.integers(self._vocab))
            for _ in range(n)
        )
        wide = ask.seq.spec.tree_width > 1
        parents = tuple(int(self._rng.integers(ROOT, i)) if i else ROOT for i in range(n)) if wide else None
        return Draft(tokens, parents, (self.name,) * n)


@pytest.fixture(scope="module")
def tokenizer(smollm2_path: Path) -> Tokenizer:
    return Tokenizer.load(smollm2_path)


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> Compiler:
    return Compiler(tokenizer, tokenizer.vocab_size)


@settings(max_examples=examples(40), suppress_health_check=list(HealthCheck))
@given(
    schema=schemas,
    seed=st.integers(0, 999),
    temperature=st.sampled_from([0.0, 0.8]),
    width=st.sampled_from([1, 3]),
    drafters=st.sampled_from([("wild",), ("grammar",), ("grammar", "wild"), ("grammar", "suffix", "ngram")]),
)
def test_drafts_change_nothing_and_finished_texts_are_valid(
    tokenizer: Tokenizer,
    compiler: Compiler,
    schema: Any,
    seed: int,
    temperature: float,
    width: int,
    drafters: tuple[str, ...],
) -> None:
    params = SamplingParams(temperature=temperature, seed=seed, max_tokens=48)

    def written(spec: SpecConfig) -> tuple[list[int], Round]:
        made = {**model_free(), "wild": Wild(tokenizer.vocab_size, seed)}
        engine = Engine(Babbler(tokenizer, seed), made, Fixed(), eos=tokenizer.eos_ids)
        seq = Seq("s", [1, 2, 3], 3, params, spec, cursor=compiler.cursor(Json.of(schema)))
        engine.submit(seq)
        while engine.busy:
            last = engine.step()
        return seq.output, last[-1]

    plain, end = written(PLAIN)
    fast, also = written(SpecConfig(drafters, max_draft=6, tree_width=width, adaptive=False))
    assert fast == plain
    assert also.finish == end.finish
    assert end.finish in ("stop", "length")
    if end.finish == "stop":
        text = tokenizer.decode([token for token in plain if token not in tokenizer.eos_ids])
        jsonschema.validate(json.loads(text), schema)
