"""Costs against counted operations and packed streams; assignments against exhaustive search and bounds."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2MoeConfig, Qwen3MoeConfig

from megatron_brorl.families.shape import parse_shape
from megatron_brorl.parallel.balance import CostModel, assign, loads_of, pair_cost
from megatron_brorl.parallel.packing import pack

NO_LIMIT = 10**9  # tokens of a micro-batch, more than those of all rows


def ints(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


@pytest.mark.parametrize(
    ("family", "kv_heads"), [(Qwen2Config, 1), (Qwen2Config, 4), (Qwen2MoeConfig, 4), (Qwen3MoeConfig, 4)]
)
def test_attention_against_counted_operations(family, kv_heads):
    """T tokens take a T + b T^2 operations by torch's counter, because eager attention multiplies all T^2 pairs."""
    sizes = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "vocab_size": 200}
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "head_dim": 12}
    config = family(
        **sizes,
        **(experts if family is not Qwen2Config else {}),
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        attn_implementation="eager",
        experts_implementation="eager",
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    config.architectures = [type(model).__name__]
    flops_per_token = []
    for tokens in (16, 64):
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            model(torch.zeros(1, tokens, dtype=torch.int64))
        flops_per_token.append(counter.get_total_flops() / tokens)
    b = (flops_per_token[1] - flops_per_token[0]) / (64 - 16)
    a = flops_per_token[0] - 16 * b
    shape = parse_shape(config.to_dict(), "config")
    assert pair_cost(shape) == pytest.approx(b / a, rel=0.02)  # The counter includes the rotary tables.


def test_a_row_with_its_own_prompt_costs_its_tokens_and_pairs():
    prompts = ints(0, 10, 700, 3)
    responses = ints(1, 90, 300, 997)
    costs, prompt_costs = CostModel(pair=1e-3, limit=NO_LIMIT, share=False).rows(prompts, responses, ints(0, 0, 1, 2))
    assert not prompt_costs.any()
    totals = (prompts + responses).tolist()
    # The pairs of each token with itself and those before it are n / 2 more than n^2 / 2, the integral in CostModel.
    exact = [n + 1e-3 * (sum(range(n + 1)) - n / 2) for n in totals]
    assert costs.tolist() == [round(x) for x in exact]


@pytest.mark.parametrize("limit", [3000, 20_000])
def test_costs_of_shared_prompts_are_the_tokens_of_packed_streams(limit):
    """With one part, the load is the number of tokens of the streams."""
    rng = torch.Generator().manual_seed(0)
    response_lengths = [int(n) for n in torch.randint(100, 500, (120,), generator=rng)]
    distinct_prompts = [torch.randint(0, 99, (n,), generator=rng) for n in (600, 400, 900)]
    prompt_index = np.arange(120) % 3
    prompts = [distinct_prompts[i] for i in prompt_index]
    prompt_lengths = ints(*map(len, prompts))
    model = CostModel(pair=0.0, limit=limit, share=True)
    costs, prompt_costs = model.rows(prompt_lengths, ints(*response_lengths), prompt_index)
    assert prompt_costs.tolist() == prompt_lengths.tolist()
    (load,) = loads_of(1, np.zeros(120, dtype=np.int64), costs, prompt_index, prompt_costs)
    responses = [torch.zeros(n, dtype=torch.int64) for n in response_lengths]
    streams = pack(prompts, responses, limit, share=True)
    assert load == pytest.approx(sum(len(s.input_ids) for s in streams), rel=0.05)


def test_a_prompt_that_is_not_worth_sharing_is_not_shared():
    model = CostModel(pair=0.0, limit=NO_LIMIT, share=True)
    for prompt, is_shared in ((5, False), (500, True)):
        _, prompt_costs = model.rows(ints(*[prompt] * 3), ints(900, 800, 1000), prompt_index=ints(0, 0, 0))
        assert (prompt_costs > 0).tolist() == [is_shared] * 3


def best_by_search(costs, parts, prompt_index, prompt_costs):
    return min(
        loads_of(parts, np.array(chosen), costs, prompt_index, prompt_costs).max()
        for chosen in product(range(parts), repeat=len(costs))
    )


@pytest.mark.parametrize("parts", [2, 3])
def test_assignments_are_within_grahams_bound(parts):
    """With m parts, the largest load is at most 4/3 - 1/(3 m) of the optimum (Graham 1969, theorem 2)."""
    for seed in range(30):
        costs = np.random.default_rng(seed).integers(1, 50, 7)
        zeros = np.zeros_like(costs)
        part_of = assign(costs, parts)
        assert set(part_of) <= set(range(parts))
        best = best_by_search(costs, parts, prompt_index=zeros, prompt_costs=zeros)
        assert np.bincount(part_of, weights=costs).max() <= (4 / 3 - 1 / (3 * parts)) * best + 1e-9


def test_siblings_of_long_prompts_stay_together():
    prompt_index = np.repeat(np.arange(4), 8)
    part_of = assign(np.full(32, 10), 4, prompt_index, prompt_costs=np.full(32, 1000))
    assert [len(set(part_of[prompt_index == i])) for i in range(4)] == [1, 1, 1, 1]
    assert len(set(part_of)) == 4


def test_many_rows_balance_within_a_thousandth():
    costs = np.random.default_rng(0).lognormal(9, 0.7, 5000).astype(np.int64)
    loads = np.bincount(assign(costs, 64), weights=costs)
    assert loads.max() <= 1.001 * loads.mean()
    assert assign(costs, 1).tolist() == [0] * 5000
    assert len(assign(costs[:0], 3)) == 0
    assert sorted(assign(costs[:2], 3)) == [0, 1]
