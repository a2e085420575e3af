"""The step of BroRL, readable on one page.

prompts -> N rollouts each -> verdicts -> groups with a signal -> advantages -> clipped update -> weights to engine
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_brorl.algo.selection import keep_informative
from megatron_brorl.config import Config
from megatron_brorl.data.source import PromptSource
from megatron_brorl.errors import UserError
from megatron_brorl.metrics import MetricsWriter
from megatron_brorl.models import checkpoint
from megatron_brorl.parallel import collect
from megatron_brorl.parallel.grid import Grid
from megatron_brorl.progress import Progress
from megatron_brorl.rollout.engine import Sampling
from megatron_brorl.rollout.sampler import own_share, share_with_model_group
from megatron_brorl.train.evaluate import Evaluation, evaluate
from megatron_brorl.train.experience import make_experience
from megatron_brorl.train.policy import update_policy
from megatron_brorl.train.rollouts import Rollouts, figures
from megatron_brorl.train.worker import Worker
from megatron_brorl.types import Prompt

MOST_UNSCORED = 0.5  # with a larger share of failed verdicts a run would train on noise


@dataclass
class Trainer:
    """Everything a run consists of. `step` and `updates` are the only state besides weights and optimizer."""

    config: Config
    grid: Grid
    worker: Worker
    rollouts: Rollouts
    train_source: PromptSource
    held_out: list[Prompt]
    stop_ids: tuple[int, ...]
    fingerprint: dict[str, Any]  # what must not change when a run is resumed
    started: float  # Unix time at which this process's part of the job began
    step: int = 0  # steps done
    updates: int = 0  # optimizer steps done
    before: dict[str, Any] | None = None  # the evaluation before step 0
    spent: float = 0.0  # seconds of the processes that this one goes on from

    def run(self, writer: MetricsWriter | None, progress: Progress, stop: Callable[[], bool]) -> bool:
        """Train to train.steps, with checkpoints; False where stop() (asked at step boundaries) ended it early."""
        every, steps = self.config.train.checkpoint_every, self.config.train.steps
        self.refit()
        if self.before is None and self.held_out:
            self.before = self.evaluate().as_dict()
            progress.note(f"held-out pass@1 before: {_percent(self.before)}")
        while self.step < steps:
            values, seconds = self.train_step()
            due = self.config.evaluate.every and self.step % self.config.evaluate.every == 0
            if due and self.held_out and self.step < steps:
                begun = time.monotonic()
                values |= _flat(self.evaluate())
                seconds["evaluate"] = time.monotonic() - begun
            if writer:
                writer.write(self.step - 1, values, seconds)
            progress.update(self.step, _watched(values, seconds))
            stopping = stop()
            if stopping or self.step == steps or (every and self.step % every == 0):
                self.save()
            if stopping and self.step < steps:
                return False
        return True

    def train_step(self) -> tuple[dict[str, float], dict[str, float]]:
        """One step; returns its figures (the same on every rank) and the seconds of each phase on this one."""
        c, begun = self.config, time.monotonic()
        prompts = self.train_source.take(self.step, c.rollout.prompts)
        sampled = self.rollouts.sample(own_share(prompts, self.grid), c.rollout.n, self.sampling(), self.step)
        groups = share_with_model_group(sampled.groups, self.grid)
        kept = keep_informative(groups)

        training = time.monotonic()
        updates = c.algo.mini_batches * c.algo.epochs
        experience = make_experience(kept, self.worker, c.rollout.temperature, c.algo.old_log_probs, updates)
        sizes = [len(g.rewards) for g in kept]
        update = update_policy(
            self.worker,
            experience,
            sizes,
            c.algo,
            c.optim,
            c.rollout.temperature,
            self.updates,
        )
        trained = time.monotonic()
        self.step += 1
        self.updates += updates
        self.refit()
        done = time.monotonic()

        sums = collect.total(figures(sampled))
        tokens = collect.total(self.worker.tokens(experience.prompts, experience.responses), self.grid.groups.dp)
        kept_groups = collect.total({"kept": len(kept)}, self.grid.groups.dp)["kept"]
        rollouts = sums["rollouts"]
        if sums["unscored"] > MOST_UNSCORED * rollouts:
            raise UserError(
                f"step {self.step}: the verifiers failed on {sums['unscored']:.0f} of {rollouts:.0f} responses "
                "(timeout, crash, exception): most rewards mean nothing; mend the verifier or raise reward.timeout_s"
            )
        values = {
            "reward": sums["reward"] / rollouts,
            "kept_share": kept_groups / sums["groups"],
            "all_right_share": sums["all_right"] / sums["groups"],
            "all_wrong_share": sums["all_wrong"] / sums["groups"],
            "response_tokens": sums["tokens"] / rollouts,
            "cut_off_share": sums["cut_off"] / rollouts,
            "unscored_share": sums["unscored"] / rollouts,
            "rollouts": rollouts,
            "token_gain": tokens["plain"] / (tokens["computed"] or 1.0) if tokens["plain"] else 1.0,
            **update,
        }
        seconds = {
            **sampled.seconds,
            "train": trained - training,
            "refit": done - trained,
            "step": done - begun,
        }
        return values, seconds

    def refit(self) -> None:
        """Hand the actor's weights to the engine."""
        self.rollouts.engine.update_weights(self.worker.hf_tensors(), self.updates)

    def evaluate(self) -> Evaluation:
        e = self.config.evaluate
        sampling = Sampling(e.temperature, e.top_p, e.top_k, self.config.rollout.max_tokens, self.stop_ids)
        return evaluate(self.rollouts, self.held_out, e, sampling, self.grid)

    def sampling(self) -> Sampling:
        r = self.config.rollout
        return Sampling(r.temperature, r.top_p, r.top_k, r.max_tokens, self.stop_ids)

    def save(self) -> None:
        run = {
            "step": self.step,
            "updates": self.updates,
            "before": self.before,
            "fingerprint": self.fingerprint,
            "spent": self.seconds(),
        }
        root = Path(self.config.run.dir) / "checkpoints"
        checkpoint.save(
            root, self.step, self.worker.actor, self.worker.optimizer, run, self.config.train.keep_checkpoints
        )

    def restore(self, directory: Path) -> None:
        """Go on from a checkpoint whose fingerprint the caller has checked."""
        run = checkpoint.read_run(directory)
        checkpoint.load(directory, self.worker.actor, self.worker.optimizer)
        self.step, self.updates, self.before, self.spent = run["step"], run["updates"], run["before"], run["spent"]

    def seconds(self) -> float:
        """Wall-clock seconds of the job so far, up to the checkpoint for processes that were killed."""
        return self.spent + time.time() - self.started


def _percent(evaluation: dict[str, Any]) -> str:
    p = evaluation["pass_at_1"]
    return f"{100 * p['mean']:.1f}% (95% interval {100 * p['low']:.1f} to {100 * p['high']:.1f})"


def _flat(evaluation: Evaluation) -> dict[str, float]:
    p = evaluation.pass_at_1
    return {"pass_at_1": p.mean, "pass_at_1_low": p.low, "pass_at_1_high": p.high}


def _watched(values: dict[str, float], seconds: dict[str, float]) -> dict[str, str]:
    shown = {
        "reward": f"{values['reward']:.3f}",
        "kept": f"{100 * values['kept_share']:.0f}%",
        "tokens": f"{values['response_tokens']:.1f}",
        "gap": f"{values['logprob_gap_max']:.1e}",
        "step": f"{seconds['step']:.1f}s",
    }
    if values["updates_skipped"]:
        shown["updates skipped (gradient not finite)"] = f"{values['updates_skipped']:.0f}"
    if "pass_at_1" in values:
        shown["pass@1"] = f"{100 * values['pass_at_1']:.1f}%"
    return shown
