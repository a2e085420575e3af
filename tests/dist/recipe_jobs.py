"""Steps with options of the recipe: equal rewards, references, refills, an actor that must not change."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import fakes
import torch
from dist.jobs import grid_of
from dist.steps import configured, make_trainer

from megatron_brorl.checkpoints import training as checkpoint
from megatron_brorl.families.shape import read_shape
from megatron_brorl.models.weights.names import hf_shapes
from megatron_brorl.ops.fused.decode import FusedDecode, sample_tokens
from megatron_brorl.rollout.native.torch_engine import TorchEngine
from megatron_brorl.train.trainer import Trainer


class Judge(fakes.Pool):
    """Give every answer the same reward."""

    def __init__(self, reward: float) -> None:
        self.reward = reward

    def judge(self, answer: str) -> float:
        return self.reward


def _trainer(
    directory: str, parallel: dict[str, Any], changes: dict[str, Any], reward: float | None, engine: Any = None
) -> Trainer:
    trainer = make_trainer(directory, grid_of(**parallel), configured(changes), engine or fakes.Engine())
    if reward is not None:
        trainer.runner = replace(trainer.runner, pool=Judge(reward))
    return trainer


def _weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.models.actor.hf_tensors()}


def judged(
    _rank: int, directory: str, parallel: dict[str, Any], changes: dict[str, Any], reward: float, steps: int
) -> tuple[list[dict[str, float]], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return the metrics of each step, and the weights before and after."""
    trainer = _trainer(directory, parallel, changes, reward)
    before = _weights(trainer)
    trainer.sync_weights()
    metrics = [trainer.train_step()[0] for _ in range(steps)]
    return metrics, before, _weights(trainer)


def unmoved(
    _rank: int, directory: str, parallel: dict[str, Any], changes: dict[str, Any], steps: int
) -> tuple[list[dict[str, float]], bool]:
    """Take steps with the real engine; return metrics, and whether all weights and masters have the same bits."""
    shape = read_shape(directory)
    engine = TorchEngine(shape, hf_shapes(shape), torch.device("cpu"), torch.float32, 200, sample_tokens, FusedDecode())
    trainer = _trainer(directory, parallel, changes, None, engine)
    before = _weights(trainer)
    trainer.sync_weights()
    metrics = [trainer.train_step()[0] for _ in range(steps)]
    after = _weights(trainer)
    return metrics, all(torch.equal(after[name].view(torch.int32), before[name].view(torch.int32)) for name in before)


def reference_follows(
    _rank: int, directory: str, parallel: dict[str, Any], changes: dict[str, Any], root: str
) -> dict[str, Any]:
    """Take two steps; return the log-probs of actor and reference then, after a reset, and after a checkpoint."""
    trainer = _trainer(directory, parallel, changes | {"run": {"seed": 3, "dir": root}}, None)
    rows = ([torch.tensor([5, 6, 7]), torch.tensor([9, 4])], [torch.tensor([8, 9, 2]), torch.tensor([3])])
    assert trainer.models.reference is not None

    def say(t: Trainer) -> list[list[torch.Tensor]]:
        actor, reference = t.models.actor, t.models.reference
        assert reference is not None
        return [policy.log_probs(*rows, 0.9) for policy in (actor, reference, actor)]

    found: dict[str, Any] = {"start": say(trainer)}
    trainer.sync_weights()
    found["metrics"] = [trainer.train_step()[0] for _ in range(2)]
    found["moved"] = say(trainer)
    found["stepped"] = bool(trainer.models.actor.optimizer.optimizer.state)
    trainer.save()
    again = _trainer(directory, parallel, changes | {"run": {"seed": 3, "dir": root}}, None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # inside Megatron
        again.restore(Path(root) / "checkpoints" / "step_00000002")
    found["restored"] = say(again)
    again.models.reference.reset()  # type: ignore[union-attr]
    found["reset"] = say(again)
    again.sync_weights()
    found["metrics"].append(again.train_step()[0])
    assert checkpoint.find(Path(root) / "checkpoints") is not None
    return found
