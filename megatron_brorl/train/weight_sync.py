"""Send the actor's weights to the engines, and test that both compute the same log-probabilities."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_brorl.config.rules import replays_routes
from megatron_brorl.config.schema import Config
from megatron_brorl.errors import UserError, print_error
from megatron_brorl.ops.checksum import ChecksummedTensor
from megatron_brorl.ops.philox import stream_key, uniforms
from megatron_brorl.parallel import collectives
from megatron_brorl.rollout.engine import RolloutEngine, Sampling
from megatron_brorl.rollout.registry import ENGINES
from megatron_brorl.rollout.sampler import deal, requests
from megatron_brorl.rollout.watchdog import Watchdog
from megatron_brorl.rollout.weight_stream import UpdateRefused
from megatron_brorl.train.models import TrainingModels
from megatron_brorl.train.sample_and_score import RolloutRunner
from megatron_brorl.train.worker import Worker
from megatron_brorl.types import Prompt, PromptGroup

TRIES = 2  # of a weight update
PROMPTS = 2  # of a probe, per rank
SIBLINGS = 2  # responses to each prompt of a probe
TOKENS = 16  # length of a probe's prompt, and largest length of its responses


def sync_engines(models: TrainingModels, runner: RolloutRunner, version: int, config: Config) -> dict[str, float]:
    """Send the actor's weights to all engines and verify them as train.verify_weights says; return metrics. Collective.

    Engines are awake and the training models offloaded afterwards.
    """
    engine = runner.engine
    # The engine needs the memory, but the actor's weights are sent next.
    models.offload(actor_weights=False)
    engine.wake()
    repeats = sync_weights(models.actor, engine, version)
    metrics = {"weight_sync_again": float(repeats)}
    when = config.train.verify_weights
    if when == "always" or (when == "auto" and config.rollout.engine in ENGINES):
        gap, restarts = verify_weights(models.actor, engine, version, config)
        metrics["weight_sync_again"] += restarts
        metrics |= {"reshard_gap_mean": gap.mean, "reshard_gap_p99": gap.p99, "reshard_gap_max": gap.max}
    models.offload()
    # An engine allocates its KV cache when the first of its ranks generates, so all ranks must have freed memory.
    dist.barrier()
    return metrics


def sync_weights(worker: Worker, engine: RolloutEngine | Watchdog, version: int) -> int:
    """Send the actor's weights to this rank's engine; return how often they were sent again. Collective.

    Raises UpdateRefused on all ranks if an engine refused the last try, or if ranks received different bytes. Engines
    may then hold different versions, so the caller must not sample from them.
    """
    for repeats in range(TRIES):
        checksums: list[Tensor] = []
        refused = None
        try:
            engine.update_weights(_noting_checksums(worker.hf_tensors(), checksums), version)
        except UpdateRefused as e:
            refused = e
            print_error(f"brorl: rank {worker.grid.rank}, version {version}: {e}")
        problem = _problem(int(sum(checksums)), refused=refused is not None)
        if not problem:
            return repeats
    raise refused or UpdateRefused(f"weight update: version {version}: {problem}")


def _noting_checksums(tensors: Iterable[ChecksummedTensor], checksums: list[Tensor]) -> Iterator[ChecksummedTensor]:
    for tensor in tensors:
        checksums.append(tensor.checksum)
        yield tensor


def _problem(checksum: int, refused: bool) -> str:
    """Return why the engines of all ranks do not hold the same bytes, or "" if they do."""
    ranks = collectives.all_gather((refused, checksum % 2**64))
    if any(refusal for refusal, _ in ranks):
        return f"refused by the engine of another rank of {len(ranks)}"
    if len(set(ranks)) > 1:
        return "the ranks were sent different bytes (their copies of the weights differ)"
    return ""


class LogProbGap(NamedTuple):
    """Statistics of |log-prob of an engine - log-prob of the actor| in nats; inf if a log-prob is not a number."""

    mean: float  # of the engine with the largest mean
    p99: float  # over the tokens of all engines
    max: float

    def exceeds(self, tolerance: float) -> bool:
        """Return whether the gap exceeds a limit: tolerance for the mean, 4 x tolerance for p99, 10 x for the maximum.

        In bfloat16, single tokens of a healthy run are off by 0.5 nats, and the mean by 0.06. The limit for the maximum
        is for faults that few tokens show, such as one wrong row of the vocabulary.
        """
        return not (self.mean <= tolerance and self.p99 <= 4 * tolerance and self.max <= 10 * tolerance)


def gap_statistics(gaps: Tensor, engines: Tensor) -> LogProbGap:
    """Return the statistics of the tokens' gaps [T]; engines: which engine sampled each token, [T] int64."""
    gaps = gaps.nan_to_num(nan=float("inf"))
    means = [float(gaps[engines == engine].mean()) for engine in engines.unique()]
    return LogProbGap(max(means), float(gaps.quantile(0.99, interpolation="nearest")), float(gaps.max()))


def tolerance(config: Config, experts: bool) -> float:
    """Return train.verify_tolerance in nats; if that is 0, the default for engine, number formats and experts."""
    if config.train.verify_tolerance:
        return config.train.verify_tolerance
    engine_in_fp8 = config.engine.quantization != "none" or config.engine.kv_dtype == "fp8"
    if config.fp8.recipe != "none" or (config.rollout.engine != "torch" and engine_in_fp8):
        return 0.6
    if config.rollout.dtype == config.model.dtype == "fp32":
        return 3e-4
    if experts:  # rounding changes the experts of some tokens
        return 0.3
    return 0.2 if config.rollout.engine == "trtllm" else 0.15  # docs/measurements.md; TensorRT-LLM rounds the logits


def sudden_gap(gaps: Sequence[float]) -> str:
    """Return a warning if the last logprob_gap_mean (nats) is above 4 times the median of those before it, or ""."""
    *earlier, newest = gaps
    if len(earlier) < 4 or not newest > 4 * statistics.median(earlier):
        return ""
    return (
        f"logprob_gap_mean = {newest:.2g} nats is {newest / statistics.median(earlier):.1f} times the median of the "
        'steps before: engine and trainer have begun to differ; train.verify_weights = "always" tests the weights'
    )


def verify_weights(worker: Worker, engine: Watchdog, version: int, config: Config) -> tuple[LogProbGap, int]:
    """Return the gap over all engines and the number of restarts that it caused, 0 or 1. Collective.

    Engines that are processes are restarted once with the same weights. Raises UserError if the gap still exceeds
    `tolerance`.
    """
    limit = tolerance(config, bool(worker.shape.experts))
    routes = replays_routes(config, worker.shape.experts)
    gap = log_prob_gap(worker, engine, version, routes)

    # Checksums cover the bytes that were sent. The engine may still hold other weights.
    restarts = 0
    if gap.exceeds(limit) and engine.restart(
        f"after version {version} log-probs are {gap.mean:.2e} nats from the actor's"
    ):
        restarts = 1
        gap = log_prob_gap(worker, engine, version, routes)

    # All ranks have the same gap, so they raise together.
    if gap.exceeds(limit):
        raise UserError(
            f"train.verify_weights: after version {version} an engine's log-probs differ from the actor's by a mean of "
            f"{gap.mean:.2e} nats (99% quantile {gap.p99:.2e}, maximum {gap.max:.2e}), which train.verify_tolerance = "
            f"{limit:g} does not allow: the weights did not arrive as they are, or the arithmetic differs (bf16 on "
            "either side needs a larger tolerance)"
        )
    return gap, restarts


def log_prob_gap(worker: Worker, engine: Watchdog, version: int, replay_routes: bool = False) -> LogProbGap:
    """Return the gap over all engines on random prompts, which they sample and the actor scores. Collective.

    replay_routes: score tokens with the experts that the engine chose, as training does.
    """
    grid = worker.grid
    shape = worker.shape
    # A prompt and a response must fit the smallest context.
    length = max(1, min(TOKENS, shape.context // 2))

    # All ranks make the same prompts, and each engine samples its share of them.
    prompts = []
    for i in range(PROMPTS * grid.world_size):
        name = f"probe {i}"
        # The key includes the version, so that each weight sync is tested with other tokens.
        keys = torch.full((length,), stream_key("verify reshard", version, name))
        positions = torch.arange(length)
        ids = (uniforms(keys, positions, torch.zeros_like(positions)) * shape.vocab).long()
        prompts.append(Prompt(name, text="", token_ids=tuple(ids.tolist()), answer=None, verifier="exact"))

    # The probe uses the same functions as a training step.
    groups = [PromptGroup(p, f"verify {version}", i) for i, p in enumerate(prompts)]
    slots = deal(list(product(range(len(groups)), range(SIBLINGS))), [0] * grid.world_size)[grid.rank]
    own_requests, group_of = requests(slots, groups, begun={}, seed=0)

    new_tokens = max(1, min(TOKENS, shape.context - length))
    sampling = Sampling(temperature=1.0, top_p=1.0, top_k=0, max_tokens=new_tokens, stop_ids=(), routes=replay_routes)
    result = engine.generate(own_requests, sampling)

    # The probe is small, so every replica of the actor scores all responses.
    own = [(g, r) for g, rollouts in zip(group_of, result.rollouts, strict=True) for r in rollouts]
    rows_by_rank = collectives.all_gather(own)
    rows = [row for own_rows in rows_by_rank for row in own_rows]
    row_prompts = [torch.tensor(prompts[g].token_ids) for g, _ in rows]
    routes = [r.routes for _, r in rows if r.routes is not None] if replay_routes else None
    actor_log_probs = worker.log_probs(row_prompts, [r.token_ids for _, r in rows], temperature=1.0, routes=routes)
    pairs = zip(actor_log_probs, rows, strict=True)
    gaps = torch.cat([(scored.cpu() - r.log_probs).abs() for scored, (_, r) in pairs])
    # Replicas may round differently, and all ranks must take the same decision.
    gaps = collectives.all_reduce_tensor(gaps.nan_to_num(nan=float("inf")), dist.ReduceOp.MAX)
    tokens = torch.tensor([sum(len(r.token_ids) for _, r in own_rows) for own_rows in rows_by_rank])
    return gap_statistics(gaps, torch.arange(len(rows_by_rank)).repeat_interleave(tokens))
