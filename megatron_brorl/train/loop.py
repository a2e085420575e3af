"""The step of BroRL, readable on one page.

prompts -> N rollouts each -> verdicts -> groups with a signal -> advantages -> clipped updates -> weights to engine

A step in which no group is kept updates nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_brorl.checkpoints import training as checkpoint
from megatron_brorl.config.schema import Config
from megatron_brorl.data.source import PromptSource
from megatron_brorl.metrics import Lines, MetricsWriter
from megatron_brorl.parallel.balance import CostModel, pair_cost
from megatron_brorl.parallel.flops import peak_flops
from megatron_brorl.parallel.grid import Grid
from megatron_brorl.progress import Progress
from megatron_brorl.timeline import Timeline, record, span
from megatron_brorl.train import state
from megatron_brorl.train.actor_update import scaled, update_policy
from megatron_brorl.train.advantages import group_advantages, with_shaped_rewards
from megatron_brorl.train.collect import Collector
from megatron_brorl.train.console import console_line, evaluation_line, evaluation_metrics
from megatron_brorl.train.critic_update import critic_optim, update_critic
from megatron_brorl.train.diagnostics import diagnostics_where_due
from megatron_brorl.train.evaluate import Evaluation, evaluate
from megatron_brorl.train.experience import make_experience, token_gain
from megatron_brorl.train.figures import cluster_figures
from megatron_brorl.train.finite import check_steps, nonfinite_steps
from megatron_brorl.train.groups import Outcomes, group_metrics, log_rows, mini_batches
from megatron_brorl.train.record import Recorder
from megatron_brorl.train.reference import ReferencePolicy
from megatron_brorl.train.refit import refit_engines
from megatron_brorl.train.rollouts import Rollouts
from megatron_brorl.train.samples import sample_lines
from megatron_brorl.train.setup import evaluation_sampling, training_sampling
from megatron_brorl.train.state import RunState
from megatron_brorl.train.trace import write_trace
from megatron_brorl.train.training_models import TrainingModels
from megatron_brorl.train.worker import CriticWorker, Worker
from megatron_brorl.types import Experience, OpenGroup, Prompt, ScoredRollout


@dataclass
class Trainer:
    """Everything a run consists of. What a step changes is `state`, weights and optimizers."""

    config: Config
    grid: Grid
    worker: Worker
    rollouts: Rollouts
    train_source: PromptSource
    held_out: list[Prompt]
    stop_ids: tuple[int, ...]
    fingerprint: dict[str, Any]  # what must not change when a run is resumed
    started: float  # Unix time at which this process's part of the job began
    state: RunState = field(default_factory=RunState)
    critic: CriticWorker | None = None  # of algo.advantage = "gae"
    reference: ReferencePolicy | None = None  # of algo.kl_coef
    rollout_log: Lines | None = None  # of theory.log_rollouts, on one rank
    recorder: Recorder | None = None  # of what people can read of the rollouts
    nonfinite_steps: int = 0  # steps in a row, see train.finite; counted anew by every process

    def run(self, writer: MetricsWriter | None, progress: Progress, stop: Callable[[], bool]) -> bool:
        """Train to train.steps, with checkpoints, or until train.max_seconds or train.patience end it.

        False where stop() (asked at step boundaries) ended it early. Raises UserError, after saving, where a rollout
        engine hangs or train.max_nonfinite_steps is reached.
        """
        t, s = self.config.train, self.state

        # What the steps are compared with, once in the life of a run.
        self.refit()
        if s.before is None and self.held_out:
            s.before = self.evaluate(progress).as_dict()
            progress.note(f"held-out before: {evaluation_line(s.before)}")
            self.rollouts.check_stuck("nothing is lost: no step was done")

        peak, trace_every = peak_flops(self.config.run.peak_tflops), self.config.run.trace_every
        while s.step < t.steps and not s.over(t):
            # What every rank does is recorded; where it is drawn too, all begin at a barrier.
            traced, timeline = bool(trace_every) and (s.step + 1) % trace_every == 0, Timeline()
            record(timeline)
            if traced:
                self.grid.barrier()
            origin = timeline.clock()

            # Time counts as the slowest rank's, so that all of them end together.
            metrics, seconds = self.train_step()
            seconds |= cluster_figures(timeline, seconds, metrics["trained_tokens"], peak)
            s.trained_s += seconds["ranks/step_slowest"]
            ending = s.step == t.steps or s.over(t)

            # Held-out prompts, between the first step and the last.
            every = self.config.evaluate.every
            if every and s.step % every == 0 and self.held_out and not ending and not self.rollouts.stuck():
                begun = time.monotonic()
                with span("evaluate"):
                    evaluation = self.evaluate(progress)
                metrics |= evaluation_metrics(evaluation)
                progress.note(f"held-out after step {s.step}: {evaluation_line(evaluation.as_dict())}")
                seconds["evaluate"] = time.monotonic() - begun
                s.stall.record(metrics["pass_at_1"])
            if self.reference:
                self.reference.reset_where_due(s.step, metrics, progress)

            # What the step came to, for files and the console.
            if seconds["recovered"]:
                progress.note(f"step {s.step}: {seconds['recovered']:.0f} rollouts had been sampled before a restart")
            # The file first: a console may be gone.
            if writer:
                writer.write(s.step - 1, metrics, seconds)
            progress.update(s.step, console_line(metrics, seconds))

            # Save before anything ends the run.
            self.nonfinite_steps, most = nonfinite_steps(self.nonfinite_steps, metrics), t.max_nonfinite_steps
            stopping, stuck, ending = stop(), self.rollouts.stuck(), s.step == t.steps or s.over(t)
            last = stopping or stuck or ending or self.nonfinite_steps >= most
            if last or (t.checkpoint_every and s.step % t.checkpoint_every == 0):
                self.save()
            # The checkpoint is part of what is drawn.
            if traced:
                path = Path(self.config.run.dir) / "traces" / f"step_{s.step:06d}.json"
                write_trace(path, timeline, self.grid.rank, origin)
            # What ends a run by an error has saved before it.
            self.rollouts.check_stuck(f"the state after step {s.step} is saved")
            check_steps(self.nonfinite_steps, most, f"the state after step {s.step} is saved")
            if stopping and not ending:
                return False
        return True

    def train_step(self) -> tuple[dict[str, float], dict[str, float]]:
        """One step; returns its metrics (the same on every rank) and the seconds of each phase on this one."""
        c, s, begun = self.config, self.state, time.monotonic()

        # Prompts -> rollouts -> verdicts -> groups.
        sampling = training_sampling(c, self.stop_ids)
        collector = Collector(c, self.grid, self.rollouts, self.train_source, sampling, self._costs())
        with span("collect"):
            collected = collector.collect(s.carried, s.step, s.taken, s.updates)
        s.carried, s.taken = collected.carried, collected.taken
        if self.rollout_log:
            self.rollout_log.append(log_rows(collected.groups, collected.outcomes, s.step))

        # The engine's memory serves the training; the weights come anew afterwards.
        diagnostics = diagnostics_where_due(c, s.step, collected, self.worker, self.rollouts, sampling)
        if diagnostics:
            diagnostics.before_update()
        self.rollouts.engine.sleep()
        diagnosed = diagnostics.diagnose() if diagnostics else {}
        training = time.monotonic()

        # Groups -> advantages.
        outcomes = with_shaped_rewards(collected.outcomes, c, s.step)
        advantages, weights = group_advantages(outcomes, c, self.worker.options.ops)
        # What people can read shows the rewards as they were scored.
        groups, record_s = collected.groups, 0.0
        if self.recorder:
            record_s = self.recorder.step(s.step, groups, collected.outcomes, collected.recorded, advantages)
        with span("experience"):
            rollouts, experience, metrics = make_experience(
                collected.rollouts, groups, advantages, self.models(), c.algo, c.rollout.temperature, weights
            )

        # Advantages -> updates.
        batches = mini_batches(rollouts, outcomes.kept, c.algo.mini_batches, c.algo.mini_batch_of) * c.algo.epochs
        with span("update"):
            metrics |= self._update(experience, batches, metrics["nonfinite_rows"]) | collected.metrics | diagnosed
        if c.shaping.is_on:
            metrics["shaped_reward"] = group_metrics(outcomes)["reward"]
        trained_at = time.monotonic()

        # Updates -> weights; those that are not finite are neither saved nor handed to an engine.
        s.step += 1
        checkpoint.check(self.models().checkpoint_parts(), s.step)
        metrics |= self.refit()
        refitted = time.monotonic()
        if diagnostics:
            metrics |= diagnostics.after_update(metrics["lr"] * metrics["updates"])
        done = time.monotonic()

        # What the step came to, and where its time went.
        metrics["token_gain"] = token_gain(self.worker, experience)
        phases = {"train": trained_at - training - record_s, "refit": refitted - trained_at, "record": record_s}
        seconds = collected.seconds | phases
        seconds["recovered"] = self.rollouts.recovered()  # among them because it differs from run to run as well
        return metrics, seconds | (diagnostics.seconds if diagnostics else {}) | {"step": done - begun}

    def _update(self, experience: Experience, batches: list[list[int]], nonfinite: float) -> dict[str, float]:
        """The critic's optimizer steps and then the actor's; nonfinite: rollouts that were left out before."""
        c, s, metrics = self.config, self.state, {}
        if self.critic:
            rates = critic_optim(c.critic, c.optim)
            metrics = update_critic(self.critic, experience, batches, c.critic.clip, rates, s.critic_updates)
            s.critic_updates += len(batches)
            if s.step < c.critic.warmup_steps:
                batches = []

        optim = scaled(c.optim, c.rollout.prompts * c.rollout.n)
        updated = update_policy(self.worker, experience, batches, c.algo, optim, c.rollout.temperature, s.updates)
        s.updates += len(batches)
        updated["nonfinite_rows"] += nonfinite
        return metrics | updated

    def _costs(self) -> CostModel:
        options = self.worker.options
        limit = options.tokens_per_micro_batch * self.grid.context
        return CostModel(pair_cost(self.worker.shape), limit, options.share_prompt)

    def refit(self) -> dict[str, float]:
        """Hand the actor's weights to the engines; see refit.refit_engines."""
        t = self.config.train
        tolerance = t.verify_tolerance if t.verify_reshard else None
        r = self.rollouts
        with span("refit"):
            return refit_engines(self.models(), r.engine, self.state.updates, tolerance, r.durable)

    def evaluate(self, progress: Progress) -> Evaluation:
        """Of the held-out prompts with the weights that the engines have; a collective."""
        sampling = evaluation_sampling(self.config, self.stop_ids)

        def see(groups: Sequence[OpenGroup], rows: Sequence[ScoredRollout], outcomes: Outcomes) -> None:
            if self.recorder:
                self.recorder.evaluation(self.state.step, groups, outcomes, rows)
            for text in sample_lines(groups, rows, self.rollouts.tokenizer.decode, self.stop_ids):
                progress.note(f"held-out {text}")

        evaluation = evaluate(self.rollouts, self.held_out, self.config.evaluate, sampling, see)
        if evaluation.lost:
            progress.note(evaluation.remark())
        return evaluation

    def models(self) -> TrainingModels:
        """What a step trains and asks about its tokens."""
        return TrainingModels(self.worker, self.critic, self.reference)

    def save(self) -> None:
        """Write a checkpoint; a collective."""
        with span("checkpoint"):
            state.save(self.state, self.models(), self.config, self.grid, self.fingerprint, self.seconds())

    def restore(self, directory: Path) -> None:
        """Go on from a checkpoint whose fingerprint the caller has checked; a collective."""
        self.state = state.restore(directory, self.state, self.models(), self.train_source, self.config, self.grid)

    def seconds(self) -> float:
        """Wall-clock seconds of the job so far, up to the checkpoint for processes that were killed."""
        return self.state.spent + time.time() - self.started
