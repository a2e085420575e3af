"""Packed streams against rows that are packed one by one."""

from __future__ import annotations

import pytest
import torch

from megatron_brorl.parallel.packing import MIN_SHARING_GAIN, copies_by_routes, pack, token_gain


def rows(count: int, seed: int = 0):
    rng = torch.Generator().manual_seed(seed)

    def tensors() -> list[torch.Tensor]:
        lengths = torch.randint(1, 9, (count,), generator=rng).tolist()
        return [torch.randint(0, 50, (n,), generator=rng) for n in lengths]

    return tensors(), tensors()


def siblings(count: int, seed: int = 1):
    """Return rows of five prompts, one prompt after the other except for row 0, which has the last prompt."""
    prompts, responses = rows(count, seed)
    return [prompts[4 if i == 0 else i * 5 // count] for i in range(count)], responses


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("multiple", [1, 4])
@pytest.mark.parametrize("max_tokens", [1, 30, 10_000])
def test_streams_contain_every_row_and_shared_prompts_once(max_tokens, multiple, share):
    prompts, responses = siblings(40) if share else rows(40)
    batches = pack(prompts, responses, max_tokens, multiple, share=share)
    assert sorted(i for b in batches for i in b.rows) == list(range(40))
    for batch in batches:
        # With `share`, rows with equal prompts have one key and count the prompt once.
        prompt_lengths = {(tuple(prompts[i].tolist()) if share else i): len(prompts[i]) for i in batch.rows}
        token_count = sum(prompt_lengths.values()) + sum(len(responses[i]) - 1 for i in batch.rows)
        assert len(batch.rows) == 1 or token_count <= max_tokens
        assert len(batch.input_ids) == token_count + (-token_count % multiple)
        assert sum(g.prefix + sum(count * n for count, n in g.segments) for g in batch.groups) == len(batch.input_ids)
        for i, predict in batch.split(batch.predict):
            row = torch.cat((prompts[i], responses[i]))[:-1]
            last = int(predict[0])  # the last token of the prompt, which predicts the first of the response
            indices = [*range(last - len(prompts[i]) + 1, last), *predict.tolist()]
            assert batch.input_ids[indices].tolist() == row.tolist()
            assert batch.position_ids[indices].tolist() == list(range(len(row)))
        assert [t.tolist() for _, t in batch.split(batch.targets)] == [responses[i].tolist() for i in batch.rows]


def test_prompts_are_not_shared_if_that_saves_nothing():
    prompts, responses = rows(20)
    plain = pack(prompts, responses, max_tokens=50)
    shared = pack(prompts, responses, max_tokens=50, share=True)
    assert token_gain(prompts, responses, max_tokens=50) < MIN_SHARING_GAIN
    assert [b.rows for b in plain] == [b.rows for b in shared]
    assert token_gain([], [], max_tokens=50) == 1.0


@pytest.mark.parametrize(("max_tokens", "is_shared"), [(170, False), (300, True), (600, True)])
def test_token_gain_counts_a_prompt_once_per_micro_batch(max_tokens, is_shared):
    """After a prompt of 60 tokens, a micro-batch has room for one, two or five responses of 100 tokens."""
    prompts = [torch.arange(60)] * 20
    responses = [torch.zeros(100, dtype=torch.int64) for _ in range(20)]
    computed = sum(len(b.input_ids) for b in pack(prompts, responses, max_tokens, share=True))
    assert (computed < 20 * 159) == is_shared  # 159: the last token of a row is not computed
    assert token_gain(prompts, responses, max_tokens) == pytest.approx(20 * 159 / computed)


# The choice of the prompt's routes in each of rows 0 to 7, and the expected number of further copies of the prompt.
# Rows 0 to 3 and 4 to 7 are two groups whose prompts have the same tokens.
ROUTED = [([0] * 8, 0), ([0, 1, 0, 1, 1, 1, 0, 0], 1), ([0, 0, 0, 0, 2, 2, 2, 2], 1), (list(range(8)), 7)]


@pytest.mark.parametrize("max_tokens", [30, 10_000])
@pytest.mark.parametrize(("route_of_row", "copies"), ROUTED)
def test_every_token_keeps_the_routes_of_its_row(route_of_row, copies, max_tokens):
    ids = [7, 8, 9, 7, 8, 9, 3]
    prompts = [torch.tensor(ids)] * 4 + [torch.tensor(ids)] * 4 + [torch.tensor([5, *ids])] * 3
    responses = [torch.arange(1 + i % 4) for i in range(11)]
    rng = torch.Generator().manual_seed(0)
    prompt_routes, response_routes = torch.randint(0, 300, (2, 11, 8, 3, 2), generator=rng, dtype=torch.int16)
    routes = [
        torch.cat((prompt_routes[choice, : len(prompts[i])], response_routes[i, : len(responses[i]) - 1]))
        for i, choice in enumerate([*route_of_row, 9, 9, 9])
    ]
    assert copies_by_routes(prompts, responses, routes) == copies
    batches = pack(prompts, responses, max_tokens, share=True, routes=routes)
    for batch in batches:
        for row, predict in batch.split(batch.predict):
            start = predict[0] - len(prompts[row]) + 1  # A prompt ends where its first response token is predicted.
            indices = [*range(start, predict[0]), *predict.tolist()]
            assert torch.equal(batch.routes[indices], routes[row])
    gain = token_gain(prompts, responses, max_tokens, routes)
    computed = sum(len(b.input_ids) for b in batches)
    if gain < MIN_SHARING_GAIN:  # `pack` shares no prompt.
        assert copies == 7
    else:
        assert gain == pytest.approx(sum(map(len, routes)) / computed)
