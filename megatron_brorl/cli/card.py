"""The model card of a command, from its configuration, its data and what it measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_brorl.checkpoints.model_card import Base, Training

if TYPE_CHECKING:  # they import torch
    from megatron_brorl.cli.build import Session
    from megatron_brorl.train.state import RunState


def of_run(session: Session, state: RunState, after: Mapping[str, Any] | None) -> Training:
    """What a run of reinforcement learning says of itself. after: the evaluation at its end, where there was one."""
    rollout = session.config.rollout
    training = Training(
        run=session.dir.name,
        how="reinforcement learning with verifiable rewards",
        tag="reinforcement-learning",
        base=_base(session),
        sizes=[
            ("steps", str(state.step)),
            ("rollouts per prompt (N)", str(rollout.n)),
            ("prompts per step", str(rollout.prompts)),
        ],
        verifiers=sorted(session.sources.verifiers),
        began=state.began,
        before=state.before,
        after=after,
    )
    return _with_data(training, session)


def of_warm_start(session: Session, began: float) -> Training:
    """Return the card of supervised training, which asks no verifier and evaluates nothing. began: Unix time."""
    sft = session.config.sft
    training = Training(
        run=session.dir.name,
        how="supervised training on solved examples",
        tag="sft",
        base=_base(session),
        sizes=[("optimizer steps", str(sft.steps)), ("examples per step", str(sft.examples_per_step))],
        began=began,
    )
    return _with_data(training, session)


def _base(session: Session) -> Base:
    return Base.of(session.base, Path(session.config.model.path))


def _with_data(training: Training, session: Session) -> Training:
    c = session.config
    tasks = [task.name for task in c.data.tasks]
    return replace(training, files=session.sources.files, tasks=tasks)
