"""MaxRL and GSPO as functions of a user against the built-in ones, in float64 and in several layouts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from dist.jobs import make_worker, rows
from dist.world import PP, TP
from ops import own_algorithms

from megatron_brorl.algo.advantages import group_advantages
from megatron_brorl.algo.policy_loss import token_weights
from megatron_brorl.config.schema import AlgoConfig
from megatron_brorl.train.update import ActorLoss
from megatron_brorl.types import Experience

FILE = own_algorithms.__file__
BUILT_IN = {"advantage": "maxrl", "ratio": "sequence"}
OWN = {"advantage": f"{FILE}:maxrl", "policy_loss": f"{FILE}:gspo"}


def loss_and_gradients(
    _rank: int, directory: str, parallel: dict[str, Any], algorithm: dict[str, Any]
) -> tuple[float, dict[str, torch.Tensor]]:
    """Return the loss of four groups of six responses, 0 except on the last stage, and this rank's gradients.

    The model is not in Megatron's DistributedDataParallel, whose gradients are float32.
    """
    algo = AlgoConfig(**algorithm)
    worker = make_worker(directory, parallel, dtype=torch.float64)
    prompts, responses = rows(2)
    lengths = [len(r) for r in responses]
    g = torch.Generator().manual_seed(3)
    old = [torch.randn(n, generator=g) * 0.3 - 4 for n in lengths]
    rewards = (torch.rand(4, 6, generator=g) > 0.5).float()
    data_rows = [{"id": str(i), "prompt": "", "answer": None, "metadata": {}} for i in range(4)]
    advantages = group_advantages(rewards, torch.ones(4, 6, dtype=torch.bool), data_rows, algo).flatten()
    experience = Experience(
        prompts=tuple(prompts),
        responses=tuple(responses),
        rollout_log_probs=tuple(x + 0.1 for x in old),
        old_log_probs=tuple(old),
        advantages=tuple(a.expand(n) for a, n in zip(advantages, lengths, strict=True)),
    )
    loss = ActorLoss(experience, algo, token_weights(lengths, "sequence_mean", sum(lengths), len(lengths)))
    values = worker._run(worker.micro_batches(prompts, responses), loss, worker.head(0.9))
    gradients = {name: p.grad for name, p in worker.actor.named_parameters() if p.grad is not None}
    return sum(v.sums["loss"] for v in values), gradients


@pytest.mark.parametrize(("size", "parallel"), [(1, {}), (2, TP), (2, PP)])
def test_loss_and_gradient_equal_the_built_in_ones(worlds, directory, size, parallel):
    job = "test_own_algorithm:loss_and_gradients"
    ((expected, _),) = worlds(1).run(job, directory, {}, BUILT_IN)
    results = (worlds(size).run(job, directory, parallel, algorithm) for algorithm in (OWN, BUILT_IN))
    for rank, ((loss, gradients), (_, wanted)) in enumerate(zip(*results, strict=True)):
        if "pipeline" not in parallel or rank == size - 1:
            assert loss == pytest.approx(expected, rel=1e-6)
        assert gradients.keys() == wanted.keys()
        assert sum(float(x.norm()) for x in wanted.values()) > 0.1
        for name, gradient in wanted.items():
            assert (gradients[name] - gradient).norm() <= 1e-6 * gradient.norm(), name
