import inspect
from collections.abc import Sequence

import pytest

from paceline.config import EngineConfig
from paceline.drafters import model_free
from paceline.engine.control import Fixed
from paceline.engine.engine import Engine
from paceline.errors import PromptTooLong, SettingError
from paceline.testing import ToyTarget
from paceline.types import Ask, Draft, Drafter, Finish, Round, SamplingParams, Seq, SpecConfig


class Heard:
    def __init__(self) -> None:
        self.rounds: list[Round] = []
        self.ends: list[tuple[str, Finish]] = []

    def round(self, r: Round) -> None:
        self.rounds.append(r)

    def finish(self, seq: Seq, reason: Finish) -> None:
        self.ends.append((seq.id, reason))


def engine(target: ToyTarget | None = None, **options: object) -> Engine:
    return Engine(target or ToyTarget(), model_free(), Fixed(), **options)  # type: ignore[arg-type]


def a_seq(name: str = "a", prompt: int = 3, spec: SpecConfig | None = None, max_tokens: int = 10) -> Seq:
    return Seq(name, [1] * prompt, prompt, SamplingParams(max_tokens=max_tokens), spec or SpecConfig())


def test_step_fits_on_one_screen() -> None:
    assert len(inspect.getsource(Engine.step).splitlines()) <= 40


def test_prompt_that_does_not_fit_is_refused() -> None:
    target = ToyTarget()
    target.max_context = 8
    with pytest.raises(PromptTooLong, match=r"8 tokens.*holds 8"):
        engine(target).submit(a_seq(prompt=8))


def test_output_ends_where_the_context_does() -> None:
    target = ToyTarget()
    target.max_context = 8
    e = engine(target)
    seq = a_seq(prompt=3, max_tokens=100)
    e.submit(seq)
    while e.busy:
        last = e.step()
    assert len(seq.tokens) == 8
    assert last[0].finish == "length"


def test_unknown_drafter_is_an_error_that_lists_the_known() -> None:
    with pytest.raises(SettingError, match=r"'sufix'.*ngram.*suffix"):
        engine().submit(a_seq(spec=SpecConfig(("sufix",))))


def test_prompt_is_computed_in_pieces_beside_decoding() -> None:
    heard = Heard()
    target = ToyTarget()
    e = engine(target, sinks=[heard], config=EngineConfig(prefill_chunk=4))
    e.submit(a_seq("short", 2, max_tokens=6))
    e.submit(a_seq("long", 11, max_tokens=2))
    while e.busy:
        e.step()
    long = [r.tokens for r in heard.rounds if r.request == "long"]
    assert [len(t) > 0 for t in long[:3]] == [False, False, True]
    assert heard.rounds[0].batch == 2
    assert dict(heard.ends) == {"short": "length", "long": "length"}


def test_more_sequences_than_fit_wait() -> None:
    e = engine(config=EngineConfig(max_batch=2))
    seqs = [a_seq(f"s{i}", 2 + i, max_tokens=3) for i in range(5)]
    for s in seqs:
        e.submit(s)
    assert len(e.step()) == 2
    while e.busy:
        e.step()
    assert [len(s.output) for s in seqs] == [3] * 5


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_cancel_frees_the_sequence(steps: int) -> None:
    heard = Heard()
    target = ToyTarget()
    e = engine(target, sinks=[heard])
    e.submit(a_seq("a"))
    e.submit(a_seq("b"))
    for _ in range(steps):
        e.step()
    e.cancel("a")
    e.cancel("nobody")
    assert heard.ends == [("a", "cancelled")]
    while e.busy:
        e.step()
    assert not target._rows


def test_rounds_tell_who_guessed_what() -> None:
    heard = Heard()
    e = engine(sinks=[heard])
    seq = a_seq(max_tokens=60, spec=SpecConfig(("ngram",), adaptive=False))
    e.submit(seq)
    while e.busy:
        e.step()
    assert [t for r in heard.rounds for t in r.tokens] == seq.output
    sources = [s for r in heard.rounds for s in r.sources]
    assert len(sources) == len(seq.output)
    assert {"ngram", "target"} == set(sources)


def test_guesses_the_target_does_not_have_are_cut_off() -> None:
    class Beyond(Drafter):
        name = "beyond"

        def draft(self, asks: Sequence[Ask]) -> list[Draft]:
            return [Draft((1, 999, 2), None, ("beyond",) * 3)]

    heard = Heard()
    e = Engine(ToyTarget(), {"beyond": Beyond()}, Fixed(), [heard])
    e.submit(a_seq(spec=SpecConfig(("beyond",))))
    while e.busy:
        e.step()
    assert {len(r.draft) for r in heard.rounds} == {0, 1}
