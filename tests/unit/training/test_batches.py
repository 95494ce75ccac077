from __future__ import annotations

from collections import Counter
from pathlib import Path

import torch

from paceline.training.acceptance import acceptance_of, chain_matches, count_chains
from paceline.training.batches import Batch, BatchOrder, BatchSource, shift
from paceline.training.grouping import group_by_length
from tests.unit.training.corpora import corpus


def batch() -> Batch:
    """One answer of four tokens after a prompt of two, one of two after one."""
    tokens = torch.tensor([[1, 2, 3, 4, 5, 6], [7, 8, 9, 0, 0, 0]])
    return Batch(tokens, torch.tensor([6, 3]), torch.tensor([2, 1]))


def test_anchors_are_where_a_whole_chain_can_be_judged() -> None:
    # Anchor t: tokens up to t are fed, t + 1 is committed, so depth 1 needs token t + 2.
    assert batch().anchors(0).nonzero().tolist() == [[0, 1], [0, 2], [0, 3], [0, 4], [1, 0], [1, 1]]
    assert batch().anchors(1).nonzero().tolist() == [[0, 1], [0, 2], [0, 3], [1, 0]]
    assert batch().anchors(3).nonzero().tolist() == [[0, 1]]
    assert not batch().anchors(4).any()
    assert batch().num_answer_tokens == 6


def test_states_of_answers_are_those_one_after_each_anchor() -> None:
    assert batch().answer_states.nonzero().tolist() == [[row, place + 1] for row, place in batch().anchors(1).nonzero()]


def test_shift_moves_what_follows_here() -> None:
    assert batch().shifted_tokens(2).tolist() == [[3, 4, 5, 6, 0, 0], [9, 0, 0, 0, 0, 0]]
    assert shift(batch().tokens, 6).tolist() == [[0] * 6] * 2


def test_a_chain_ends_at_its_first_wrong_draft() -> None:
    # Depth 2 has anchors 1 and 2 of the first answer; its tokens there are (4, 5) and (5, 6).
    def right_at_first_anchor_only(index: int, anchors: torch.Tensor) -> torch.Tensor:
        wanted = batch().shifted_tokens(2 + index)[anchors]
        first = anchors.nonzero()[:, 1] == 1
        return torch.where(first, wanted, -1)

    counts = count_chains(batch(), chain_matches(batch(), 2, right_at_first_anchor_only))
    measured = acceptance_of(counts)
    assert (measured.positions, measured.at_least) == (2, (0.5, 0.5))
    assert measured.tokens_per_pass == 2.0
    assert measured.per_position == (0.5, 1.0)


def test_only_chains_that_are_right_so_far_are_asked_on() -> None:
    asked: list[int] = []

    def wrong(_index: int, anchors: torch.Tensor) -> torch.Tensor:
        asked.append(int(anchors.sum()))
        return torch.full((asked[-1],), -1)

    chain_matches(batch(), 2, wrong)
    assert asked == [2, 0]


def test_a_later_draft_does_not_count_without_the_earlier_one() -> None:
    matches = torch.zeros(2, 6, 2, dtype=torch.bool)
    matches[..., 1] = True
    assert count_chains(batch(), matches).tolist() == [2, 0, 0]


def test_groups_stay_within_their_tokens() -> None:
    lengths = {0: 5, 1: 3, 2: 4, 3: 20, 4: 3}
    groups = group_by_length((0, 1, 2, 3, 4), lengths, 9)
    assert groups == [[1, 4], [2], [0], [3]]


def test_an_epoch_has_every_sequence_once_and_the_order_is_the_seed_s(tmp_path: Path) -> None:
    sequences = [[1] * (3 + index % 7) for index in range(40)]
    source = BatchSource(corpus(tmp_path, sequences, [1] * 40), max_len=8, features=None)
    order = BatchOrder(range(40), source, batch_tokens=16, seed=1)
    seen: Counter[int] = Counter()
    number = 0
    while order.epoch_of(number) < 1:
        seen.update(order.at(number))
        number += 1
    assert seen == Counter(range(40))
    later = [order.at(place) for place in range(number, number + 5)]
    assert [BatchOrder(range(40), source, batch_tokens=16, seed=1).at(number + place) for place in range(5)] == later
    assert [order.at(place) for place in range(5)] == [
        BatchOrder(range(40), source, batch_tokens=16, seed=1).at(place) for place in range(5)
    ]
    other = BatchOrder(range(40), source, batch_tokens=16, seed=2)
    assert [other.at(place) for place in range(5)] != [order.at(place) for place in range(5)]


def test_long_sequences_are_cut(tmp_path: Path) -> None:
    source = BatchSource(corpus(tmp_path, [[1, 2, 3, 4, 5], [6, 7]], [1, 1]), max_len=4, features=None)
    made = source.make((0, 1))
    assert made.tokens.tolist() == [[1, 2, 3, 4], [6, 7, 0, 0]]
    assert made.lengths.tolist() == [4, 2]
