#!/usr/bin/env python3
"""One rank's share of a step's bookkeeping, and how it grows with the number N of rollouts per prompt.

    python benchmarks/bench_growth.py [--quick] [--ranks 64] [--prompts 128] [--json FILE]

Everything that a rank of 64 does in a step but the model's arithmetic: it deals all slots and makes its requests, has
its responses scored (with a verifier and a tokenizer that answer at once), looks for repeated ones, puts its rows into
the tables of all ranks, selects groups, computes advantages, assigns every row to a replica, packs its rows for the
exchange and unpacks those that it gets, and packs these into micro-batches of 16,384 tokens. 128 prompts of 200 tokens;
responses are log-normal with a mean of about 4,096 tokens, cut off at 14,336. The other ranks are played by their
tables. Seconds are processor time on one thread; MiB what the process holds at the peak of a step beyond what it held
before the first one. Exponents are slopes of log seconds over log N, for all N and for the upper half.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from bench_common import write_rows
from measure import forget_peak, status_kib
from random_model import qwen2_config

from megatron_brorl.config.schema import AlgoConfig, ParallelConfig, RewardConfig
from megatron_brorl.model_shape import parse_shape
from megatron_brorl.ops.backend import backend
from megatron_brorl.parallel import collectives, grid
from megatron_brorl.parallel.balance import CostModel, pair_cost
from megatron_brorl.parallel.batch import pack, token_gain
from megatron_brorl.rewards.scoring import Scorer
from megatron_brorl.rollout.duplicates import improbable
from megatron_brorl.rollout.rows import in_order
from megatron_brorl.rollout.sampler import deal, open_groups, requests
from megatron_brorl.train.advantages import of_rollouts
from megatron_brorl.train.assignment import assign_rows
from megatron_brorl.train.exchange import exchange
from megatron_brorl.train.groups import STOP, Outcomes, gather, group_metrics, mini_batches, select
from megatron_brorl.types import Prompt, Rollout, ScoredRollout, Verdict

PROMPT_TOKENS, MICRO_BATCH, MINI_BATCHES, STOP_ID = 200, 16384, 8, 1
MEAN, LONGEST, SPREAD = 4096, 14336, 0.5
MODEL = qwen2_config(hidden=1536, layers=28, heads=12, kv_heads=2, ffn=8960, vocab=151936, context=32768)
PHASES = ("requests", "score", "repeated", "gather", "select", "advantages", "assign", "exchange", "pack")


class Pool:
    """Judges at once."""

    def submit(self, request: Any) -> Future[Verdict]:
        """Right where the answer is below 3 of 7."""
        verdict: Future[Verdict] = Future()
        verdict.set_result(Verdict(float((request.answer or "9") < "3"), "ok"))
        return verdict

    def cancel(self) -> None:
        """Nothing waits."""


def decode(ids: list[int]) -> str:
    """A text of one answer."""
    return f"<answer>{ids[0] % 7}</answer>"


def drawn(prompts: int, n: int, seed: int) -> torch.Tensor:
    """Lengths of all responses [prompts, n] int64."""
    rng = np.random.default_rng(seed)
    spread = rng.normal(0, SPREAD, (prompts, 1)) + rng.normal(0, SPREAD, (prompts, n))
    return torch.from_numpy((MEAN * np.exp(spread - SPREAD**2)).clip(2, LONGEST).astype(np.int64))


class Share:
    """Rank 0 of so many, each a replica of its own, and its step."""

    def __init__(self, prompts: int, n: int, ranks: int, before: int = 0) -> None:
        """before: KiB of the process that are not the step's."""
        self.prompts = [Prompt(f"p/{i}", "", tuple(range(PROMPT_TOKENS)), "1", "exact") for i in range(prompts)]
        self.n, self.ranks, self.lengths = n, ranks, drawn(prompts, n, seed=n)
        self.groups = open_groups(self.prompts, 0)
        self.seconds: dict[str, float] = {}
        self.mib: dict[str, float] = {}
        self.before = before

    @contextmanager
    def phase(self, name: str) -> Any:
        """Time the body."""
        forget_peak()
        begun = time.process_time()
        yield
        self.seconds[name] = time.process_time() - begun
        self.mib[name] = (status_kib("VmHWM") - self.before) / 1024

    def step(self) -> None:
        """All phases, one after the other."""
        algo, ops = AlgoConfig(mini_batches=MINI_BATCHES), backend("fused", torch.device("cpu"))

        # Who samples what, and what this rank's engine made of its share.
        with self.phase("requests"):
            parts = deal(list(product(range(len(self.groups)), range(self.n))), [0] * self.ranks)
            asked, numbers = requests(parts[0], self.groups, {}, seed=0)
        sampled = self.sampled(asked, numbers)

        # Verdicts while others are sampled, in an order of their own.
        with self.phase("score"):
            scorer = Scorer([r.prompt for r in asked], decode, (STOP_ID,), Pool(), RewardConfig())  # type: ignore[arg-type]
            with scorer:
                ended = [(i, r) for i, rollouts in enumerate(sampled) for r in rollouts]
                for i, r in ended:
                    scorer.finished(i, r)
                scores = scorer.scores([(i, r.index) for i, r in ended])
            verdicts = zip(ended, scores.rewards.tolist(), scores.right, strict=True)
            rows = [ScoredRollout(numbers[i], r, reward, right) for (i, r), reward, right in verdicts]
        with self.phase("repeated"):
            hashes, _ = improbable(asked, sampled)
            of_all = torch.cat((hashes, torch.randint(2**62, (self.lengths.numel() - len(hashes),))))
            of_all.unique(return_counts=True)

        # The tables of all ranks; what the collective would add stands in for the others.
        with self.phase("gather"):
            own = gather(rows, len(self.groups), self.n)
        outcomes = self.of_all_ranks(own, parts)
        with self.phase("select"):
            outcomes = select(outcomes)
            group_metrics(outcomes)
        with self.phase("advantages"):
            table = of_rollouts(outcomes, outcomes.kept, algo, ops)

        # Rows to the replicas that train on them.
        costs = CostModel(pair_cost(parse_shape(MODEL, "model")), MICRO_BATCH, share=True)
        with self.phase("assign"):
            assigned = assign_rows(outcomes, [PROMPT_TOKENS] * len(self.groups), algo, costs, self.ranks)
        ranks = SimpleNamespace(
            rank=0, dp_rank=0, world=self.ranks, data=self.ranks, mp_size=1, replicas=[[i] for i in range(self.ranks)]
        )
        with self.phase("exchange"), mock.patch.object(collectives, "all_to_all", _as_if_received):
            trained = exchange(rows, outcomes, assigned.replica, ranks).rows  # type: ignore[arg-type]
            in_order(rows)

        # Rows to micro-batches, one optimizer step after the other.
        with self.phase("pack"):
            ids = {g: torch.tensor(self.prompts[g].token_ids) for g in {r.group for r in trained}}
            advantages = table[[r.group for r in trained], [r.rollout.index for r in trained]]
            columns = [a.expand(len(r.rollout.token_ids)) for a, r in zip(advantages, trained, strict=True)]
            for batch in mini_batches(trained, outcomes.kept, algo.mini_batches, algo.mini_batch_of):
                prompts, responses = (
                    [ids[trained[i].group] for i in batch],
                    [trained[i].rollout.token_ids for i in batch],
                )
                own_columns = [columns[i] for i in batch]
                for packed in pack(prompts, responses, MICRO_BATCH, share=True):
                    packed.gather(own_columns)
                token_gain(prompts, responses, MICRO_BATCH)
        self.rows, self.tokens = len(rows), sum(len(r.rollout.token_ids) for r in rows)

    def sampled(self, asked: list[Any], numbers: list[int]) -> list[list[Rollout]]:
        """What the engine would have made of the requests: rollouts of each."""
        at = [(g, r.first + i) for g, r in zip(numbers, asked, strict=True) for i in range(r.n)]
        lengths = self.lengths[tuple(torch.tensor(at).T)].tolist()
        ids = torch.randint(2, 150000, (sum(lengths),)).split(lengths)
        log_probs = torch.full((sum(lengths),), -0.5).split(lengths)
        found = iter([Rollout(s, i, p, "stop") for (_, s), i, p in zip(at, ids, log_probs, strict=True)])
        return [[next(found) for _ in range(r.n)] for r in asked]

    def of_all_ranks(self, own: Outcomes, parts: list[list[tuple[int, int]]]) -> Outcomes:
        """This rank's tables with the other ranks' rows: 62% of the groups have a signal."""
        holder = torch.empty_like(self.lengths)
        for rank, slots in enumerate(parts):
            holder[tuple(torch.tensor(slots).T)] = rank
        rewards = (torch.rand(self.lengths.shape) < 0.4).float()
        rewards[torch.arange(len(rewards)) >= 0.62 * len(rewards)] = 0.0
        return replace(own, state=torch.full_like(own.state, STOP), rewards=rewards, tokens=self.lengths, holder=holder)


def _as_if_received(parts: list[torch.Tensor], sizes: list[int]) -> torch.Tensor:
    """As collectives.all_to_all: what is sent is put together, and as much comes back as is announced."""
    torch.cat(list(parts))
    return torch.randint(2, 150000, (sum(sizes),), dtype=torch.int32)


def exponent(sizes: list[int], values: list[float]) -> float:
    """The slope of log values over log sizes (least squares)."""
    return float(np.polyfit(np.log(sizes), np.log(np.maximum(values, 1e-6)), 1)[0])


def table(rows: list[dict[str, Any]], of: Callable[[dict[str, Any]], dict[str, float]], digits: int) -> None:
    """Print a figure of every phase by N, with its exponents."""
    sizes = [r["n"] for r in rows]
    upper = len(rows) // 2
    print("           " + "".join(f"{n:>10}" for n in sizes) + "   exponent  upper half")
    for name in of(rows[0]):
        values = [of(r)[name] for r in rows]
        slopes = f"{exponent(sizes, values):>11.2f}{exponent(sizes[upper:], values[upper:]):>12.2f}"
        print(f"{name:<11}" + "".join(f"{v:>10.{digits}f}" for v in values) + slopes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="N = 16, 32, 64, 128 and 16 prompts")
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--prompts", type=int, default=0, help="of a step; 0 = 128, or 16 with --quick")
    parser.add_argument("--json", type=Path, help="write the rows here as a JSON list")
    args = parser.parse_args()
    torch.set_num_threads(1)
    grid.build(ParallelConfig())  # a world of one, whose collectives cost what their own work costs

    sizes = (16, 32, 64, 128) if args.quick else (64, 128, 256, 512, 1024, 2048, 4096)
    prompts, rows = args.prompts or (16 if args.quick else 128), []
    Share(prompts, sizes[0], args.ranks).step()  # imports and first calls
    before = status_kib("VmRSS")
    for n in sizes:
        share = Share(prompts, n, args.ranks, before)
        share.step()
        seconds = share.seconds | {"all": sum(share.seconds.values())}
        rows.append({"n": n, "rows": share.rows, "tokens": share.tokens, "seconds": seconds, "mib": share.mib})
        del share

    print(f"{prompts} prompts, rank 0 of {args.ranks}: its rollouts {[r['rows'] for r in rows]}")
    print("\nseconds")
    table(rows, lambda r: r["seconds"], 3)
    print("\nMiB")
    table(rows, lambda r: {"tokens": 12 * r["tokens"] / 2**20, "peak": max(r["mib"].values())}, 1)
    write_rows(args.json, rows)
    grid.leave()


if __name__ == "__main__":
    main()
