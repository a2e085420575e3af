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

WHOLE = 10**9  # tokens of a micro-batch that has room for all rows


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
    counts = []
    for tokens in (16, 64):
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            model(torch.zeros(1, tokens, dtype=torch.int64))
        counts.append(counter.get_total_flops() / tokens)
    slope = (counts[1] - counts[0]) / (64 - 16)
    shape = parse_shape(config.to_dict(), "config")
    assert pair_cost(shape) == pytest.approx(slope / (counts[0] - 16 * slope), rel=0.02)  # rotary tables count, too


def test_a_row_with_its_own_prompt_costs_its_tokens_and_pairs():
    prompts = ints(0, 10, 700, 3)
    responses = ints(1, 90, 300, 997)
    costs, setups = CostModel(pair=1e-3, limit=WHOLE, share=False).rows(prompts, responses, ints(0, 0, 1, 2))
    assert not setups.any()
    totals = (prompts + responses).tolist()
    # Each token attends to itself and the tokens before it, which is half a pair more than the integral.
    exact = [n + 1e-3 * (sum(range(n + 1)) - n / 2) for n in totals]
    assert costs.tolist() == [round(x) for x in exact]


@pytest.mark.parametrize("limit", [3000, 20_000])
def test_costs_of_shared_prompts_are_the_tokens_of_packed_streams(limit):
    """With one part, the load is the number of tokens of the streams."""
    rng = torch.Generator().manual_seed(0)
    lengths = [int(n) for n in torch.randint(100, 500, (120,), generator=rng)]
    texts = [torch.randint(0, 99, (n,), generator=rng) for n in (600, 400, 900)]
    prompt_index = np.arange(120) % 3
    prompts = ints(*(len(texts[f]) for f in prompt_index))
    costs, prompt_costs = CostModel(pair=0.0, limit=limit, share=True).rows(prompts, ints(*lengths), prompt_index)
    assert prompt_costs.tolist() == prompts.tolist()
    (load,) = loads_of(1, np.zeros(120, dtype=np.int64), costs, prompt_index, prompt_costs)
    responses = [torch.zeros(n, dtype=torch.int64) for n in lengths]
    streams = pack([texts[f] for f in prompt_index], responses, limit, share=True)
    assert load == pytest.approx(sum(len(s.input_ids) for s in streams), rel=0.05)


def test_a_prompt_that_is_not_worth_sharing_is_not_shared():
    prompts = ints(5, 5, 5)
    responses = ints(900, 800, 1000)
    prompt_index = ints(0, 0, 0)
    assert not CostModel(pair=0.0, limit=WHOLE, share=True).rows(prompts, responses, prompt_index)[1].any()
    assert CostModel(pair=0.0, limit=WHOLE, share=True).rows(prompts * 100, responses, prompt_index)[1].all()


def best_by_search(costs, parts, prompt_index, prompt_costs):
    largest_loads = [
        loads_of(parts, np.array(chosen), costs, prompt_index, prompt_costs).max()
        for chosen in product(range(parts), repeat=len(costs))
    ]
    return min(largest_loads)


@pytest.mark.parametrize("parts", [2, 3])
def test_assignments_are_within_grahams_bound(parts):
    """The largest load is at most 4/3 - 1/(3 m) of the optimum (Graham 1969, theorem 2)."""
    for seed in range(30):
        costs = np.random.default_rng(seed).integers(1, 50, 7)
        none = np.zeros_like(costs)
        part_of = assign(costs, parts)
        assert set(part_of) <= set(range(parts))
        best = best_by_search(costs, parts, none, none)
        assert np.bincount(part_of, weights=costs).max() <= (4 / 3 - 1 / (3 * parts)) * best + 1e-9


def test_siblings_of_long_prompts_stay_together():
    prompt_index = np.repeat(np.arange(4), 8)
    part_of = assign(np.full(32, 10), 4, prompt_index, prompt_costs=np.full(32, 1000))
    assert [len(set(part_of[prompt_index == f])) for f in range(4)] == [1, 1, 1, 1]
    assert len(set(part_of)) == 4


def test_many_rows_balance_within_a_thousandth():
    costs = np.random.default_rng(0).lognormal(9, 0.7, 5000).astype(np.int64)
    loads = np.bincount(assign(costs, 64), weights=costs)
    assert loads.max() <= 1.001 * loads.mean()
    assert assign(costs, 1).tolist() == [0] * 5000
    assert len(assign(costs[:0], 3)) == 0
    assert sorted(assign(costs[:2], 3)) == [0, 1]
