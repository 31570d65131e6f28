"""Documents in sequences: nothing is lost, nothing is predicted across documents, and every number of ranks agrees."""

from __future__ import annotations

import pytest
import torch

from zeroshard.train.language.packing import IGNORED, Excerpt, Order, Sequences, divide, pack


def sequences(lengths: list[int], length: int) -> Sequences:
    """Documents whose tokens all differ; everything is learned."""
    tokens = torch.arange(1, 1 + sum(lengths), dtype=torch.int32)
    targets, documents, start = tokens + 1, [], 0
    for size in lengths:
        documents.append(Excerpt(start, size))
        start += size
        targets[start - 1] = IGNORED
    return Sequences.pack(tokens, targets, documents, length, seed=3)


def test_every_pair_of_neighbours_is_predicted_once_and_none_across_documents() -> None:
    lengths = [5, 3, 21, 8, 2, 7, 16, 1]
    found = sequences(lengths, 8)
    batch = found.take(range(len(found)))
    learned = batch.targets != IGNORED
    pairs = sorted(zip(batch.tokens[learned].tolist(), batch.targets[learned].tolist(), strict=True))
    ends = [sum(lengths[: number + 1]) for number in range(len(lengths))]
    assert pairs == [(token, token + 1) for token in range(1, sum(lengths)) if token not in ends]
    assert found.learned(range(len(found))) == len(pairs)


def test_positions_begin_again_in_each_piece_and_in_the_padding() -> None:
    found = sequences([5, 2], 8)
    batch = found.take([0, None])
    assert batch.positions.tolist() == [[0, 1, 2, 3, 4, 0, 1, 0], [0, 1, 2, 3, 4, 5, 6, 7]]
    assert batch.targets[1].tolist() == [IGNORED] * 8


def test_packing_leaves_little_unused() -> None:
    sizes = torch.randint(1, 100, (1000,), generator=torch.Generator().manual_seed(0)).tolist()
    packs = pack([Excerpt(0, size) for size in sizes], 100)
    assert all(sum(excerpt.length for excerpt in excerpts) <= 100 for excerpts in packs)
    assert sum(sizes) / (100 * len(packs)) > 0.97


def test_an_epoch_has_every_sequence_once_and_steps_cross_epochs() -> None:
    order = Order(sequences=7, a_step=3, seed=1)
    seen = [number for step in range(1, 8) for number in order.step(step)]
    assert [sorted(seen[first : first + 7]) for first in (0, 7, 14)] == [list(range(7))] * 3
    assert seen[:7] != seen[7:14]
    assert Order(7, 3, 1).step(5) == order.step(5), "the number of the step is the position"
    assert len(Order(2, 9, 1).step(1)) == 9


@pytest.mark.parametrize("count", [1, 5, 8])
@pytest.mark.parametrize("most", [1, 2, 100])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ranks_and_micro_batches_divide_a_step_and_change_nothing_of_it(ranks: int, most: int, count: int) -> None:
    parts = [divide(range(count), rank, ranks, most) for rank in range(ranks)]
    assert [number for part in parts for batch in part for number in batch if number is not None] == list(range(count))
    assert len({tuple(map(len, part)) for part in parts}) == 1, "all ranks run the same shapes"
    assert all(0 < len(batch) <= most for part in parts for batch in part)
