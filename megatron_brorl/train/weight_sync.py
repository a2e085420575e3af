"""Weights from the actor to the engines of all ranks: everywhere or nowhere, and the same everywhere."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist

from megatron_brorl.config.schema import Config
from megatron_brorl.ops.checksum import Sealed
from megatron_brorl.parallel import collectives
from megatron_brorl.parallel.grid import Grid
from megatron_brorl.rollout.engine import RolloutEngine
from megatron_brorl.rollout.registry import ENGINES
from megatron_brorl.rollout.watchdog import Watchdog
from megatron_brorl.rollout.weight_receiver import UpdateRefused
from megatron_brorl.train import verify
from megatron_brorl.train.models import TrainingModels
from megatron_brorl.train.sample_and_score import Rollouts
from megatron_brorl.train.worker import Worker

TRIES = 2


class _StreamChecksum:
    """Passes a stream on and keeps the sum of its checksums."""

    def __init__(self) -> None:
        self.total = torch.zeros((), dtype=torch.int64)

    def through(self, tensors: Iterable[Sealed]) -> Iterator[Sealed]:
        for pair in tensors:
            self.total = self.total + pair.checksum.to(self.total.device)
            yield pair


def refit_engines(models: TrainingModels, rollouts: Rollouts, version: int, config: Config) -> dict[str, float]:
    """Hand the actor's weights to the engines, and check that they compute the same as train.verify_reshard says.

    A collective, which returns metrics.
    """
    engine = rollouts.engine
    # The engine needs the memory; the actor's weights are streamed next.
    models.offload(actor_weights=False)
    engine.wake()
    metrics = {"refit_again": float(refit(models.actor, engine, version))}
    when = config.train.verify_reshard
    if when == "always" or (when == "auto" and config.rollout.engine in ENGINES):
        gap, again = verify.verify_reshard(models.actor, engine, version, config)
        metrics |= verify.metrics(gap)
        metrics["refit_again"] += again
    models.offload()
    dist.barrier()  # an engine takes memory for keys and values when one of its ranks generates: all have made room
    return metrics


def refit(worker: Worker, engine: RolloutEngine | Watchdog, version: int) -> int:
    """Hand the actor's weights to this rank's engine; a collective. Returns how often they had to be sent again.

    Raises UpdateRefused on every rank where an engine still refused at the last try, or where two ranks were sent
    different bytes. Engines may then hold different versions: the caller must not sample from them.
    """
    for again in range(TRIES):
        checksum, refused = _StreamChecksum(), None
        try:
            engine.update_weights(checksum.through(worker.hf_tensors()), version)
        except UpdateRefused as e:
            refused = e
            print(f"brorl: rank {worker.grid.rank}, version {version}: {e}", file=sys.stderr, flush=True)
        problem = _agree(worker.grid, int(checksum.total), refused is not None)
        if not problem:
            return again
    raise refused or UpdateRefused(f"weight update: version {version}: {problem}")


def _agree(grid: Grid, total: int, refused: bool) -> str:
    """What is wrong over all ranks, or "" where all of them hold the same bytes."""
    # Halves of 32 bits, which float64 holds exactly; the least value is minus the greatest negated one.
    low, high = float(total & 0xFFFFFFFF), float(total >> 32)
    most = collectives.all_reduce_max(
        {"refused": float(refused), "low": low, "-low": -low, "high": high, "-high": -high}
    )
    if most["refused"]:
        return f"refused by the engine of another rank of {grid.world}"
    if most["low"] != -most["-low"] or most["high"] != -most["-high"]:
        return "the ranks were sent different bytes (their copies of the weights differ)"
    return ""
