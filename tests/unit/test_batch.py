"""Packing: every row stands in the stream as it would alone."""

from __future__ import annotations

import pytest
import torch

from megatron_brorl.parallel.batch import pack


def rows(count: int, seed: int = 0):
    g = torch.Generator().manual_seed(seed)

    def some(low: int) -> list[torch.Tensor]:
        lengths = torch.randint(low, 9, (count,), generator=g).tolist()
        return [torch.randint(0, 50, (n,), generator=g) for n in lengths]

    return some(1), some(1)


@pytest.mark.parametrize("multiple", [1, 4])
@pytest.mark.parametrize("max_tokens", [1, 30, 10_000])
def test_every_row_is_found_again(max_tokens, multiple):
    prompts, responses = rows(40)
    batches = pack(prompts, responses, max_tokens, multiple)
    assert sorted(i for b in batches for i in b.rows) == list(range(40))
    for batch in batches:
        real = sum(len(prompts[i]) + len(responses[i]) - 1 for i in batch.rows)
        assert real <= max(max_tokens, 16)
        assert len(batch.input_ids) == real + (-real % multiple)
        starts = torch.tensor([0, *batch.lengths]).cumsum(0).tolist()
        for place, i in enumerate(batch.rows):
            row = torch.cat((prompts[i], responses[i]))[:-1]
            segment = slice(starts[place], starts[place + 1])
            assert batch.input_ids[segment].tolist() == row.tolist()
            assert batch.position_ids[segment].tolist() == list(range(len(row)))
        for place, (i, predict) in enumerate(batch.split(batch.predict)):
            first = starts[place] + len(prompts[i]) - 1
            assert predict.tolist() == list(range(first, first + len(responses[i])))
        assert [t.tolist() for _, t in batch.split(batch.targets)] == [responses[i].tolist() for i in batch.rows]


def test_per_row_values_follow_the_rows():
    prompts, responses = rows(10)
    values = [torch.full((len(r),), float(i)) for i, r in enumerate(responses)]
    for batch in pack(prompts, responses, 40):
        assert torch.equal(batch.gather(values), batch.repeat(torch.arange(10.0)))


def test_segments_group_equal_lengths():
    prompts, responses = rows(60)
    (batch,) = pack(prompts, responses, 10_000)
    assert [n for count, n in batch.segments for _ in range(count)] == batch.lengths
    assert len({n for _, n in batch.segments}) == len(batch.segments)


def test_no_rows_make_one_batch_that_predicts_nothing():
    (batch,) = pack([], [], 100, 2)
    assert len(batch.input_ids) == 2
    assert batch.rows == ()
    assert len(batch.predict) == len(batch.targets) == 0
    assert len(batch.gather([])) == len(batch.repeat(torch.zeros(0))) == 0
