"""Does every engine compute what the actor computes? Log-probabilities of a probe batch on both sides."""

from __future__ import annotations

from itertools import product

import torch

from megatron_brorl.config.schema import Config
from megatron_brorl.errors import UserError
from megatron_brorl.ops.philox import stream_key, uniforms
from megatron_brorl.parallel import collectives
from megatron_brorl.rollout.engine import Sampling
from megatron_brorl.rollout.sampler import deal, requests
from megatron_brorl.rollout.watchdog import Watchdog
from megatron_brorl.train.exchange import exchange
from megatron_brorl.train.groups import gather
from megatron_brorl.train.worker import Worker
from megatron_brorl.types import OpenGroup, Prompt, ScoredRollout

PROMPTS = 2  # per rank
SIBLINGS = 2
TOKENS = 16  # of a prompt, and of a response at most


def tolerance(config: Config) -> float:
    """train.verify_tolerance, or what stands for its 0."""
    t, r = config.train, config.rollout
    section = getattr(config, r.engine, None)  # of an engine in a process of its own
    if t.verify_tolerance:
        return t.verify_tolerance
    in_fp8 = config.fp8.recipe != "none" or config.fp8.head != "none"
    if in_fp8 or (section and (section.quantization != "none" or section.kv_dtype == "fp8")):
        return 2.0
    return 1e-3 if r.dtype == config.model.dtype == "fp32" else 0.5


def verify_reshard(worker: Worker, engine: Watchdog, version: int, config: Config) -> tuple[float, int]:
    """The largest |log-prob of an engine - log-prob of the actor| in nats over all ranks, and how many times engines
    were started anew because of it; a collective.

    Engines that are processes have one more try, with the same weights. Raises UserError above `tolerance`, or where
    the difference is not a number.
    """
    limit = tolerance(config)
    gap = reshard_gap(worker, engine, version)

    # Checksums are of what was sent; an engine may hold something else.
    again = 0
    if not gap <= limit and engine.renew(f"after version {version} log-probs are {gap:.2e} nats from the actor's"):
        again = 1
        gap = reshard_gap(worker, engine, version)

    # The gap is of all ranks, so that they raise together; written so that NaN would raise too.
    if not gap <= limit:
        raise UserError(
            f"train.verify_reshard: after version {version} an engine's log-probs differ from the actor's by {gap:.2e} "
            f"nats, more than train.verify_tolerance = {limit:g}: the weights did not arrive as they are, or the "
            "arithmetic differs (bf16 on either side needs a larger tolerance)"
        )
    return gap, again


def reshard_gap(worker: Worker, engine: Watchdog, version: int) -> float:
    """The largest |log-prob of an engine - log-prob of the actor| in nats over all ranks, inf where one is not a
    number; a collective.

    Every engine samples siblings of random prompts, whose tokens the actor then scores.
    """
    grid, shape = worker.grid, worker.shape
    # Short, so that a prompt and a response fit the smallest context.
    length = max(1, min(TOKENS, worker.shape.context // 2))

    # Random prompts, the same on every rank, of which each engine samples its share.
    prompts = []
    for i in range(PROMPTS * grid.world):
        name = f"probe {i}"
        # The version is in the key, so that every refit is probed by tokens of its own.
        keys = torch.full((length,), stream_key("verify reshard", version, name))
        places = torch.arange(length)
        ids = (uniforms(keys, places, torch.zeros_like(places)) * shape.vocab).long()
        prompts.append(Prompt(name, "", tuple(ids.tolist()), None, "exact"))

    # Slots and requests as in a step, so that what is checked is what will sample.
    groups = [OpenGroup(p, f"verify {version}", i) for i, p in enumerate(prompts)]
    slots = deal(list(product(range(len(groups)), range(SIBLINGS))), [0] * grid.world)[grid.rank]
    asked, group_of = requests(slots, groups, {}, 0)

    # Neither temperature nor cuts come between logits and log-probabilities.
    sampling = Sampling(1.0, 1.0, 0, max(1, min(TOKENS, shape.context - length)), ())
    result = engine.generate(asked, sampling)

    # Prompts over replicas: any copy of the actor may judge any engine.
    own = [
        ScoredRollout(g, r, 0.0, right=False)
        for g, rollouts in zip(group_of, result.rollouts, strict=True)
        for r in rollouts
    ]
    outcomes = gather(own, len(groups), SIBLINGS)
    replica = (torch.arange(len(groups)) % grid.data)[:, None].expand_as(outcomes.state)
    # What was lost is nobody's to send.
    replica = replica.where(outcomes.holder >= 0, -1)
    rows = [(prompts[row.group], row.rollout) for row in exchange(own, outcomes, replica, grid).rows]
    inputs = [torch.tensor(p.token_ids) for p, _ in rows]
    actual = worker.log_probs(inputs, [r.token_ids for _, r in rows], 1.0)
    gaps = torch.cat([a - r.log_probs for a, (_, r) in zip(actual, rows, strict=True)]).abs()

    # Not a number must not lose in a maximum.
    return collectives.all_reduce_max({"gap": float(gaps.nan_to_num(nan=float("inf")).max())})["gap"]
