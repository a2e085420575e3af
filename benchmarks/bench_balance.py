#!/usr/bin/env python3
"""Balance between replicas, in generation and in the update, for response lengths drawn from a distribution.

    python benchmarks/bench_balance.py [--quick] [--n N ...] [--replicas R ...] [--json FILE]

128 prompts of 200 tokens have N responses each. Lengths are log-normal (standard deviation 0.5 of the logarithm between
prompts and 0.5 within, mean 8,192 tokens, cut off at 14,336). 62% of the groups are kept and trained in 8 mini-batches
by a model of 1.5 billion weights. Column "runs" gives each replica a contiguous range of the rollouts, and trains
them where they were sampled; "dealt" and "assigned" use the code of training. Generation is the mean number of tokens
over replicas divided by the maximum; update is the same for predicted cost, summed over optimizer steps. Seconds are
processor time of planning one step, on one thread.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench_common import qwen2_config, write_rows

from megatron_brorl.config.schema import AlgoConfig
from megatron_brorl.families.shape import parse_shape
from megatron_brorl.parallel.balance import CostModel, pair_cost
from megatron_brorl.rollout.sampler import deal
from megatron_brorl.train.groups import STOP, Outcomes, choose_subset, mini_batch_of, trained_mask
from megatron_brorl.train.redistribute import assign_replicas

PROMPTS = 128
TOKEN_BYTES = 8  # an id and a log-probability, 4 bytes each
PROMPT_TOKENS = 200
MINI_BATCHES = 8
KEPT = 0.62  # share of the groups that are trained on
MEAN = 8192  # tokens of a response
LONGEST = 14336  # tokens
SPREAD = 0.5  # standard deviation of the logarithm of a length, between prompts and within each
MODEL = qwen2_config(hidden=1536, layers=28, heads=12, kv_heads=2, ffn=8960, vocab=151936, context=32768)


def sample_outcomes(n: int, seed: int) -> Outcomes:
    """Return the tables of a step: lengths and kept groups."""
    rng = np.random.default_rng(seed)
    between = rng.normal(0, SPREAD, (PROMPTS, 1))
    within = rng.normal(0, SPREAD, (PROMPTS, n))
    lengths = MEAN * np.exp(between + within - SPREAD**2)  # both exponentials have the mean exp(SPREAD^2 / 2)
    tokens = torch.from_numpy(lengths.clip(1, LONGEST).astype(np.int64))
    kept = np.sort(rng.permutation(PROMPTS)[: round(KEPT * PROMPTS)]).tolist()

    state = torch.full_like(tokens, STOP)
    zeros = torch.zeros_like(tokens)
    return Outcomes(
        state=state,
        rewards=zeros.float(),
        right=zeros.bool(),
        tokens=tokens,
        sampled=tokens,
        repeats=zeros,
        answers=zeros,
        holder=zeros,
        closed=list(range(PROMPTS)),
        kept=kept,
    )


def efficiency(loads: np.ndarray) -> float:
    """Return the mean over replicas divided by the maximum, from loads [steps, replicas] summed over steps."""
    return float(loads.mean(-1).sum() / loads.max(-1).sum())


def in_runs(outcomes: Outcomes, replicas: int) -> torch.Tensor:
    """Return the replica of every rollout if each replica gets a contiguous range in (group, sibling) order."""
    rows = outcomes.tokens.numel()
    cuts = [rows * i // replicas for i in range(1, replicas)]
    return torch.bucketize(torch.arange(rows), torch.tensor(cuts), right=True).view_as(outcomes.tokens)


def dealt(outcomes: Outcomes, replicas: int) -> torch.Tensor:
    """Return the replica of every rollout as rollout.sampler.deal assigns it."""
    holder = torch.empty_like(outcomes.tokens)
    for i, slots in enumerate(deal(list(product(range(holder.shape[0]), range(holder.shape[1]))), [0] * replicas)):
        group, sibling = torch.tensor(slots).T
        holder[group, sibling] = i
    return holder


def sums(index: torch.Tensor, values: torch.Tensor, count: int) -> np.ndarray:
    """Return the sums [count] of the values with each index."""
    return np.bincount(index.flatten().numpy(), weights=values.flatten().numpy(), minlength=count)


def own_update(outcomes: Outcomes, holder: torch.Tensor, algo: AlgoConfig, costs: CostModel, replicas: int) -> float:
    """Return the efficiency if every replica trains on the rows that it sampled. holder: replica of each rollout."""
    group, sibling = trained_mask(outcomes, overlong_filter=False).nonzero(as_tuple=True)
    prompts = np.full(len(group), PROMPT_TOKENS)
    unshared = replace(costs, share=False)
    row_costs, _ = unshared.rows(prompts, outcomes.tokens[group, sibling].numpy(), group.numpy())
    kept_index = torch.zeros(PROMPTS, dtype=torch.int64)
    kept_index[outcomes.kept] = torch.arange(len(outcomes.kept))
    step = mini_batch_of(kept_index[group], sibling, MINI_BATCHES, algo.mini_batch_of)
    loads = sums(step * replicas + holder[group, sibling], torch.from_numpy(row_costs), MINI_BATCHES * replicas)
    return efficiency(loads.reshape(MINI_BATCHES, replicas))


def measure(n: int, replicas: int, split: Any, costs: CostModel) -> dict[str, Any]:
    """Return one row of the table."""
    outcomes = sample_outcomes(n, seed=n + replicas)
    algo = AlgoConfig(mini_batches=MINI_BATCHES, mini_batch_of=split)
    runs = in_runs(outcomes, replicas)
    holder = dealt(outcomes, replicas)

    begun = time.thread_time()
    subset = choose_subset(outcomes, algo)
    assigned, balance = assign_replicas(outcomes, subset, [PROMPT_TOKENS] * PROMPTS, algo, costs, replicas)
    seconds = time.thread_time() - begun

    # Rows that are trained where they were sampled are not sent.
    moving = (assigned >= 0) & (assigned != holder)  # -1: not trained
    sent_bytes = sums(holder[moving], outcomes.tokens[moving], replicas) * TOKEN_BYTES
    return {
        "n": n,
        "replicas": replicas,
        "of": split,
        "generation_runs": efficiency(sums(runs, outcomes.tokens, replicas)),
        "generation": efficiency(sums(holder, outcomes.tokens, replicas)),
        "update_runs": own_update(outcomes, runs, algo, costs, replicas),
        "update": balance,
        "rows": int((assigned >= 0).sum()),
        "seconds": seconds,
        "sent_mib": float(sent_bytes.max()) / 2**20,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="N = 64 on 8 replicas only")
    parser.add_argument("--n", type=int, nargs="+", default=[512, 4096], help="siblings of a prompt")
    parser.add_argument("--replicas", type=int, nargs="+", default=[64, 512])
    parser.add_argument("--json", type=Path, help="write the rows here as a JSON list")
    args = parser.parse_args()
    torch.set_num_threads(1)
    costs = CostModel(pair_cost(parse_shape(MODEL, "model")), limit=32768, share=True)

    print("                                   generation         update")
    print("    N  replicas  mini-batches of   runs  dealt    runs  assigned    rows  seconds  MiB sent by a replica")
    rows = []
    sizes = [(64, 8)] if args.quick else list(product(args.n, args.replicas))
    for n, replicas in sizes:
        for split in ("prompts", "siblings"):
            r = measure(n, replicas, split, costs)
            rows.append(r)
            print(
                f"{n:>5}{replicas:>10}  {split:<15}{r['generation_runs']:>7.3f}{r['generation']:>7.3f}"
                f"{r['update_runs']:>8.3f}{r['update']:>10.4f}{r['rows']:>8}{r['seconds']:>9.2f}{r['sent_mib']:>11.1f}"
            )
    write_rows(args.json, rows)


if __name__ == "__main__":
    main()
