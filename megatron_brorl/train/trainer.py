"""The step of BroRL, readable on one page.

prompts -> N rollouts each -> verdicts -> groups with a signal -> advantages -> clipped updates -> weights to engine

A step in which no group is kept updates nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from megatron_brorl.checkpoints import training as checkpoint
from megatron_brorl.parallel.flops import peak_flops
from megatron_brorl.tracking.metrics import MetricsWriter
from megatron_brorl.tracking.progress import Progress
from megatron_brorl.tracking.timeline import span
from megatron_brorl.train.assignment import cost_model
from megatron_brorl.train.collect import Collector
from megatron_brorl.train.console import after, console_line, evaluation_line, evaluation_metrics
from megatron_brorl.train.diagnostics import mass_balance_metrics
from megatron_brorl.train.experience import make_experience, rollout_advantages, shape_rewards, token_gain
from megatron_brorl.train.groups import group_metrics, mini_batches, trained
from megatron_brorl.train.keep_best import new_best
from megatron_brorl.train.nonfinite import check_steps, nonfinite_steps
from megatron_brorl.train.run import Run
from megatron_brorl.train.sampling_params import training_sampling
from megatron_brorl.train.state import stalls
from megatron_brorl.train.throughput import cluster_figures
from megatron_brorl.train.trace import StepTrace
from megatron_brorl.train.update import update_models


class Trainer(Run):
    """A run, step by step."""

    def run(self, writer: MetricsWriter | None, progress: Progress, stop: Callable[[], bool]) -> bool:
        """Train to train.steps, with checkpoints, or until train.max_seconds or train.patience end it.

        False where stop() (asked at step boundaries) ended it early. Raises UserError, after saving, where a rollout
        engine hangs, or train.max_nonfinite_steps is reached.
        """
        try:
            return self._run(writer, progress, stop)
        finally:
            self.saving.finish(progress.note)  # an error cuts off nothing that is being written

    def _run(self, writer: MetricsWriter | None, progress: Progress, stop: Callable[[], bool]) -> bool:
        t, s = self.config.train, self.state

        self.refit()
        if s.before is None and self.held_out:
            s.before = self.evaluate(progress).as_dict()
            progress.note(f"held-out before: {evaluation_line(s.before)}")
            self.rollouts.check_stuck("nothing is lost: no step was done")

        peak, unsaved = peak_flops(), False
        while s.step < t.steps and not s.over(t):
            trace = StepTrace(self.config.run, s.step, self.grid)

            # Time counts as the slowest rank's, so that all of them end together.
            # The number in metrics.jsonl: train_step raises s.step, the number of steps done.
            step = s.step
            metrics, seconds = self.train_step()
            seconds |= cluster_figures(trace.timeline, seconds, metrics["trained_tokens"], peak)
            seconds |= self.held_up()  # by what was saved after the step before
            s.trained_s += seconds["ranks/step_slowest"]
            ending = s.step == t.steps or s.over(t)

            every = self.config.evaluate.every
            if every and s.step % every == 0 and self.held_out and not ending and not self.rollouts.stuck():
                begun = time.monotonic()
                with span("evaluate"):
                    evaluation = self.evaluate(progress)
                metrics |= evaluation_metrics(evaluation)
                progress.note(f"held-out {after(s.step)}: {evaluation_line(evaluation.as_dict())}")
                seconds["evaluate"] = time.monotonic() - begun
                # While the actor waits for the critic, its weights do not change, so that no evaluation can be better.
                if not s.critic_warms_up(self.config.critic):
                    for stall in stalls(s, self.models()):
                        stall.record(metrics["pass_at_1"])
            if self.reference:
                self.reference.reset_where_due(s.step, metrics, progress)

            # The file first: a console may be gone.
            if writer:
                writer.write(step, metrics, seconds)
            progress.update(s.step, console_line(step, metrics, seconds))

            # What a program of the user's raises waits for the state to be saved.
            with span("callbacks"):
                self.callbacks.tell("on_step", step, metrics)

            # Save before anything ends the run.
            self.nonfinite_steps, most = nonfinite_steps(self.nonfinite_steps, metrics), t.max_nonfinite_steps
            stopping, stuck, ending = stop(), self.rollouts.stuck(), s.step == t.steps or s.over(t)
            last = stopping or stuck or ending or self.nonfinite_steps >= most
            due = last or bool(t.checkpoint_every and s.step % t.checkpoint_every == 0)
            # One that was written meanwhile and failed is made up for; what is to be beaten is on the disk.
            unsaved = not self.written(progress, wait=due or bool(t.keep_best and "pass_at_1" in metrics)) or unsaved
            best = new_best(self.config, s, metrics)
            if due or unsaved or best:
                # A model that is done is worth more than the checkpoint that it could go on from.
                if last and not ending:
                    self.save(new_best=best)
                else:
                    unsaved = not self.try_save(progress, wait=last, new_best=best)
            trace.write()  # with the checkpoint

            # The state is saved before an error ends the run.
            saved = f"the state {after(s.step)} is saved"
            self.rollouts.check_stuck(saved)
            check_steps(self.nonfinite_steps, most, saved)
            if stopping and not ending:
                self.callbacks.check(saved)
                return False
        return True

    def train_step(self) -> tuple[dict[str, float], dict[str, float]]:
        """One step; returns its metrics (the same on every rank) and the seconds of each phase on this one."""
        c, s, begun = self.config, self.state, time.monotonic()

        # Prompts -> rollouts -> verdicts -> groups.
        sampling = training_sampling(c, self.stop_ids)
        collector = Collector(c, self.grid, self.rollouts, self.train_source, sampling, cost_model(self.worker))
        with span("collect"):
            collected = collector.collect(s.carried, s.step, s.taken, s.updates)
        s.carried, s.taken = collected.carried, collected.taken

        # Training uses the engine's memory. The engine receives the new weights after the update.
        self.rollouts.engine.sleep()
        awake = time.monotonic()
        balance = mass_balance_metrics(c, s.step, collected, self.worker, sampling)
        training = time.monotonic()

        # Groups -> advantages.
        outcomes = shape_rewards(collected.outcomes, c, s.step)
        advantages = rollout_advantages(outcomes, outcomes.kept, c.algo, self.worker.options.ops)
        # What people can read shows the rewards as they were scored.
        groups, record_s = collected.groups, 0.0
        if self.recorder:
            record_s = self.recorder.step(s.step, groups, collected.outcomes, collected.recorded, advantages)
        with span("experience"):
            rollouts, experience, metrics = make_experience(
                collected.rollouts, groups, advantages, self.models(), c.algo, c.rollout.temperature
            )

        # Advantages -> updates.
        batches = mini_batches(rollouts, outcomes.kept, c.algo.mini_batches, c.algo.mini_batch_of) * c.algo.epochs
        with span("update"):
            kept = int(trained(outcomes, c.algo.overlong_filter).sum())  # of all ranks, for the learning rate's rule
            updated = update_models(self.models(), experience, batches, kept, c, s)
        metrics |= updated | collected.metrics | balance
        if c.shaping.is_on:
            metrics["shaped_reward"] = group_metrics(outcomes)["reward"]
        trained_at = time.monotonic()

        # Updates -> weights; those that are not finite are neither saved nor handed to an engine.
        s.step += 1
        checkpoint.check(self.models().checkpoint_parts(), s.step)
        metrics |= self.refit()
        done = time.monotonic()

        metrics["token_gain"] = token_gain(self.worker, experience)
        phases = {"train": trained_at - training - record_s, "refit": done - trained_at, "record": record_s}
        phases["diagnose"] = training - awake
        seconds = collected.seconds | phases
        return metrics, seconds | {"step": done - begun}
