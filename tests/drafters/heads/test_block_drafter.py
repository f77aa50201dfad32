"""A trained block head in service: the text is the target's own, and the drafts are the network's."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from paceline.config import Accept, SamplingParams, SpecConfig
from paceline.drafters.grammar import Grammar
from paceline.drafters.heads import tree_growth as grow_module
from paceline.drafters.heads.block import BlockDrafter
from paceline.drafters.heads.tree_growth import grow
from paceline.drafters.support.grammar_filter import FORCED
from paceline.engine import accept, verify
from paceline.engine.control import Fixed
from paceline.engine.engine import Engine
from paceline.heads.block import BlockHead
from paceline.heads.calibration import Calibration
from paceline.heads.runner import ChainStart, TorchBlock
from paceline.sampling import Floats, History, distribution
from paceline.testing import ToyCursor
from paceline.train.losses.base import TrainBatch
from paceline.train.losses.block import draft_logits
from paceline.types import NO_DRAFT, ROOT, Ask, Draft, Drafter, HiddenRows, Round, Seq, Verdict
from support.engines import PLAIN, Rules, accepted, outputs_of, torch_target
from support.heads import own, random_net, target_text, tiny_model, tiny_weights, trained_net
from support.models import VOCAB

pytestmark = pytest.mark.slow

LENGTH = 24


@pytest.fixture
def net() -> BlockHead:
    return trained_net()


def run(
    spec: SpecConfig,
    params: SamplingParams,
    drafters: Sequence[Drafter] = (),
    batch: int = 1,
    rules: Rules | None = None,
) -> tuple[list[list[int]], list[Round]]:
    prompts = [target_text()[i, : 3 + 2 * i].tolist() for i in range(batch)]
    return outputs_of(torch_target(tiny_weights()), drafters, prompts, params, spec, rules)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("width", [1, 3])
def test_text_equals_plain_decoding(net: BlockHead, temperature: float, batch: int, width: int) -> None:
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=LENGTH)
    plain, _ = run(PLAIN, params, batch=batch)
    spec = SpecConfig(("block",), tree_width=width, adaptive=False)
    text, rounds = run(spec, params, [BlockDrafter(TorchBlock(net))], batch)
    assert text == plain
    assert accepted(rounds) > 0
    strange, _ = run(spec, params, [BlockDrafter(TorchBlock(random_net(draft_vocab=50)))], batch)
    assert strange == plain


def by_parity(tokens: tuple[int, ...]) -> set[int] | None:
    """Every third token is free, the others are even or odd in turn; after a multiple of 7 one is forced."""
    if tokens and tokens[-1] % 7 == 0:
        return {tokens[-1] + 1}
    return None if len(tokens) % 3 == 0 else set(range(len(tokens) % 2, VOCAB, 2))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("with_grammar", [False, True])
def test_constrained_text_equals_plain_decoding(
    net: BlockHead, temperature: float, width: int, with_grammar: bool
) -> None:
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=LENGTH)
    plain, _ = run(PLAIN, params, batch=3, rules=by_parity)
    drafters: list[Drafter] = [*([Grammar()] if with_grammar else []), BlockDrafter(TorchBlock(net))]
    spec = SpecConfig(tuple(d.name for d in drafters), tree_width=width, adaptive=False)
    text, rounds = run(spec, params, drafters, 3, by_parity)
    assert text == plain
    assert any("block" in r.draft.sources for r in rounds)
    assert not any(r.draft.rejected_sources for r in rounds)
    for r in rounds:
        for node, source in enumerate(r.draft.sources):
            assert source != "block" or r.draft.scores[node] < FORCED


def accept_one_more(draft: Draft, choice: Callable[[int], int]) -> Verdict:
    """Wrong: keeps the first guess that was refused too."""
    verdict = accept.match(draft, choice)
    children = draft.children(verdict.path[-1] if verdict.path else ROOT)
    return Verdict((*verdict.path, children[0]), verdict.token) if children else verdict


def test_a_wrong_accept_rule_is_caught(net: BlockHead, monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(max_tokens=LENGTH)
    plain, _ = run(PLAIN, params)
    monkeypatch.setattr(verify, "match", accept_one_more)
    assert run(SpecConfig(("block",), adaptive=False), params, [BlockDrafter(TorchBlock(net))])[0] != plain


def ready(drafter: BlockDrafter, length: int = 20, text: int = 0, **fields: object) -> Seq:
    """A sequence of which all that can be seen has been seen."""
    tokens = target_text()[text, :length]
    hidden, _ = tiny_model().features(tokens[None], drafter.taps)
    seq = Seq(f"s{text}", tokens.tolist(), 3, **fields)  # type: ignore[arg-type]
    drafter.begin(seq)
    rows = {tap: states[0, : length - 1] for tap, states in hidden.items()}
    cut = {tap: (states[:7], states[7:]) for tap, states in rows.items()}
    for start, part in ((0, 0), (7, 1)):
        drafter.on_hidden([HiddenRows(seq, start, {tap: parts[part] for tap, parts in cut.items()})])
    return seq


def teacher_forced(net: BlockHead, seq: Seq, drafted: Sequence[int]) -> Floats:
    """Logits over the vocabulary for each place, as a training step would have them."""
    text = torch.tensor([[*seq.tokens, *drafted]])
    hidden, final = tiny_model().features(text, net.shape.taps)
    with torch.no_grad():
        logits, _ = draft_logits(
            net, TrainBatch(text, own(text), hidden, final), torch.tensor([[len(seq.tokens) - 1]])
        )
    whole = np.full((net.shape.block, VOCAB), -np.inf, np.float32)
    whole[:, net.draft_ids.numpy()] = logits[0, 0].numpy()
    return whole


@pytest.mark.parametrize("rule", ["residual", "block"])
@pytest.mark.parametrize("draft_vocab", [VOCAB, 40])
def test_q_is_the_distribution_of_each_position(rule: Accept, draft_vocab: int) -> None:
    net = random_net(draft_vocab=draft_vocab)
    drafter = BlockDrafter(TorchBlock(net))
    params = SamplingParams(temperature=0.7, top_k=20, seed=5)
    seq = ready(drafter, params=params, spec=SpecConfig(("block",), accept=rule))
    (draft,) = drafter.draft([Ask(seq, 5)])
    assert len(draft) == 5
    assert draft.q is not None
    rows = teacher_forced(net, seq, draft.tokens)
    for place in range(5):
        history = History(seq.tokens, seq.prompt_len, draft.tokens[:place])
        want = distribution(rows[place], params, history).probabilities()
        assert draft.q[place].numpy() == pytest.approx(want, abs=1e-4)
    assert set(draft.tokens) <= set(net.draft_ids.tolist())


def test_siblings_are_sampled_without_replacement() -> None:
    drafter = BlockDrafter(TorchBlock(random_net()))
    seq = ready(
        drafter,
        params=SamplingParams(temperature=1.0, seed=5),
        spec=SpecConfig(("block",), tree_width=2, accept="residual"),
    )
    (draft,) = drafter.draft([Ask(seq, 6)])
    assert draft.parents == (ROOT, ROOT, 0, 0, 2, 2)
    assert draft.q is not None
    for elder in (0, 2, 4):
        younger = elder + 1
        assert draft.q[younger][draft.tokens[elder]] == 0
        assert draft.q[younger].sum() == pytest.approx(1)


def test_greedy_drafts_are_the_likeliest_and_a_budget_holds() -> None:
    net = random_net()
    drafter = BlockDrafter(TorchBlock(net))
    seq = ready(drafter)
    (whole,) = drafter.draft([Ask(seq, 9)])
    assert len(whole) == net.shape.block
    rows = teacher_forced(net, seq, whole.tokens)
    assert list(whole.tokens) == rows.argmax(-1).tolist()
    assert drafter.draft([Ask(seq, 3)])[0].tokens == whole.tokens[:3]


@pytest.mark.parametrize("draft_vocab", [VOCAB, 40])
def test_the_short_way_gives_what_the_long_way_gives(draft_vocab: int) -> None:
    drafter = BlockDrafter(TorchBlock(random_net(draft_vocab=draft_vocab)))
    seqs = [ready(drafter, length, text) for text, length in enumerate((20, 9, 31))]
    for budget, after in ((3, ()), (9, ()), (9, (7, 8)), (1, (4,) * 4)):
        short = drafter.draft([Ask(seq, budget, after) for seq in seqs])
        for seq, draft in zip(seqs, short, strict=True):
            (long,) = grow([Ask(seq, budget, after)], drafter._logits_at, "block", VOCAB)
            assert long.tokens == draft.tokens
            assert long.scores == pytest.approx(draft.scores, abs=1e-5)


def all_but(banned: set[int]) -> ToyCursor:
    return ToyCursor(lambda _: set(range(VOCAB)) - banned)


@pytest.mark.parametrize("budget", [2, 5, 9])
def test_a_chain_that_a_grammar_refuses_goes_on_with_the_best_it_takes(budget: int) -> None:
    drafter = BlockDrafter(TorchBlock(random_net()))
    for seq in [ready(drafter, length, text) for text, length in enumerate((20, 9, 31))]:
        (free,) = drafter.draft([Ask(seq, 9)])
        for refused in range(2):
            banned = set(free.tokens[refused : refused + 3])
            cursor = all_but(banned)
            (short,) = drafter.draft([Ask(seq, budget, (), cursor)])
            (long,) = grow([Ask(seq, budget, (), cursor)], drafter._logits_at, "block", VOCAB)
            assert short.tokens == long.tokens
            assert len(short) == min(budget, drafter.runner.shape.block)
            assert not banned & set(short.tokens)
            assert short.scores == pytest.approx(long.scores, abs=1e-5)


def test_penalties_count_in_drafts() -> None:
    drafter = BlockDrafter(TorchBlock(random_net()))
    seq = ready(drafter)
    (plain,) = drafter.draft([Ask(seq, 5)])
    seq.params = SamplingParams(logit_bias=((plain.tokens[1], -100.0),))
    (other,) = drafter.draft([Ask(seq, 5)])
    assert other.tokens[0] == plain.tokens[0]
    assert plain.tokens[1] not in other.tokens


def test_others_may_have_drafted_before() -> None:
    net = random_net()
    drafter = BlockDrafter(TorchBlock(net))
    seq = ready(drafter)
    (whole,) = drafter.draft([Ask(seq, 9)])
    (rest,) = drafter.draft([Ask(seq, 9, after=whole.tokens[:2])])
    assert rest.tokens == whole.tokens[2:]
    (other,) = drafter.draft([Ask(seq, 9, after=(7, 8))])
    assert list(other.tokens[:1]) == teacher_forced(net, seq, (7, 8))[2:3].argmax(-1).tolist()
    assert drafter.draft([Ask(seq, 9, after=(1,) * 5)]) == [NO_DRAFT]


def test_a_round_is_one_pass_for_all_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    net = random_net()
    drafter = BlockDrafter(TorchBlock(net))
    seqs = [ready(drafter, length, text) for text, length in enumerate((20, 9, 31))]
    alone = [drafter.draft([Ask(seq, 5)])[0] for seq in seqs]
    drafter._blocks.clear()
    passes = []
    block = net.block

    def counted(*given: Any) -> Tensor:
        passes.append(given)
        return block(*given)

    monkeypatch.setattr(net, "block", counted)
    together = drafter.draft([Ask(seq, 5) for seq in seqs])
    assert [draft.tokens for draft in together] == [draft.tokens for draft in alone]
    drafter.draft([Ask(seqs[0], 5, after=(3,))])  # the same round goes on
    assert len(passes) == 1


def test_without_the_row_before_the_last_token_there_is_no_draft() -> None:
    drafter = BlockDrafter(TorchBlock(random_net()))
    new = Seq("new", [1, 2, 3], 3)
    drafter.begin(new)
    seq = ready(drafter)
    seq.tokens.append(5)  # its last but one was not seen yet
    assert drafter.draft([Ask(new, 4), Ask(seq, 4)]) == [NO_DRAFT, NO_DRAFT]
    drafter.end(new)
    drafter.end(seq)


def test_the_likeliest_nodes_of_a_tree_come_first() -> None:
    net = random_net()
    drafter = BlockDrafter(TorchBlock(net))
    seq = ready(drafter, spec=SpecConfig(("block",), tree_width=3))
    (tree,) = drafter.draft([Ask(seq, 9)])
    assert tree.parents is not None
    assert len(tree) == 9
    reach = [np.prod([tree.scores[i] for i in tree.path(node)]) for node in range(9)]
    assert reach == sorted(reach, reverse=True)
    for node in (ROOT, *range(9)):
        children = tree.children(node)
        assert len(children) <= 3
        assert len({tree.tokens[i] for i in children}) == len(children)
    assert max(map(len, tree.paths())) <= net.shape.block
    for path in tree.paths():
        said_so = [tree.tokens[i] for i in path]
        rows = teacher_forced(net, seq, said_so)
        assert all(token in np.argsort(-rows[place])[:3] for place, token in enumerate(said_so))


def test_a_tree_needs_few_calls_and_is_the_same_with_many(
    net: BlockHead, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, looks = TorchBlock(net), list[int]()
    logits_at = runner.logits_at

    def counted(places: Sequence[ChainStart]) -> tuple[Floats, list[float]]:
        looks.append(len(places))
        return logits_at(places)

    monkeypatch.setattr(runner, "logits_at", counted)
    drafter = BlockDrafter(runner)
    seq = ready(drafter, spec=SpecConfig(("block",), tree_width=3))
    (quick,) = drafter.draft([Ask(seq, 14)])
    few = len(looks)
    drafter._blocks[seq.id].logits.clear()
    monkeypatch.setattr(grow_module, "PREFETCH_WIDTH", 1)
    (one_by_one,) = drafter.draft([Ask(seq, 14)])
    assert (one_by_one.tokens, one_by_one.parents) == (quick.tokens, quick.parents)
    assert one_by_one.scores == pytest.approx(quick.scores, rel=1e-4)
    assert few < len(looks) - few


def test_confidence_is_calibrated_and_never_certain() -> None:
    drafter = BlockDrafter(TorchBlock(random_net(block=3)))
    seq = ready(drafter)
    (raw,) = drafter.draft([Ask(seq, 3)])
    drafter.calibration = Calibration((1.0, 2.0, 1.0), (0.0, 0.0, 99.0))
    (draft,) = drafter.draft([Ask(seq, 3)])
    assert draft.scores[0] == raw.scores[0]
    odds = raw.scores[1] / (1 - raw.scores[1])
    assert draft.scores[1] == pytest.approx(odds**2 / (1 + odds**2))
    assert 0.99 < draft.scores[2] < FORCED


def test_where_the_grammar_allows_nothing_it_knows_it_drafts_nothing() -> None:
    net = random_net(draft_vocab=40)
    strange = next(token for token in range(VOCAB) if token not in set(net.draft_ids.tolist()))
    drafter = BlockDrafter(TorchBlock(net))
    seq = ready(drafter)
    places = [{*net.draft_ids.tolist()}, {strange}]
    cursor = ToyCursor(lambda tokens: places[len(tokens)] if len(tokens) < 2 else set())
    (draft,) = drafter.draft([Ask(seq, 4, (), cursor)])
    assert len(draft) == 1


def test_the_next_turn_of_an_agent_is_drafted_as_well_as_if_all_had_been_read(net: BlockHead) -> None:
    """Its beginning is in the target's cache, where no one sees it computed again."""
    params = SamplingParams(max_tokens=8)
    spec = SpecConfig(("block",), adaptive=False)
    first = [*target_text()[0].tolist(), *target_text()[1].tolist()]  # more than a page
    engine = Engine(torch_target(tiny_weights()), {"block": BlockDrafter(TorchBlock(net))}, Fixed())
    drafts: list[list[Draft]] = []
    for turn, fresh in ((first, engine), (None, engine), (None, None)):
        prompt = turn or [*first, *target_text()[2, :9].tolist()]
        on = fresh or Engine(torch_target(tiny_weights()), {"block": BlockDrafter(TorchBlock(net))}, Fixed())
        seq = Seq("turn", list(prompt), len(prompt), params, spec)
        on.submit(seq)
        rounds = []
        while on.busy:
            rounds += on.step()
        assert (seq.cached > 0) == (turn is None and fresh is not None)
        drafts.append([r.draft for r in rounds if len(r.draft)])
    assert [d.tokens for d in drafts[1]] == [d.tokens for d in drafts[2]]
    assert drafts[1]
