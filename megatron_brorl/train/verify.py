"""Compare the engines with the actor after a weight sync: log-probabilities of a probe batch on both sides."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_brorl.config.schema import Config
from megatron_brorl.errors import UserError
from megatron_brorl.ops.philox import stream_key, uniforms
from megatron_brorl.parallel import cpu_bridge
from megatron_brorl.rollout.engine import Sampling
from megatron_brorl.rollout.sampler import deal, requests
from megatron_brorl.rollout.watchdog import Watchdog
from megatron_brorl.train.groups import gather
from megatron_brorl.train.redistribute import exchange
from megatron_brorl.train.worker import Worker
from megatron_brorl.types import OpenGroup, Prompt, ScoredRollout

PROMPTS = 2  # per rank
SIBLINGS = 2
TOKENS = 16  # of a prompt, and of a response at most


class Gap(NamedTuple):
    """Statistics of |log-prob of an engine - log-prob of the actor| in nats; inf if a log-prob is not a number."""

    mean: float  # of the engine with the largest mean
    p99: float  # over the tokens of all engines
    max: float

    def exceeds(self, tolerance: float) -> bool:
        """Return whether the gap is above the limits: tolerance for the mean, 4 times that for p99, 10 for the max.

        In bfloat16 a logit near 32 moves in steps of 0.25, so single tokens are off by 0.5 nats in a healthy run. Such
        rounding does not move a mean. The limit for the max is for faults that few tokens show, such as one wrong
        row of the vocabulary.
        """
        return not (self.mean <= tolerance and self.p99 <= 4 * tolerance and self.max <= 10 * tolerance)


def gap_of(gaps: Tensor, engines: Tensor) -> Gap:
    """Return the statistics of the tokens' gaps [T]; engines: which engine sampled each token, [T] int64."""
    gaps = gaps.nan_to_num(nan=float("inf"))
    means = [float(gaps[engines == engine].mean()) for engine in engines.unique()]
    return Gap(max(means), float(gaps.quantile(0.99, interpolation="nearest")), float(gaps.max()))


def tolerance(config: Config) -> float:
    """Return train.verify_tolerance, or the default that its 0 means."""
    t, r = config.train, config.rollout
    if t.verify_tolerance:
        return t.verify_tolerance
    in_fp8 = config.fp8.recipe != "none"
    engine_in_fp8 = config.engine.quantization != "none" or config.engine.kv_dtype == "fp8"
    if in_fp8 or (r.engine != "torch" and engine_in_fp8):
        return 0.6
    return 3e-4 if r.dtype == config.model.dtype == "fp32" else 0.3


def verify_reshard(worker: Worker, engine: Watchdog, version: int, config: Config) -> tuple[Gap, int]:
    """Return the gap over all engines and how many engine restarts it caused, 0 or 1; a collective.

    Engines that are processes are restarted once with the same weights. Raises UserError if the gap still exceeds
    `tolerance`.
    """
    limit = tolerance(config)
    gap = reshard_gap(worker, engine, version)

    # Checksums cover the sent bytes. The engine may still hold something else.
    again = 0
    if gap.exceeds(limit) and engine.renew(
        f"after version {version} log-probs are {gap.mean:.2e} nats from the actor's"
    ):
        again = 1
        gap = reshard_gap(worker, engine, version)

    # All ranks have the same gap, so they raise together.
    if gap.exceeds(limit):
        raise UserError(
            f"train.verify_reshard: after version {version} an engine's log-probs differ from the actor's by a mean of "
            f"{gap.mean:.2e} nats (99% quantile {gap.p99:.2e}, maximum {gap.max:.2e}), which train.verify_tolerance = "
            f"{limit:g} does not allow: the weights did not arrive as they are, or the arithmetic differs (bf16 on "
            "either side needs a larger tolerance)"
        )
    return gap, again


def metrics(gap: Gap) -> Mapping[str, float]:
    """Return the gap by the names of metrics.jsonl."""
    return {"reshard_gap_mean": gap.mean, "reshard_gap_p99": gap.p99, "reshard_gap_max": gap.max}


def reshard_gap(worker: Worker, engine: Watchdog, version: int) -> Gap:
    """Return the gap of a probe over all engines; a collective.

    Every engine samples siblings of random prompts, whose tokens the actor then scores.
    """
    grid, shape = worker.grid, worker.shape
    # A prompt and a response must fit the smallest context.
    length = max(1, min(TOKENS, worker.shape.context // 2))

    # All ranks make the same random prompts. Each engine samples its share of them.
    prompts = []
    for i in range(PROMPTS * grid.world):
        name = f"probe {i}"
        # The key has the version, so that each weight sync is probed by other tokens.
        keys = torch.full((length,), stream_key("verify reshard", version, name))
        places = torch.arange(length)
        ids = (uniforms(keys, places, torch.zeros_like(places)) * shape.vocab).long()
        prompts.append(Prompt(name, "", tuple(ids.tolist()), None, "exact"))

    # Slots and requests are made as in a training step, so that the probe takes the same path.
    groups = [OpenGroup(p, f"verify {version}", i) for i, p in enumerate(prompts)]
    slots = deal(list(product(range(len(groups)), range(SIBLINGS))), [0] * grid.world)[grid.rank]
    asked, group_of = requests(slots, groups, {}, 0)

    # Neither temperature nor cuts come between logits and log-probabilities.
    sampling = Sampling(1.0, 1.0, 0, max(1, min(TOKENS, shape.context - length)), ())
    result = engine.generate(asked, sampling)

    # Any replica of the actor can score any engine's responses, so distribute them evenly.
    own = [
        ScoredRollout(g, r, 0.0, right=False)
        for g, rollouts in zip(group_of, result.rollouts, strict=True)
        for r in rollouts
    ]
    outcomes = gather(own, len(groups), SIBLINGS)
    replica = (torch.arange(len(groups)) % grid.data)[:, None].expand_as(outcomes.state)
    # No rank can send a lost response.
    replica = replica.where(outcomes.holder >= 0, -1)
    exchanged = exchange(own, outcomes, replica, grid).rows
    inputs = [torch.tensor(prompts[row.group].token_ids) for row in exchanged]
    actual = worker.log_probs(inputs, [row.rollout.token_ids for row in exchanged], 1.0)

    # Every rank gets the gaps of all tokens; -1 marks positions without a token.
    table = torch.full((len(groups), SIBLINGS, TOKENS), -1.0)
    for row, scored in zip(exchanged, actual, strict=True):
        gaps = (scored - row.rollout.log_probs).abs().nan_to_num(nan=float("inf"))
        table[row.group, row.rollout.index, : len(gaps)] = gaps
    table = table.to(cpu_bridge.default_device())
    dist.all_reduce(table, dist.ReduceOp.MAX)
    table = table.cpu()
    engines = outcomes.holder[:, :, None].expand_as(table)
    return gap_of(table[table >= 0], engines[table >= 0])
