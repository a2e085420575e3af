"""The training loop of BroRL.

One step: prompts -> N rollouts each -> rewards -> groups whose rewards differ -> advantages -> clipped updates -> new
weights for the engine. With algo.dynamic_sampling, a step in which no group has different rewards updates nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import NoReturn

from megatron_brorl import rollout_log, signals
from megatron_brorl.algo.advice import large_first_update
from megatron_brorl.checkpoints import folders
from megatron_brorl.checkpoints import training as checkpoint
from megatron_brorl.checkpoints.folders import Best
from megatron_brorl.checkpoints.training import BackgroundSaver, NotWritten
from megatron_brorl.config.schema import Config
from megatron_brorl.data.source import PromptSource
from megatron_brorl.errors import StepError, UserError
from megatron_brorl.parallel.flops import peak_flops
from megatron_brorl.parallel.grid import Grid
from megatron_brorl.rollout.engine import empty_routes
from megatron_brorl.rollout.registry import ENGINES, START_TIMEOUT_S
from megatron_brorl.tracking.metrics import MetricsWriter
from megatron_brorl.tracking.progress import Progress
from megatron_brorl.tracking.timeline import span, timed
from megatron_brorl.train import state as run_state
from megatron_brorl.train.callbacks import Callbacks
from megatron_brorl.train.carried_groups import checkpoint_files, read_checkpoint
from megatron_brorl.train.collect import Collector
from megatron_brorl.train.console import after_steps_text, console_line, evaluation_line, evaluation_metrics
from megatron_brorl.train.diagnostics import mass_balance_metrics
from megatron_brorl.train.evaluate import Evaluation, sample_answers, summarize
from megatron_brorl.train.experience import make_experience, rollout_advantages, shape_rewards, sharing_metrics
from megatron_brorl.train.groups import Outcomes, group_metrics, mini_batches
from megatron_brorl.train.models import TrainingModels
from megatron_brorl.train.recorder import Recorder, sample_lines
from megatron_brorl.train.redistribute import cost_model
from megatron_brorl.train.sample_and_score import RolloutRunner
from megatron_brorl.train.sampling_params import evaluation_sampling_params, training_sampling_params
from megatron_brorl.train.state import RunState
from megatron_brorl.train.throughput import StepTrace, cluster_metrics
from megatron_brorl.train.update import update_models
from megatron_brorl.train.weight_sync import sudden_gap, sync_engines
from megatron_brorl.types import Prompt, PromptGroup, ScoredRollout

MAX_NONFINITE_STEPS = 5  # steps in a row with non-finite values, after which a run ends


class Ending(Enum):
    """The reasons to end a run after a step. If several apply, the first one listed counts."""

    ENGINE_STUCK = "a rollout engine hangs"
    NONFINITE = "too many steps in a row had non-finite values"
    COMPLETE = "train.steps, train.max_seconds or train.patience is reached"
    STOPPED = "a signal, the end of the Slurm job, or a callback"


@dataclass
class Trainer:
    """Trains the models of a run step by step. Each rank has one, and all ranks call its methods together."""

    config: Config
    grid: Grid
    models: TrainingModels
    runner: RolloutRunner  # the engine and the verifiers
    train_source: PromptSource
    held_out: list[Prompt]
    stop_ids: tuple[int, ...]
    started: float  # Unix time when this process started; a resumed run has had earlier processes
    state: RunState = field(default_factory=RunState)
    recorder: Recorder | None = None
    callbacks: Callbacks = field(default_factory=Callbacks)  # Only the main rank has callbacks.
    background_saver: BackgroundSaver = field(default_factory=BackgroundSaver)

    def __post_init__(self) -> None:
        # Measure with the monotonic clock from here on.
        self._startup_seconds = max(0.0, time.time() - self.started)
        self._clock_start = time.monotonic()
        self._must_save_again = False  # True: a checkpoint could not be written; save after a step even if none is due
        self._nonfinite_steps = 0  # consecutive ones, see count_nonfinite_steps
        self._gaps: list[float] | None = []  # logprob_gap_mean of the steps of this process, until a warning
        self._checkpoint_seconds = {"checkpoint": 0.0, "checkpoint_wait": 0.0}

    @cached_property
    def collector(self) -> Collector:
        """The first half of a step, up to the groups to train on."""
        shape = self.models.actor.shape
        sampling = training_sampling_params(self.config, self.stop_ids, shape.experts)
        no_routes = empty_routes(shape) if sampling.routes else None
        costs = cost_model(self.models.actor)
        return Collector(self.config, self.grid, self.runner, self.train_source, sampling, costs, no_routes)

    def run_seconds(self) -> float:
        """Return the wall-clock seconds of the run, including those before the checkpoint that it was resumed from."""
        return self.state.elapsed_s + self._startup_seconds + time.monotonic() - self._clock_start

    def run(self, writer: MetricsWriter | None, progress: Progress, stop: Callable[[], bool]) -> bool:
        """Train until the run is complete (Ending.COMPLETE), with evaluations and checkpoints between steps.

        Returns False if stop() ended the run early. stop is called after every step and must also report
        callbacks.stop. Raises UserError if a rollout engine hangs, if MAX_NONFINITE_STEPS is reached, or if a
        callback fails before the last step. The completed steps are saved before.
        """
        try:
            return self._run(writer, progress, stop)
        finally:
            # Only an error leaves a background save open here, because a save at the end waits for it.
            self.background_saver.wait_on_error(progress.note)

    def _run(self, writer: MetricsWriter | None, progress: Progress, stop: Callable[[], bool]) -> bool:
        state = self.state
        self.sync_weights()
        if state.initial_evaluation is None and self.held_out:
            state.initial_evaluation = self.evaluate(progress).as_dict()
            progress.note(f"held-out before: {evaluation_line(state.initial_evaluation)}")
            self.runner.raise_if_stuck("no step has completed, so nothing is lost")

        peak = peak_flops()
        while not state.is_complete(self.config.train):
            step = state.step  # the number in metrics.jsonl; train_step() adds 1 to state.step
            signals.step_begins()
            trace = StepTrace(self.config.run, step, self.grid)  # records the spans of this rank from here on
            before, steps_taken = state.model_copy(), self.models.actor.steps_taken  # to save if the step fails
            try:
                # A repeated run has the same metrics unless rollouts or verifiers are too slow. Timings differ.
                metrics, timings = self.train_step()
                before, steps_taken = state, self.models.actor.steps_taken  # the state to save if the evaluation fails
                timings |= cluster_metrics(trace.timeline, timings, metrics["trained_tokens"], peak)
                timings |= self._checkpoint_seconds  # of saving after the previous step
                self._checkpoint_seconds = dict.fromkeys(self._checkpoint_seconds, 0.0)
                # The slowest rank's seconds count, so that all ranks reach train.max_seconds together.
                state.trained_s += timings["ranks/step_slowest"]
                # A complete run is evaluated separately at its end.
                every = self.config.evaluate.every if self.held_out else 0
                is_due = every and state.step % every == 0 and not state.is_complete(self.config.train)
                if is_due and not self.runner.stuck():
                    metrics |= self._evaluate_step(progress, timings)
            except StepError as e:
                if writer and before is state:  # Only the evaluation failed.
                    writer.write(step, metrics, timings)
                self._save_and_raise(e, before, steps_taken, progress)
            if reference := self.models.reference:
                why = reference.reset_reason(state.step, state.reference_stopping.count)
                metrics["reference_reset"] = float(bool(why))
                if why:
                    reference.reset()
                    state.reference_stopping.count = 0
                    progress.note(f"{after_steps_text(state.step)} the reference is now the policy: {why}")

            if writer:
                writer.write(step, metrics, timings)
            progress.update(state.step, console_line(metrics, timings), state.steps_left(self.config.train))
            # The first update of the run is in this step if the run has no updates of other steps.
            is_first_update = metrics["updates"] > 0 and metrics["updates"] == state.updates
            if is_first_update and (advice := large_first_update(metrics, self.config.optim.lr)):
                progress.note(f"warning: {advice}")
            gap = metrics.get("logprob_gap_mean")  # 0 in a step without trained tokens
            if gap and self._gaps is not None:
                self._gaps.append(gap)
                if advice := sudden_gap(self._gaps):
                    progress.note(f"warning: {advice}")
                    self._gaps = None
            with span("callbacks"):
                self.callbacks.call("on_step", step, metrics)  # errors are raised after the state is saved

            self._nonfinite_steps = count_nonfinite_steps(self._nonfinite_steps, metrics)
            ending = self._ending(stop)
            self._save_after_step(ending, metrics, progress)
            trace.write_if_due()
            if ending and ending is not Ending.COMPLETE:
                self._raise_errors(ending)
                return False
        return True

    def train_step(self) -> tuple[dict[str, float], dict[str, float]]:
        """Run one step. Return its metrics, the same on every rank, and this rank's seconds by phase."""
        config = self.config
        state = self.state
        begun = time.monotonic()

        sampling = self.collector.sampling
        with span("collect"):
            collected = self.collector.collect(
                state.carried, state.step, state.source_position, state.updates, state.seconds_left(config.train)
            )
        state.carried = collected.carried  # unfinished and surplus groups, which the next step starts from
        state.source_position = collected.source_position
        groups = collected.groups
        seconds = dict(collected.seconds)

        # Free the engine's memory for training. sync_weights() wakes the engine up again. Without groups to train on,
        # the built-in engine stays awake and keeps its weights. Other engines leave no memory for the diagnostics. With
        # expert parallelism, even ranks without rows compute.
        stays_awake = config.rollout.engine not in ENGINES and not collected.outcomes.kept and self.grid.ep_size == 1
        if not stays_awake:
            self.runner.engine.sleep()
        with timed(seconds, "diagnose"), span("diagnose"):
            mass_balance = mass_balance_metrics(config, state.step, collected, self.models.actor, sampling)

        with timed(seconds, "train"), span("experience"):
            outcomes = shape_rewards(collected.outcomes, config, state.step)
            subset = collected.subset
            advantages = rollout_advantages(outcomes, groups, config.algo, self.models.actor.options.ops)
            experience, metrics = make_experience(
                collected.rollouts, groups, advantages, self.models, config.algo, config.rollout.temperature, subset
            )
        with timed(seconds, "record"):
            if self.recorder:  # The rollout log has a sample of the rollouts, with their rewards before shaping.
                self.recorder.step(state.step, groups, collected.outcomes, collected.recorded, advantages, subset.mask)

        with timed(seconds, "train"), span("update"):
            algo, kept = config.algo, outcomes.kept
            batches = mini_batches(experience.slots, kept, algo.mini_batches, algo.mini_batch_of, subset.deal_order)
            trained = int(subset.mask.sum())  # rollouts of all ranks
            metrics |= update_models(self.models, experience, batches * config.algo.epochs, trained, config, state)

        # Weights that are not finite are neither saved nor sent to the engine.
        state.step += 1
        with timed(seconds, "weight_sync"):
            self.models.require_finite(
                f"the state {after_steps_text(state.step)}",
                "no checkpoint is written, and older ones stay; start a new run from the weights of the last one "
                "(brorl convert to-hf) with a lower learning rate",
            )
            if stays_awake:
                self.models.offload()  # the diagnostics have loaded the actor
                metrics["weight_sync_again"] = 0.0
            else:
                metrics |= self.sync_weights()
        seconds["step"] = time.monotonic() - begun

        metrics |= collected.metrics | mass_balance
        metrics |= sharing_metrics(self.models.actor, experience, sampling.routes)
        if config.shaping.is_on:
            metrics["shaped_reward"] = group_metrics(outcomes)["reward"]
        return metrics, seconds

    def sync_weights(self) -> dict[str, float]:
        """Send the actor's weights to the engines; see weight_sync.sync_engines."""
        # Ranks may wait here for the restart of an engine process, which must not count as a hang. The built-in engine
        # ("torch") has no process.
        allowance_s = 0.0 if self.config.rollout.engine == "torch" else START_TIMEOUT_S
        with span("weight_sync", allowance_s=allowance_s):
            return sync_engines(self.models, self.runner, self.state.updates, self.config)

    def evaluate(self, progress: Progress) -> Evaluation:
        """Evaluate the held-out prompts with the engine's weights, write the samples and print a few of them."""

        def on_samples(groups: Sequence[PromptGroup], rollouts: Sequence[ScoredRollout], outcomes: Outcomes) -> None:
            if self.recorder:
                self.recorder.evaluation(self.state.step, groups, outcomes, rollouts)
            for text in sample_lines(groups, rollouts, self.runner.tokenizer.decode, self.stop_ids):
                progress.note(f"held-out {text}")

        config = self.config.evaluate
        sampling = evaluation_sampling_params(self.config, self.stop_ids)
        with span("evaluate"):
            results = sample_answers(self.runner, self.held_out, config.samples, sampling, on_samples)
            evaluation = summarize(results, len(self.held_out), config, self.runner.seed)
        if evaluation.lost:
            progress.note(evaluation.remark())
        if self.recorder:
            self.grid.barrier()  # callbacks read the files of all ranks
        with span("callbacks"):
            if self.callbacks:
                log_entry = rollout_log.LogEntry("evaluation", self.state.step)
                samples = rollout_log.read_rollouts(Path(self.config.run.dir) / rollout_log.FOLDER, log_entry)
                self.callbacks.call("on_evaluation", self.state.step, evaluation.as_dict(), samples)
        return evaluation

    def _evaluate_step(self, progress: Progress, seconds: dict[str, float]) -> dict[str, float]:
        """Evaluate between two steps and return the metrics."""
        with timed(seconds, "evaluate"):
            evaluation = self.evaluate(progress)
        progress.note(f"held-out {after_steps_text(self.state.step)}: {evaluation_line(evaluation.as_dict())}")
        metrics = evaluation_metrics(evaluation)
        # The actor does not change during the warm-up of the critic, so these evaluations count neither towards
        # train.patience nor towards resets of the reference policy.
        if not 0 < self.state.critic_steps <= self.config.critic.warmup_steps:
            self.state.early_stopping.record(metrics["pass_at_1"])
            self.state.reference_stopping.record(metrics["pass_at_1"])
        return metrics

    def _ending(self, stop: Callable[[], bool]) -> Ending | None:
        """Return why the run ends after this step, or None if it continues. All ranks return the same."""
        applies = {
            Ending.STOPPED: stop(),
            Ending.ENGINE_STUCK: self.runner.stuck(),
            Ending.NONFINITE: self._nonfinite_steps >= MAX_NONFINITE_STEPS,
            Ending.COMPLETE: self.state.is_complete(self.config.train),
        }
        return next((ending for ending in Ending if applies[ending]), None)

    def _raise_errors(self, ending: Ending) -> None:
        """Raise UserError if the run ends with an error. The state has been saved."""
        saved = f"the state {after_steps_text(self.state.step)} is saved"
        if ending is Ending.ENGINE_STUCK:
            self.runner.raise_if_stuck(saved)
        elif ending is Ending.NONFINITE:
            raise UserError(
                f"{self._nonfinite_steps} steps in a row skipped an update because its gradient was not finite, or "
                "left out most of their rollouts because log-probabilities were not finite (updates_skipped and "
                f"nonfinite_rows in metrics.jsonl): {saved}; find out whether the engine or the trainer returns them, "
                "or start a new run from the saved weights (brorl convert to-hf) with a lower learning rate"
            )
        self.callbacks.raise_if_failed(saved)

    def _save_and_raise(self, error: StepError, before: RunState, steps_taken: int, progress: Progress) -> NoReturn:
        """Save the state before a failed step or evaluation, unless the actor or critic has changed, and raise."""
        reason = "the failed step has already changed the weights"
        has_changed = self.models.actor.steps_taken > steps_taken or self.state.critic_updates > before.critic_updates
        self.state = before
        self.check_background_save(progress, wait=True)
        if before.step and not has_changed:
            try:
                self.save()
            except NotWritten as e:
                reason = str(e)
        last = max(folders.by_step(Path(self.config.run.dir) / "checkpoints"), default=0)  # saved step
        lost = f", and steps {last + 1} to {before.step} are lost, because {reason}" if last < before.step else ""
        raise StepError(
            f"{error}; {f'the state {after_steps_text(last)}' if last else 'no state'} is saved{lost}; run the same "
            "command again to continue, with --accept-changed-functions if you have changed the file of a function"
        ) from error.__cause__

    def _save_after_step(self, ending: Ending | None, metrics: dict[str, float], progress: Progress) -> None:
        """Write a checkpoint if one is due, the run ends, the last one failed, or this one is the best."""
        config = self.config.train
        every = config.checkpoint_every
        is_due = bool(ending or (every and self.state.step % every == 0))
        # A new save waits for the one in the background anyway, and new_best depends on whether that one succeeds.
        needs_result = is_due or bool(config.keep_best and "pass_at_1" in metrics)
        self.check_background_save(progress, wait=needs_result)
        best = run_state.new_best(self.config, self.state, metrics)
        if not (is_due or self._must_save_again or best):
            return
        try:
            self.save(best, in_background=not ending)
            self._must_save_again = False
        except NotWritten as e:
            # A run that stops early is resumed from this checkpoint. A complete run still exports its model.
            if ending and ending is not Ending.COMPLETE:
                raise
            self._must_save_again = True
            next_try = "the model is still exported" if ending else "the next step tries again"
            progress.note(f"warning: {e}; {next_try}")

    def save(self, new_best: Best | None = None, in_background: bool = False) -> None:
        """Write a checkpoint. Raises NotWritten on all ranks if it cannot be written.

        new_best: set if this is the best checkpoint so far. in_background: copy the state, return, and write the copy
        while the run continues; see check_background_save.
        """
        with timed(self._checkpoint_seconds, "checkpoint"), span("checkpoint"):
            self._wait_for_background_save()
            run = self.state.model_copy(update={"elapsed_s": self.run_seconds(), "best": new_best or self.state.best})
            save = checkpoint.begin(
                root=Path(self.config.run.dir) / "checkpoints",
                step=self.state.step,
                models=self.models.checkpoint_parts(),
                run=run.model_dump(),
                keep=self.config.train.keep_checkpoints,
                files=checkpoint_files(self.state.carried, self.grid),
                copy=in_background,
            )
            save.best = new_best
            if in_background:
                self.background_saver.start(save, timedelta(seconds=self.config.parallel.timeout_s))
            else:
                save.write()
                save.raise_if_failed()
                self.state.best = new_best or self.state.best

    def check_background_save(self, progress: Progress, wait: bool) -> None:
        """If the checkpoint in the background could not be written, log a warning and set _must_save_again.

        wait: wait if it is still being written. Otherwise a later call checks it.
        """
        with timed(self._checkpoint_seconds, "checkpoint_wait"):
            try:
                if wait or not self.background_saver.busy():
                    self._wait_for_background_save()
            except NotWritten as e:
                self._must_save_again = True
                progress.note(f"warning: {e}; saving the current state instead")

    def _wait_for_background_save(self) -> None:
        """Wait for the checkpoint that is being written, if there is one. Raises NotWritten if that fails."""
        written = self.background_saver.wait()
        if written and written.best:
            self.state.best = written.best

    def restore(self, directory: Path) -> None:
        """Continue from a checkpoint, whose fingerprint the caller has checked. Collective."""
        train, root = self.config.train, directory.parent
        restored = run_state.read_state(directory)  # checks run.json before any weight changes
        checkpoint.load(directory, self.models.checkpoint_parts())
        remedy = f"delete it and {root / folders.LATEST} to continue from an older checkpoint"
        self.models.require_finite(str(directory), remedy)
        restored.fingerprint = self.state.fingerprint
        restored.carried = read_checkpoint(directory, self.train_source, self.grid)
        restored.best = folders.best_so_far(root, restored.best, restored.step, train.keep_best)
        self.state = restored
        if self.grid.rank == 0:
            # A killed run may lack the `best` file, whose checkpoint folders.repair keeps.
            if restored.best and folders.read_best(root) != restored.best:
                folders.write_best(root, restored.best)
            folders.repair(root, restored.step, train.keep_checkpoints)


def count_nonfinite_steps(before: int, metrics: Mapping[str, float]) -> int:
    """Return how many steps in a row, the one with these metrics included, skipped an update or left out most rows."""
    skipped = metrics["updates_skipped"] + metrics.get("critic_updates_skipped", 0.0)
    return before + 1 if skipped or metrics["nonfinite_rows"] > metrics["finite_rows"] else 0
