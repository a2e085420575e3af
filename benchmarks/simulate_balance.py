#!/usr/bin/env python3
"""How long replicas wait for each other, by the project's own dealing and assignment, on drawn response lengths.

    python benchmarks/simulate_balance.py [--quick] [--n N ...] [--replicas R ...] [--seeds K] [--json FILE]

128 prompts of 200 tokens with N responses each, log-normal: standard deviation 0.5 of the logarithm between prompts and
0.5 within, 8,192 tokens in the mean before they are cut off at 14,336. 62% of the groups are kept and trained in 8
mini-batches by a model of 1.5 billion weights. "runs" is what the project did before: whole prompts per replica,
trained where they were sampled. Generation is the mean over replicas of the tokens that they sample by their maximum;
an update is the same of predicted cost, with both added up over optimizer steps. Seconds are processor time of planning
one step, on one thread.

A second table has generation in virtual time (generation_clock.py), by the code that real ranks run: how long an engine
has rows, mean over engines by the time of the last ("busy"), and that time against that of the first way ("time").
"dealt": engines sample what they were dealt; "pulled": what waits goes to whoever has room (rollout.work_stealing),
which is what rollout.pull does. A decoding step takes the time of WEIGHTS rows for the weights, and that of one for
each row's keys and values: 3.1 GB, and 4,000 tokens of 28 KiB at 3.35 TB/s. 96 rows of 14,536 tokens are 37 GiB of
keys and values.

A third table has eight engines, one half as fast as six others and one twice. Both are means over K seeds, "busy" with
the least of them.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench_common import write_rows
from generation_clock import Clock, How, Step

from megatron_brorl.checkpoints.random_init import qwen2_config
from megatron_brorl.config.schema import AlgoConfig
from megatron_brorl.model_shape import parse_shape
from megatron_brorl.parallel.balance import CostModel, pair_cost
from megatron_brorl.rollout.sampler import deal
from megatron_brorl.train.assignment import assign_rows
from megatron_brorl.train.exchange import TOKEN_BYTES
from megatron_brorl.train.groups import STOP, Outcomes, mini_batch_of, trained

PROMPTS, PROMPT_TOKENS, MINI_BATCHES, KEPT = 128, 200, 8, 0.62
MEAN, LONGEST, SPREAD = 8192, 14336, 0.5
WEIGHTS = 27.0
IN_FLIGHT = (32, 96, 128)
SPEEDS = (0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 2.0)
MODEL = qwen2_config(hidden=1536, layers=28, heads=12, kv_heads=2, ffn=8960, vocab=151936, context=32768)


def drawn(n: int, seed: int) -> Outcomes:
    """A step's tables: lengths, and which groups are kept."""
    rng = np.random.default_rng(seed)
    between, within = rng.normal(0, SPREAD, (PROMPTS, 1)), rng.normal(0, SPREAD, (PROMPTS, n))
    lengths = MEAN * np.exp(between + within - SPREAD**2)  # the mean of each exponential is exp(SPREAD^2 / 2)
    tokens = torch.from_numpy(lengths.clip(1, LONGEST).astype(np.int64))
    kept = np.sort(rng.permutation(PROMPTS)[: round(KEPT * PROMPTS)]).tolist()

    state, none = torch.full_like(tokens, STOP), torch.zeros_like(tokens)
    return Outcomes(state, none.float(), none.bool(), tokens, none, none, none, list(range(PROMPTS)), kept)


def efficiency(loads: np.ndarray) -> float:
    """Mean over replicas by maximum, with steps [steps, replicas] added up."""
    return float(loads.mean(-1).sum() / loads.max(-1).sum())


def in_runs(outcomes: Outcomes, replicas: int) -> torch.Tensor:
    """The replica of every rollout where each gets a run of them, in (group, sibling) order."""
    rows = outcomes.tokens.numel()
    cuts = [rows * i // replicas for i in range(1, replicas)]
    return torch.bucketize(torch.arange(rows), torch.tensor(cuts), right=True).view_as(outcomes.tokens)


def dealt(outcomes: Outcomes, replicas: int) -> torch.Tensor:
    """The replica of every rollout as the project deals them."""
    holder = torch.empty_like(outcomes.tokens)
    for i, slots in enumerate(deal(list(product(range(holder.shape[0]), range(holder.shape[1]))), [0] * replicas)):
        group, sibling = torch.tensor(slots).T
        holder[group, sibling] = i
    return holder


def sums(holder: torch.Tensor, values: torch.Tensor, replicas: int) -> np.ndarray:
    return np.bincount(holder.flatten().numpy(), weights=values.flatten().numpy(), minlength=replicas)


def old_update(outcomes: Outcomes, holder: torch.Tensor, algo: AlgoConfig, costs: CostModel, replicas: int) -> float:
    """The efficiency where rows are trained by whoever sampled them."""
    group, sibling = trained(outcomes, overlong_filter=False).nonzero(as_tuple=True)
    prompts = torch.full_like(group, PROMPT_TOKENS)
    own, _ = replace(costs, share=False).rows(prompts.numpy(), outcomes.tokens[group, sibling].numpy(), group.numpy())
    place = torch.zeros(PROMPTS, dtype=torch.int64)
    place[outcomes.kept] = torch.arange(len(outcomes.kept))
    step = mini_batch_of(place[group], sibling, MINI_BATCHES, algo.mini_batch_of)
    cells = sums(step * replicas + holder[group, sibling], torch.from_numpy(own), MINI_BATCHES * replicas)
    return efficiency(cells.reshape(MINI_BATCHES, replicas))


def measure(n: int, replicas: int, of: Any, costs: CostModel) -> dict[str, Any]:
    """One row of the table."""
    outcomes = drawn(n, seed=n + replicas)
    algo = AlgoConfig(mini_batches=MINI_BATCHES, mini_batch_of=of)
    runs, holder = in_runs(outcomes, replicas), dealt(outcomes, replicas)

    begun = time.thread_time()
    assigned = assign_rows(outcomes, [PROMPT_TOKENS] * PROMPTS, algo, costs, replicas)
    seconds = time.thread_time() - begun

    # A row that is trained where it was sampled does not travel.
    moving = (assigned.replica >= 0) & (assigned.replica != holder)
    sent = sums(holder[moving], outcomes.tokens[moving], replicas) * TOKEN_BYTES
    return {
        "n": n,
        "replicas": replicas,
        "of": of,
        "generation_runs": efficiency(sums(runs, outcomes.tokens, replicas)),
        "generation": efficiency(sums(holder, outcomes.tokens, replicas)),
        "update_runs": old_update(outcomes, runs, algo, costs, replicas),
        "update": assigned.balance,
        "rows": int((assigned.replica >= 0).sum()),
        "seconds": seconds,
        "sent_mib": float(sent.max()) / 2**20,
    }


def measure_clock(
    n: int, replicas: int, in_flight: int, fixed: float, seeds: int, speeds: Sequence[float] = ()
) -> dict[str, Any]:
    """One row of the second table, or of the third."""
    parts = deal(list(product(range(PROMPTS), range(n))), [0] * replicas)
    clock = Clock(fixed, speeds)
    row: dict[str, Any] = {"n": n, "replicas": replicas, "in_flight": in_flight, "fixed": fixed}
    ways: tuple[How, ...] = ("dealt", "pulled")
    for how in ways:
        found = []
        for seed in range(seeds):
            step = Step(drawn(n, seed=n + replicas + seed).tokens.numpy(), parts, in_flight, clock, how)
            busy, end = step.run()
            found.append((busy.mean() / end, end))
        busy_of, ends = np.array(found).T
        row |= {how: float(busy_of.mean()), f"{how}, least": float(busy_of.min()), f"{how}, end": float(ends.mean())}
    return row


def show_clock(r: dict[str, Any]) -> None:
    """Print a row of measure_clock."""
    print(
        f"{r['n']:>5}{r['replicas']:>10}{r['in_flight']:>11}{r['fixed']:>9.0f}{r['dealt']:>8.3f}{r['pulled']:>8.3f}"
        f"{r['pulled, least']:>7.3f}{r['pulled, end'] / r['dealt, end']:>9.3f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="N = 64 on 8 replicas alone")
    parser.add_argument("--n", type=int, nargs="+", default=[512, 4096], help="siblings of a prompt")
    parser.add_argument("--replicas", type=int, nargs="+", default=[64, 512])
    parser.add_argument("--seeds", type=int, default=1, help="of the lengths, in virtual time")
    parser.add_argument("--json", type=Path, help="write the rows here as a JSON list")
    args = parser.parse_args()
    torch.set_num_threads(1)
    costs = CostModel(pair_cost(parse_shape(MODEL, "model")), limit=32768, share=True)

    print("                                   generation         update")
    print("    N  replicas  mini-batches of   runs  dealt    runs  assigned    rows  seconds  MiB sent by a replica")
    rows = []
    sizes = [(64, 8)] if args.quick else list(product(args.n, args.replicas))
    for n, replicas in sizes:
        for of in ("prompts", "siblings"):
            r = measure(n, replicas, of, costs)
            rows.append(r)
            print(
                f"{n:>5}{replicas:>10}  {of:<15}{r['generation_runs']:>7.3f}{r['generation']:>7.3f}"
                f"{r['update_runs']:>8.3f}{r['update']:>10.4f}{r['rows']:>8}{r['seconds']:>9.2f}{r['sent_mib']:>11.1f}"
            )

    # In virtual time; 512 replicas with N = 512 have 128 rows each, all in flight at once in the last case.
    print("\n                                       busy                     time")
    print("    N  replicas  in flight  weights   dealt  pulled  least   pulled")
    clocks = []
    for (n, replicas), in_flight, fixed in product(sizes, IN_FLIGHT, (0.0, WEIGHTS)):
        clocks.append(measure_clock(n, replicas, in_flight, fixed, args.seeds))
        show_clock(clocks[-1])

    print("\nspeeds", *SPEEDS)
    for in_flight in (16, 32, 64):
        clocks.append(measure_clock(32, 8, in_flight, WEIGHTS, args.seeds, SPEEDS))
        show_clock(clocks[-1])
    write_rows(args.json, [*rows, *clocks])


if __name__ == "__main__":
    main()
