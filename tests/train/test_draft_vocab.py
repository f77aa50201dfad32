"""A trained head with other tokens to guess: what it knew of the old ones, it knows."""

import pytest
import torch

from paceline.heads.base import DraftHead
from paceline.train.recipe import pieces_of, with_draft_vocab
from support.heads import MODEL, eagle_net, medusa_net, random_net

PIECES = pieces_of(MODEL)
NETS: dict[str, DraftHead] = {
    "block": random_net(draft_vocab=60),
    "eagle": eagle_net(60),
    "medusa": medusa_net(60),
}


@pytest.mark.parametrize("kind", NETS)
def test_the_same_words_give_the_same_net(kind: str) -> None:
    net = NETS[kind]
    same = with_draft_vocab(kind, net, PIECES, net.draft_ids)
    assert same is not net
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), same.parameters(), strict=True))


@pytest.mark.parametrize("kind", NETS)
def test_words_it_had_are_kept_wherever_they_stand(kind: str) -> None:
    net = NETS[kind]
    gone, old = set(net.draft_ids.tolist()[::3]), set(net.draft_ids.tolist())
    fresh = [token for token in range(len(PIECES.embed)) if token not in old][: len(gone) + 4]
    ids = torch.tensor(sorted((old - gone) | set(fresh)))
    new = with_draft_vocab(kind, net, PIECES, ids)
    assert new.shape.draft_vocab == len(ids) == len(old) + 4
    kept = [token for token in ids.tolist() if token in old]
    for name, weight in new.named_parameters():
        theirs = net.get_parameter(name)
        if name.startswith(net.vocab_parameters):
            assert torch.equal(weight[new.draft_index[kept]], theirs[net.draft_index[kept]])
        else:
            assert torch.equal(weight, theirs)


def test_a_new_word_is_read_as_the_other_words_were() -> None:
    net = NETS["block"]
    fresh = next(t for t in range(len(PIECES.embed)) if t not in set(net.draft_ids.tolist()))
    new = with_draft_vocab(
        "block", net, PIECES, torch.sort(torch.cat((net.draft_ids[1:], torch.tensor([fresh]))))[0]
    )
    table, before = new.get_parameter("markov_in.weight"), net.get_parameter("markov_in.weight")
    assert torch.equal(table[new.draft_index[fresh]], before[-1])
    assert torch.equal(table[-1], before[-1])
    assert not new.get_parameter("markov_out.weight")[new.draft_index[fresh]].any()
