"""The division of a stream over context-parallel ranks. tests/dist/test_layouts.py compares losses and gradients."""

from __future__ import annotations

import pytest
import torch

from megatron_brorl.config.schema import ParallelConfig
from megatron_brorl.errors import UserError
from megatron_brorl.parallel import grid
from megatron_brorl.parallel.packing import Packed, own_tokens, pack, segment_lengths, split_for_rank


def batch(size: int) -> Packed:
    """Pack 20 random rows for `size` context-parallel ranks."""
    rng = torch.Generator().manual_seed(size)
    prompts, responses = (
        [torch.randint(1, 50, (n,), generator=rng) for n in torch.randint(1, 12, (20,), generator=rng).tolist()]
        for _ in range(2)
    )
    (packed,) = pack(prompts, responses, max_tokens=10_000, multiple_of=4 * size, segments_of=2 * size)
    return packed


def expected_owner(position: int, length: int, size: int) -> int:
    """Ranks 0, 1, ..., C-1, C-1, ..., 1, 0 have the chunks of a segment in turn."""
    order = [*range(size), *reversed(range(size))]
    return order[position * 2 * size // length]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_each_rank_has_one_chunk_of_either_half(size):
    packed = batch(size)
    owners = [expected_owner(position, n, size) for n in segment_lengths(packed.groups) for position in range(n)]
    assert len(owners) == len(packed.input_ids)
    for rank in range(size):
        tokens = own_tokens(packed.groups, rank, size).tolist()
        assert tokens == [i for i, owner in enumerate(owners) if owner == rank]
        assert len(tokens) == len(packed.input_ids) // size


def test_a_rank_without_predictions_takes_part():
    """A rank takes part in collectives even if it predicts no token of a stream."""
    options = {"max_tokens": 100, "multiple_of": 8, "segments_of": 8}
    (short,) = pack([torch.tensor([1])], [torch.tensor([2])], **options)
    (empty,) = pack([], [], **options)
    assert [len(split_for_rank(short, rank, 4).predict) for rank in range(4)] == [1, 0, 0, 0]
    for packed in (short, empty):
        assert [len(split_for_rank(packed, rank, 4).input_ids) for rank in range(4)] == [2, 2, 2, 2]
    assert [split_for_rank(empty, rank, 4).gather([]).tolist() for rank in range(4)] == [[]] * 4


def test_shared_prompts_are_refused():
    with pytest.raises(ValueError, match="do not support segments_of"):
        pack([torch.tensor([1])] * 2, [torch.tensor([2])] * 2, max_tokens=100, multiple_of=4, share=True, segments_of=4)


def test_a_world_size_that_is_no_multiple_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "6")
    error = r"world size 6 is not a multiple of parallel\.tensor x parallel\.pipeline x parallel\.context = 2 x 1 x 2:"
    with pytest.raises(UserError, match=error):
        grid.build(ParallelConfig(tensor=2, context=2))
    with pytest.raises(UserError, match=r"parallel\.expert = 4 does not divide the 6 ranks of a pipeline stage"):
        grid.build(ParallelConfig(tensor=2, expert=4))
