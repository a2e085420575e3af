"""Whole training steps of a tiny actor in a given layout with a fake engine."""

from __future__ import annotations

import time
import warnings
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import product
from pathlib import Path
from typing import Any

import fakes
import pytest
import torch
from dist.jobs import grid_of, make_worker, streamed

from megatron_brorl.checkpoints import training as checkpoint
from megatron_brorl.config.schema import (
    Config,
    EvaluateConfig,
    OptimConfig,
    ParallelConfig,
    RolloutConfig,
    RunConfig,
    TrainConfig,
)
from megatron_brorl.families.shape import read_shape
from megatron_brorl.models.gpt import DTYPES
from megatron_brorl.models.weights.names import hf_shapes
from megatron_brorl.ops import philox
from megatron_brorl.ops.backend import backend
from megatron_brorl.ops.reference import sampling
from megatron_brorl.parallel import grid as grids
from megatron_brorl.parallel.grid import Grid
from megatron_brorl.parallel.network import shared_store
from megatron_brorl.rollout.engine import Sampling
from megatron_brorl.rollout.native.torch_engine import TorchEngine
from megatron_brorl.rollout.sampler import WorkStealing, deal, requests
from megatron_brorl.rollout.watchdog import Watchdog
from megatron_brorl.train.models import CriticWorker, ReferencePolicy, TrainingModels
from megatron_brorl.train.recorder import Recorder
from megatron_brorl.train.sample_and_score import RolloutRunner
from megatron_brorl.train.trainer import Trainer
from megatron_brorl.train.update import critic_optim
from megatron_brorl.train.worker import StageOptions, Worker
from megatron_brorl.types import Prompt, PromptGroup

# Adam's eps well above float32 noise, so that layouts can be compared (see jobs.train_steps).
BASE = Config(
    run=RunConfig(seed=3),
    rollout=RolloutConfig(n=32, prompts=4, max_tokens=12, timeout_s=60.0, max_lost_share=1.0),
    optim=OptimConfig(lr=2e-3, clip_grad=0.5, weight_decay=0.1, eps=1e-3),
    train=TrainConfig(tokens_per_micro_batch=600, checkpoint_every=0),
    evaluate=EvaluateConfig(samples=4),
)


# Replicas cannot have equally many of 3 prompts, so siblings span replicas.
UNEVEN = {"rollout": {"prompts": 3}}
VARIANTS = {
    "prompts": UNEVEN | {"algo": {"mini_batches": 2}},
    "siblings": UNEVEN | {"algo": {"mini_batches": 3, "mini_batch_of": "siblings", "epochs": 2}},
    "one": UNEVEN,
    "critic": UNEVEN
    | {
        "algo": {"advantage": "gae", "lam": 0.95, "mini_batches": 2, "epochs": 2},
        "critic": {"lr": 2e-3, "warmup_steps": 1},
    },
    "reward_kl": UNEVEN
    | {
        "algo": {
            "kl_coef": 0.05,
            "kl_in": "reward",
            "kl_estimator": "k1",
            "mini_batches": 2,
            "mismatch_mask": "sequence",
        },
        "optim": {"lr_for_rollouts": 24},
    },
    "partial": {"rollout": {"prompts": 3, "partial_tokens": 4}, "algo": {"mini_batches": 2}},
}


def configured(changes: dict[str, dict[str, Any]]) -> Config:
    return replace(BASE, **{name: replace(getattr(BASE, name), **values) for name, values in changes.items()})


def _options(config: Config, grid: Grid) -> StageOptions:
    ops = backend(config.ops.implementation, torch.device("cpu"))
    return StageOptions(
        config.train.tokens_per_micro_batch,
        ops,
        DTYPES[config.model.dtype],
        share_prompt=grid.cp_size == 1,
        distributed_optimizer=config.parallel.distributed_optimizer,
        overlap=config.parallel.overlap,
        freeze_router=config.train.freeze_router,
    )


def make_trainer(
    directory: str | Path,
    grid: Grid,
    config: Config,
    engine: Any,
    grace_s: float = 30.0,
    pool: Any = None,
    batch: list[Prompt] | None = None,
) -> Trainer:
    """Return a trainer with fakes. batch: the prompts of every step, in place of an endless sequence."""
    lora = config.lora if config.lora.rank else None
    options = replace(_options(config, grid), lora=lora, seed=config.run.seed)
    worker = Worker(read_shape(directory), grid, options, config.optim)
    worker.load_hf(directory)
    watchdog = Watchdog(engine, config.rollout.timeout_s, grid.rank, grace_s)
    pool = pool or fakes.Pool()
    tokenizer = fakes.Tokenizer()
    max_lost_share = config.rollout.max_lost_share
    stealing = WorkStealing(shared_store()) if config.rollout.pull else None
    rollouts = RolloutRunner(
        watchdog, pool, tokenizer, config.reward, config.run.seed, grid, max_lost_share, work_stealing=stealing
    )
    held_out = fakes.prompts(5, first=1000)
    reference = ReferencePolicy(worker, config.reference) if config.algo.kl_coef else None
    models = TrainingModels(worker, _critic(directory, grid, config), reference)
    return Trainer(config, grid, models, rollouts, fakes.Source(batch), held_out, (fakes.STOP,), started=0.0)


def trainer_of(
    directory: str, parallel: dict[str, Any], changes: dict[str, Any], engine: Any = None, **parts: Any
) -> Trainer:
    """Return a trainer whose engine has no weights yet. changes: the fields that differ from BASE, by section."""
    return make_trainer(directory, grid_of(**parallel), configured(changes), engine or fakes.Engine(), **parts)


def take_steps(trainer: Trainer, steps: int) -> list[dict[str, float]]:
    """Send the weights to the engine and take steps; return the metrics of each."""
    trainer.sync_weights()
    return [trainer.train_step()[0] for _ in range(steps)]


def restore(trainer: Trainer) -> None:
    """Restore the newest checkpoint under run.dir."""
    newest = checkpoint.find(Path(trainer.config.run.dir) / "checkpoints")
    assert newest is not None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # inside Megatron
        trainer.restore(newest)


def _critic(directory: str | Path, grid: Grid, config: Config) -> CriticWorker | None:
    if config.algo.advantage != "gae":
        return None
    optim = critic_optim(config.critic, config.optim)
    critic = CriticWorker(read_shape(directory), grid, _options(config, grid), optim)
    critic.load_hf(directory)
    return critic


def run_steps(
    rank: int, directory: str, parallel: dict[str, Any], changes: dict[str, Any], steps: int, faults: dict[str, Any]
) -> tuple[list[dict[str, float]], dict[str, torch.Tensor], list[Any]]:
    """Return metrics of each step, the final weights, and this rank's requests as (step, prompt, siblings).

    faults: fields of fakes.Engine, for the one rank under the key "rank" or else for all ranks.
    """
    is_faulty = faults.get("rank", rank) == rank
    engine = fakes.Engine(**{k: v for k, v in faults.items() if k != "rank"} if is_faulty else {})
    trainer = trainer_of(directory, parallel, changes, engine)
    metrics = take_steps(trainer, steps)
    requested = [(i, r.prompt.id, range(r.first, r.first + r.n)) for i, call in enumerate(engine.calls) for r in call]
    return metrics, streamed(trainer.models.actor), requested


def recorded(rank: int, directory: str, parallel: dict[str, Any], changes: dict[str, Any], folder: str) -> list[str]:
    """Record two steps and an evaluation; return the files that this rank wrote."""
    trainer = trainer_of(directory, parallel, changes)
    trainer.recorder = Recorder(Path(folder), trainer.config, fakes.Tokenizer().decode, (fakes.STOP,), rank)
    take_steps(trainer, 2)
    trainer.evaluate(fakes.Notes())
    return sorted(path.name for path in Path(folder).glob(f"*.{rank:05d}.parquet"))


def evaluation(_rank: int, directory: str, parallel: dict[str, Any], lose: set[tuple[str, int]]) -> dict[str, Any]:
    trainer = trainer_of(directory, parallel, {}, fakes.Engine(lose=lose))
    trainer.sync_weights()
    return trainer.evaluate(fakes.Notes()).as_dict()


def resumed(
    _rank: int, directory: str, parallel: dict[str, Any], changes: dict[str, Any], steps: int, stop_at: int, root: str
) -> tuple[list[dict[str, float]], dict[str, torch.Tensor], list[dict[str, float]], dict[str, torch.Tensor]]:
    """Take steps and save after `stop_at` of them; then take the rest in a trainer that starts from the checkpoint.

    Return metrics and final weights of both trainers. test_checkpoints.py checks that saving changes no metric.
    """
    trainer = trainer_of(directory, parallel, changes | {"run": {"seed": 3, "dir": root}})
    metrics = take_steps(trainer, stop_at)
    trainer.save()
    metrics += [trainer.train_step()[0] for _ in range(steps - stop_at)]
    return metrics, streamed(trainer.models.actor), *go_on(_rank, directory, parallel, changes, steps - stop_at, root)


def go_on(
    _rank: int, directory: str, parallel: dict[str, Any], changes: dict[str, Any], steps: int, root: str
) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    """Take steps from the checkpoint under `root`, which another layout may have written."""
    trainer = trainer_of(directory, parallel, changes | {"run": {"seed": 3, "dir": root}})
    restore(trainer)
    return take_steps(trainer, steps), streamed(trainer.models.actor)


# Metrics that depend on floating-point order. All other metrics are counts, or sums in the same order.
ROUNDED = {
    *("loss", "grad_norm", "entropy", "approx_kl", "ratio_mean", "ratio_max"),
    *("logprob_gap_mean", "logprob_gap_max", "staleness_mean"),
    *("reference_kl", "explained_variance", "value_mean", "return_mean", "value_loss", "critic_grad_norm"),
}


# Metrics that depend on the layout: shared prompts on several replicas, balance, and bytes sent.
LAYOUT_METRICS = {"token_gain", "update_balance", "moved_mib"}


def assert_same(results, expected):
    """Compare metrics and weights of every rank."""
    expected_metrics, weights = expected[:2]
    for metrics, own_weights, *_ in results:
        for step, (row, expected_row) in enumerate(zip(metrics, expected_metrics, strict=True)):
            assert row.keys() == expected_row.keys()
            for key in row.keys() - LAYOUT_METRICS:
                tolerance = 1e-4 if key in ROUNDED or key.startswith("theory_") else 0
                close = pytest.approx(expected_row[key], rel=tolerance, abs=tolerance, nan_ok=True)
                assert row[key] == close, (step, key)
        for name, value in weights.items():
            assert (own_weights[name] - value).norm() <= 1e-5 * value.norm(), name


@dataclass(frozen=True)
class Drawn:
    """A rollout, and the arguments of the sampler at each of its positions."""

    tokens: list[int]
    uniforms: list[float]
    logits: torch.Tensor  # [tokens, V]


def draw(
    _rank: int, directory: str, parallel: dict[str, Any], prompt_numbers: list[int], n: int, max_rows: int
) -> dict[tuple[str, int], Drawn]:
    """Return this rank's share of n rollouts of each prompt, from the built-in engine, by (prompt id, sibling)."""
    worker = make_worker(directory, parallel)
    arguments: dict[tuple[int, int, int], tuple[float, torch.Tensor]] = {}  # by (key, sibling, position)

    def sample(logits: Any, keys: Any, index: Any, position: Any, *settings: Any) -> tuple[Any, Any]:
        uniforms = philox.uniforms(keys, index, position)
        token_indices = zip(keys.tolist(), index.tolist(), position.tolist(), strict=True)
        arguments.update(zip(token_indices, zip(uniforms.tolist(), logits.clone(), strict=True), strict=True))
        return sampling.sample(logits, uniforms, *settings)

    shape = worker.shape
    engine = TorchEngine(shape, hf_shapes(shape), torch.device("cpu"), torch.float32, max_rows, sample=sample)
    engine.update_weights(worker.hf_tensors(), version=0)
    prompts = [fakes.prompts(1, first=number)[0] for number in prompt_numbers]
    groups = [PromptGroup(prompt, round=7, index=i) for i, prompt in enumerate(prompts)]
    slots = deal(list(product(range(len(groups)), range(n))), loads=[0] * worker.grid.world_size)[worker.grid.rank]
    step_requests, group_numbers = requests(slots, groups, begun={}, seed=1)
    result = Watchdog(engine, timeout_s=300.0).generate(
        step_requests, Sampling(temperature=1.0, top_p=1.0, top_k=0, max_tokens=24, stop_ids=(2, 5, 7, 11))
    )
    samples = {}
    for group, request, rollouts in zip(group_numbers, step_requests, result.rollouts, strict=True):
        for r in rollouts:
            uniforms, logits = zip(*(arguments[request.key, r.index, i] for i in range(len(r.token_ids))), strict=True)
            samples[prompts[group].id, r.index] = Drawn(r.token_ids.tolist(), list(uniforms), torch.stack(logits))
    return samples


def meeting(rank: int) -> str:
    """Let ranks meet a second apart; then rank 1 does not come, and rank 0 waits timeout_s + phase_s."""
    grid_of()
    grid = grids.build(ParallelConfig(timeout_s=0.5), phase_s=3.0)
    if rank == 1:
        time.sleep(1.0)
    grid.barrier()
    if rank == 1:
        shared_store().wait(["rank 0 has waited"], timedelta(seconds=60))
        return ""
    message = "no rank is missing"
    try:
        grid.barrier()
    except RuntimeError as e:
        message = str(e)
    shared_store().set("rank 0 has waited", "")
    return message
