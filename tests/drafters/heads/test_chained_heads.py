"""Medusa and eagle in service: the text is the target's own, and the drafts are what the nets learned."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from paceline.config import Accept, SamplingParams, SpecConfig
from paceline.constraints.draft_masks import Masks
from paceline.drafters.heads import tree_growth as grow_module
from paceline.drafters.heads.eagle import EagleDrafter
from paceline.drafters.heads.medusa import MedusaDrafter
from paceline.drafters.heads.tree_growth import Position
from paceline.drafters.none import NoDrafter
from paceline.drafters.support.grammar_filter import FORCED
from paceline.engine import engine as engine_module
from paceline.engine import verify
from paceline.engine.control import Fixed
from paceline.engine.engine import Engine
from paceline.heads.eagle import EagleHead
from paceline.heads.medusa import MedusaHead
from paceline.sampling import CHOICE, Floats, History, choose, distribution, noise_key
from paceline.testing import ToyCursor
from paceline.train.losses.eagle import eagle_loss, unrolled
from paceline.train.losses.medusa import medusa_loss
from paceline.types import ROOT, Ask, Draft, Drafter, HiddenRows, Round, Seq, Verdict
from support.engines import PLAIN, Rules, accepted, outputs_of, torch_target
from support.heads import MODEL, eagle_net, every_position, medusa_net, target_text, tiny_weights, train_batch
from support.models import VOCAB

pytestmark = pytest.mark.slow

LENGTH = 30
TAPS = (0, 2, 4)


def learn(parameters: Sequence[Tensor], loss: Callable[[], Tensor], steps: int) -> None:
    optimizer = torch.optim.Adam(parameters, 0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        loss().backward()  # type: ignore[no-untyped-call]
        optimizer.step()


@pytest.fixture(scope="module")
def medusa() -> MedusaHead:
    net, batch = medusa_net(), train_batch((4,), 16)
    learn(list(net.parameters()), lambda: medusa_loss(net, batch)[0], 60)
    return net


@pytest.fixture(scope="module")
def eagle() -> EagleHead:
    net, batch = eagle_net(), train_batch(TAPS, 16)
    drawn = torch.Generator().manual_seed(0)
    learn(list(net.parameters()), lambda: eagle_loss(net, batch, MODEL.head, drawn)[0], 30)
    return net


@pytest.fixture(params=["medusa", "eagle"])
def drafter(request: pytest.FixtureRequest) -> Drafter:
    net = request.getfixturevalue(request.param)
    return MedusaDrafter(net) if request.param == "medusa" else EagleDrafter(net)


def run(
    spec: SpecConfig,
    params: SamplingParams,
    drafters: Sequence[Drafter] = (),
    batch: int = 1,
    rules: Rules | None = None,
) -> tuple[list[list[int]], list[Round]]:
    prompts = [target_text()[i, : 3 + 2 * i].tolist() for i in range(batch)]
    return outputs_of(torch_target(tiny_weights()), drafters, prompts, params, spec, rules)


def spec_of(drafter: Drafter, width: int = 1, accept: Accept = "match", budget: int = 4) -> SpecConfig:
    return SpecConfig((drafter.name,), budget, width, adaptive=False, accept=accept)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(("batch", "width"), [(1, 1), (3, 1), (1, 3), (3, 2)])
def test_text_equals_plain_decoding(drafter: Drafter, temperature: float, batch: int, width: int) -> None:
    params = SamplingParams(temperature=temperature, seed=6, max_tokens=LENGTH)
    plain, _ = run(PLAIN, params, batch=batch)
    fast, rounds = run(spec_of(drafter, width, budget=3 * width), params, [drafter], batch)
    assert fast == plain
    assert accepted(rounds) > batch
    assert any(r.draft.parents is not None for r in rounds) == (width > 1)


def test_options_reach_the_drafts(drafter: Drafter) -> None:
    params = SamplingParams(
        temperature=0.9, top_k=20, repetition_penalty=1.3, logit_bias=((3, 2.0),), seed=5, max_tokens=LENGTH
    )
    plain, _ = run(PLAIN, params, batch=2)
    assert run(spec_of(drafter), params, [drafter], 2)[0] == plain


@pytest.mark.parametrize("accept", ["residual", "block"])
def test_residual_rules_equal_plain_decoding_at_temperature_zero(drafter: Drafter, accept: Accept) -> None:
    params = SamplingParams(seed=3, max_tokens=LENGTH)
    fast, rounds = run(spec_of(drafter, accept=accept), params, [drafter], 2)
    assert fast == run(PLAIN, params, batch=2)[0]
    assert accepted(rounds) > 4


def test_a_row_too_late_is_caught(drafter: Drafter, monkeypatch: pytest.MonkeyPatch) -> None:
    """That the texts are equal is a test that can fail."""

    def late(seq: Seq, draft: Draft, rows: Floats, masks: Masks) -> Verdict:
        return verify.verify(seq, draft, np.concatenate([rows[:1], rows[: len(draft)]]), masks)

    params = SamplingParams(seed=3, max_tokens=LENGTH)
    plain, _ = run(PLAIN, params)
    monkeypatch.setattr(engine_module, "verify", late)
    assert run(spec_of(drafter), params, [drafter])[0] != plain


def home(drafter: Drafter) -> float:
    """Tokens in each pass on text like that it was taught."""
    out, rounds = run(spec_of(drafter), SamplingParams(max_tokens=LENGTH), [drafter], 3)
    return sum(map(len, out)) / len(rounds)


def shuffled(tensors: Sequence[Tensor]) -> None:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for tensor in tensors:
            tensor.copy_(
                tensor.flatten()[torch.randperm(tensor.numel(), generator=generator)].view(tensor.shape)
            )


def test_floor_on_home_ground(medusa: MedusaHead, eagle: EagleHead) -> None:
    other_medusa, other_eagle = medusa_net(), eagle_net()
    other_medusa.load_state_dict(medusa.state_dict())
    other_eagle.load_state_dict(eagle.state_dict())
    shuffled(list(other_medusa.parameters()))
    shuffled(list(other_eagle.parameters()))
    assert home(MedusaDrafter(medusa)) > 1.7
    assert (
        home(MedusaDrafter(other_medusa)) < 1.4
    )  # the target repeats itself, as do heads that learnt nothing
    assert home(EagleDrafter(eagle)) > 2.2
    assert home(EagleDrafter(other_eagle)) < 1.3


def a_text(drafter: Drafter, seq: Seq) -> None:
    """Shows the drafter what the target makes of all but the last token."""
    hidden, _ = MODEL.features(torch.tensor([seq.tokens[:-1]]), drafter.taps)
    drafter.begin(seq)
    for first, stop in ((0, 7), (7, len(seq.tokens) - 1)):
        part = {tap: rows[0, first:stop] for tap, rows in hidden.items()}
        drafter.on_hidden([HiddenRows(seq, first, part)])


def a_seq(width: int = 1, accept: Accept = "match", temperature: float = 0.8, length: int = 20) -> Seq:
    tokens = target_text()[0, :length].tolist()
    spec = SpecConfig(("x",), 8, width, accept=accept)
    return Seq("a", tokens, 3, SamplingParams(temperature=temperature, seed=1), spec)


def test_eagle_is_used_as_it_was_taught(eagle: EagleHead) -> None:
    """Along the true text, each guess's logits are those of the training step; window and chunks included."""
    batch = train_batch(TAPS, 1)
    net = eagle_net(window=9)
    net.load_state_dict(eagle.state_dict())
    with torch.no_grad():
        steps = [net.logits(hidden)[0, 18] for hidden in unrolled(net, batch, every_position(batch), 4)]
    drafter, seq = EagleDrafter(net), a_seq()
    a_text(drafter, seq)
    after = tuple(batch.tokens[0, 20:23].tolist())
    positions = [Position(Ask(seq, 4), after[:n], None) for n in (3, 0, 1, 2)]
    with torch.inference_mode():
        found = drafter._logits_at(positions)
    for n, (row, _) in zip((3, 0, 1, 2), found, strict=True):
        assert row is not None
        assert torch.allclose(torch.from_numpy(row[net.draft_ids]), steps[n], atol=1e-4)


def test_medusa_is_used_as_it_was_taught(medusa: MedusaHead) -> None:
    batch = train_batch((4,), 1)
    drafter, seq = MedusaDrafter(medusa), a_seq(temperature=0.0)
    a_text(drafter, seq)
    (draft,) = drafter.draft([Ask(seq, 9)])
    with torch.no_grad():
        wanted = medusa(batch.hidden[4])[0, 18].argmax(-1)
    assert draft.tokens == tuple(medusa.draft_ids[wanted].tolist())
    assert draft.parents is None


def test_a_tree_is_the_best_of_all_and_needs_few_passes(
    eagle: EagleHead, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter, seq = EagleDrafter(eagle), a_seq(width=3)
    a_text(drafter, seq)
    passes: list[int] = []
    step = EagleDrafter._step

    def counted(self: EagleDrafter, new: Sequence[tuple[Seq, tuple[int, ...]]], depth: int) -> None:
        passes.append(len(new))
        step(self, new, depth)

    monkeypatch.setattr(EagleDrafter, "_step", counted)
    (draft,) = drafter.draft([Ask(seq, 16)])
    assert len(draft) == 16
    quick = len(passes)
    drafter._paths["a"].nodes.clear()
    monkeypatch.setattr(grow_module, "PREFETCH_WIDTH", 1)
    (one_by_one,) = drafter.draft([Ask(seq, 16)])
    assert (one_by_one.tokens, one_by_one.parents) == (draft.tokens, draft.parents)
    assert one_by_one.scores == pytest.approx(draft.scores, rel=1e-4)
    assert quick < len(passes) - quick
    reached = [float(np.prod([draft.scores[i] for i in draft.path(n)])) for n in range(16)]
    assert reached == sorted(reached, reverse=True)
    assert all(len(draft.children(node)) <= 3 for node in range(ROOT, 16))


@pytest.mark.parametrize("width", [1, 3])
def test_texts_of_other_lengths_beside_it_change_nothing(eagle: EagleHead, width: int) -> None:
    drafter, lengths = EagleDrafter(eagle), (12, 24, 9)
    asks = []
    for length in lengths:
        seq = replace(a_seq(width, temperature=0.0, length=length), id=f"of {length}")
        a_text(drafter, seq)
        asks.append(Ask(seq, 6))
    together = drafter.draft(asks)
    for ask, draft in zip(asks, together, strict=True):
        alone = EagleDrafter(eagle)
        a_text(alone, ask.seq)
        (wanted,) = alone.draft([ask])
        assert (draft.tokens, draft.parents) == (wanted.tokens, wanted.parents)
        assert draft.scores == pytest.approx(wanted.scores, rel=1e-4)


def test_paths_of_some_sequences_beside_few_of_others(eagle: EagleHead) -> None:
    """Rows that fill up a pass are nobody's."""
    drafter = EagleDrafter(eagle)
    seqs = [replace(a_seq(length=n), id=f"of {n}") for n in (12, 24)]
    for seq in seqs:
        a_text(drafter, seq)
    (one, other), tails = seqs, [(3,), (5,), (8,)]
    positions = [Position(Ask(other, 4), (7,), None), *(Position(Ask(one, 4), tail, None) for tail in tails)]
    with torch.inference_mode():
        together = [row for row, _ in drafter._logits_at([positions[1], positions[0], *positions[2:]])]
        for position, row in zip([positions[1], positions[0], *positions[2:]], together, strict=True):
            drafter._paths[position.ask.seq.id].nodes.clear()
            ((alone, _),) = drafter._logits_at([position])
            assert row is not None
            assert alone is not None
            assert row == pytest.approx(alone, abs=1e-4)


def test_a_chain_of_the_likeliest_is_what_rows_of_the_whole_vocabulary_give(eagle: EagleHead) -> None:
    drafter, seq = EagleDrafter(eagle), a_seq(temperature=0.0)
    a_text(drafter, seq)
    for after in ((), (4, 9)):
        (quick,) = drafter.draft([Ask(seq, 4, after)])
        (whole,) = drafter.draft([Ask(seq, 4, after, ToyCursor(lambda _: None))])
        assert quick.tokens == whole.tokens
        assert quick.scores == pytest.approx(whole.scores, rel=1e-4)


@pytest.mark.parametrize("accept", ["match", "residual", "block"])
@pytest.mark.parametrize("width", [1, 2])
def test_only_valid_tokens_are_drafted_and_sampled(drafter: Drafter, accept: Accept, width: int) -> None:
    if accept == "block" and width > 1:
        return

    def rules(text: tuple[int, ...]) -> set[int]:
        return {t for t in range(VOCAB) if (t + len(text)) % 3 == 0}

    seq = a_seq(width, accept)
    a_text(drafter, seq)
    cursor = ToyCursor(rules)
    (draft,) = drafter.draft([Ask(seq, 6, (), cursor)])
    assert len(draft) >= 3
    assert cursor.tokens == ()
    for node, score in enumerate(draft.scores):
        text = tuple(draft.tokens[i] for i in draft.path(node))
        assert text[-1] in rules(text[:-1])
        assert 0 <= score < FORCED
        if draft.q is not None:
            assert float(draft.q[node].sum()) == pytest.approx(1)
            assert set(draft.q[node].nonzero().flatten().tolist()) <= rules(text[:-1])
    assert (draft.q is not None) == (accept != "match")


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_drafts_use_the_targets_noise(eagle: EagleHead, temperature: float) -> None:
    drafter, seq = EagleDrafter(eagle), a_seq(temperature=temperature)
    a_text(drafter, seq)
    (draft,) = drafter.draft([Ask(seq, 4)])
    for node, token in enumerate(draft.tokens):
        row, history = drafter._row(Position(Ask(seq, 1), draft.tokens[:node], None)), History(seq.tokens, 3)
        assert row is not None
        key = noise_key(1, 0, CHOICE, len(seq.tokens) - 3 + node)
        assert token == choose(distribution(row, seq.params, history), key)
    assert len(draft) == 4


def test_q_is_the_distribution_of_the_net(eagle: EagleHead) -> None:
    drafter, seq = EagleDrafter(eagle), a_seq(accept="residual")
    a_text(drafter, seq)
    (draft,) = drafter.draft([Ask(seq, 3)])
    assert draft.q is not None
    for node in range(3):
        row = drafter._row(Position(Ask(seq, 1), draft.tokens[:node], None))
        assert row is not None
        want = distribution(row, seq.params, History(seq.tokens, 3, draft.tokens[:node])).probabilities()
        assert draft.q[node].numpy() == pytest.approx(want)


def test_it_continues_the_drafts_of_others(drafter: Drafter) -> None:
    seq = a_seq(temperature=0.0)
    a_text(drafter, seq)
    (whole,) = drafter.draft([Ask(seq, 3)])
    (rest,) = drafter.draft([Ask(seq, 2, whole.tokens[:1])])
    assert rest.tokens == whole.tokens[1:]


def test_a_text_it_has_not_read_gets_no_draft(drafter: Drafter) -> None:
    seq = a_seq()
    drafter.begin(seq)
    assert len(drafter.draft([Ask(seq, 4)])[0]) == 0
    drafter.end(seq)
    a_text(drafter, seq)
    seq.tokens.append(5)  # which nobody has told it of
    assert len(drafter.draft([Ask(seq, 4)])[0]) == 0
    drafter.end(seq)


def test_ids_outside_its_vocabulary_are_impossible() -> None:
    for drafter in (MedusaDrafter(medusa_net(30)), EagleDrafter(eagle_net(30))):
        for width in (1, 3):
            seq = a_seq(width)
            a_text(drafter, seq)
            (draft,) = drafter.draft([Ask(seq, 8)])
            assert set(draft.tokens) <= set(drafter.net.draft_ids.tolist())
            drafter.end(seq)


def test_the_next_turn_begins_with_what_the_last_one_showed(eagle: EagleHead) -> None:
    """The target finds the text of the first turn in its cache; the drafter knows it all the same."""

    def first_draft(drafter: EagleDrafter, turns: Sequence[Seq]) -> Draft:
        engine = Engine(torch_target(tiny_weights()), {"eagle": drafter, "none": NoDrafter()}, Fixed())
        for seq in turns:
            engine.submit(seq)
            drafts = []
            while engine.busy:
                drafts += [r.draft for r in engine.step() if len(r.draft)]
        return drafts[0]

    def turns(first: str) -> list[Seq]:
        spec, params = SpecConfig(("eagle",), 4, adaptive=False), SamplingParams(max_tokens=8)
        prompt = target_text()[0, :20].tolist()
        longer = target_text()[0, :28].tolist() + target_text()[1, :6].tolist()
        one = Seq("one", prompt, 20, params, replace(spec, drafters=(first,)))
        return [one, Seq("two", longer, len(longer), params, spec)]

    cold = first_draft(EagleDrafter(eagle), turns("eagle")[1:])
    drafter = EagleDrafter(eagle)
    warm = first_draft(drafter, turns("eagle"))
    assert warm.tokens == cold.tokens
    assert warm.scores == pytest.approx(cold.scores, rel=1e-3)
    blind = first_draft(EagleDrafter(eagle), turns("none"))
    assert blind.scores != pytest.approx(cold.scores, rel=1e-3)
