"""The step of BroRL, readable on one page.

prompts -> N rollouts each -> verdicts -> groups with a signal -> advantages -> clipped updates -> weights to engine

Rollouts may be lost, and may take several steps: a group is trained on with its survivors when none of it goes on.
A step in which no group is kept updates nothing.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

from megatron_brorl.algo.shaping import is_on, shaped
from megatron_brorl.checkpoints import training as checkpoint
from megatron_brorl.config.schema import Config
from megatron_brorl.data.source import PromptSource
from megatron_brorl.errors import UserError
from megatron_brorl.metrics import Lines, MetricsWriter
from megatron_brorl.parallel import collectives
from megatron_brorl.parallel.grid import Grid
from megatron_brorl.progress import Progress
from megatron_brorl.rollout.engine import Sampling
from megatron_brorl.rollout.rows import in_order
from megatron_brorl.rollout.sampler import Slot, open_groups, own_slots, share_with_model_group
from megatron_brorl.train import adaptive
from megatron_brorl.train.advantages import of_rollouts
from megatron_brorl.train.carried import Carried, carry, read, staleness, write
from megatron_brorl.train.diagnose import Look
from megatron_brorl.train.evaluate import Evaluation, evaluate
from megatron_brorl.train.experience import Models, make_experience
from megatron_brorl.train.finite import check_steps, nonfinite_steps
from megatron_brorl.train.groups import (
    CUT,
    Outcomes,
    Selection,
    figures,
    gather,
    give_up,
    log_rows,
    mini_batches,
    select,
)
from megatron_brorl.train.policy import scaled, update_policy
from megatron_brorl.train.reference import Reference
from megatron_brorl.train.refit import refit
from megatron_brorl.train.rollouts import Rollouts, check_lost, check_scored
from megatron_brorl.train.shown import flat, percent, watched
from megatron_brorl.train.stall import Stall
from megatron_brorl.train.value import critic_optim, update_critic
from megatron_brorl.train.verify import verify_reshard
from megatron_brorl.train.worker import CriticWorker, Stage, Worker
from megatron_brorl.types import OpenGroup, Prompt, Rollout, Row


@dataclass(frozen=True)
class Collected:
    """What a step trains on, and what its sampling came to."""

    groups: list[OpenGroup]
    rows: list[Row]  # this replica's, of the groups to train on
    outcomes: Outcomes
    selection: Selection
    values: dict[str, float]  # the same on every rank
    seconds: dict[str, float]


@dataclass
class Trainer:
    """Everything a run consists of; `step`, `updates` and `carried` are its state besides weights and optimizer."""

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
    taken: int = 0  # times that rollout.prompts were taken from the source: once per step, and once per refill
    updates: int = 0  # optimizer steps done
    carried: Carried = field(default_factory=Carried)  # rollouts that go on in the next step
    before: dict[str, Any] | None = None  # the evaluation before step 0
    trained_s: float = 0.0  # seconds of the steps done, of the slowest rank each
    stall: Stall = field(default_factory=Stall)  # of held-out pass@1
    spent: float = 0.0  # seconds of the processes that this one goes on from
    critic: CriticWorker | None = None  # of algo.advantage = "gae"
    critic_updates: int = 0  # its optimizer steps done
    nonfinite_steps: int = 0  # steps in a row, see train.finite; counted anew by every process
    reference: Reference | None = None  # of algo.kl_coef
    rollout_log: Lines | None = None  # of theory.log_rollouts, on one rank

    def run(self, writer: MetricsWriter | None, progress: Progress, stop: Callable[[], bool]) -> bool:
        """Train to train.steps, with checkpoints, or until train.max_seconds or train.patience end it.

        False where stop() (asked at step boundaries) ended it early. Raises UserError, after saving, where a rollout
        engine hangs or train.max_nonfinite_steps is reached.
        """
        t = self.config.train
        self.refit()
        if self.before is None and self.held_out:
            self.before = self.evaluate(progress).as_dict()
            progress.note(f"held-out before: {percent(self.before)}")
            self.check_engines("nothing is lost: no step was done")
        while self.step < t.steps and not self.over():
            values, seconds = self.train_step()
            self.trained_s += collectives.all_reduce_max({"step": seconds["step"]})["step"]
            due = self.config.evaluate.every and self.step % self.config.evaluate.every == 0
            if due and self.held_out and self.step < t.steps and not self.over() and not self.stuck():
                begun = time.monotonic()
                values |= flat(self.evaluate(progress))
                seconds["evaluate"] = time.monotonic() - begun
                self.stall.record(values["pass_at_1"])
            self._reset_reference(values, progress)
            if writer:
                writer.write(self.step - 1, values, seconds)
            progress.update(self.step, watched(values, seconds))
            self.nonfinite_steps, most = nonfinite_steps(self.nonfinite_steps, values), t.max_nonfinite_steps
            stopping, stuck, ending = stop(), self.stuck(), self.step == t.steps or self.over()
            last = stopping or stuck or ending or self.nonfinite_steps >= most
            if last or (t.checkpoint_every and self.step % t.checkpoint_every == 0):
                self.save()
            self.check_engines(f"the state after step {self.step} is saved")
            check_steps(self.nonfinite_steps, most, f"the state after step {self.step} is saved")
            if stopping and not ending:
                return False
        return True

    def over(self) -> bool:
        """Whether train.max_seconds or train.patience ends the run; all ranks get the same answer."""
        t = self.config.train
        out_of_time = bool(t.max_seconds and self.trained_s >= t.max_seconds)
        return out_of_time or bool(t.patience and self.stall.count >= t.patience)

    def train_step(self) -> tuple[dict[str, float], dict[str, float]]:
        """One step; returns its figures (the same on every rank) and the seconds of each phase on this one."""
        c, begun = self.config, time.monotonic()
        got = self._collect()
        if self.rollout_log:
            self.rollout_log.append(log_rows(got.groups, got.outcomes, got.selection.closed, self.step))
        look = self._look(got)
        if look:
            look.before()
        self.rollouts.engine.sleep()  # its memory serves the training; the weights come anew afterwards
        diagnosed = look.diagnose() if look else {}
        training = time.monotonic()
        outcomes = self._shaped(got.outcomes)
        weights, rounds = None, adaptive.rounds_of(c.rollout)
        if rounds:
            earned, weights = adaptive.of_rounds(outcomes, got.selection.kept, rounds)
        else:
            earned = of_rollouts(outcomes, got.selection.kept, c.algo, self.worker.options.ops)
        models = Models(self.worker, self.critic, self.reference)
        rows, experience, values = make_experience(
            got.rows, got.groups, earned, models, c.algo, c.rollout.temperature, weights
        )
        batches = mini_batches(rows, got.selection.kept, c.algo.mini_batches, c.algo.mini_batch_of) * c.algo.epochs
        if self.critic:
            rates = critic_optim(c.critic, c.optim)
            values |= update_critic(self.critic, experience, batches, c.critic.clip, rates, self.critic_updates)
            self.critic_updates += len(batches)
            if self.step < c.critic.warmup_steps:
                batches = []
        optim = scaled(c.optim, c.rollout.prompts * c.rollout.n)
        updated = update_policy(self.worker, experience, batches, c.algo, optim, c.rollout.temperature, self.updates)
        updated["nonfinite_rows"] += values["nonfinite_rows"]
        values |= updated | got.values | diagnosed
        if is_on(c.shaping):
            values["shaped_reward"] = figures(outcomes, got.selection)["reward"]
        trained_at = time.monotonic()
        self.step += 1
        self.updates += len(batches)
        checkpoint.check(self._parts(), self.step)  # neither saved nor handed to an engine
        values |= self.refit()
        refitted = time.monotonic()
        if look:
            values |= look.after(values["lr"] * values["updates"])
        done = time.monotonic()
        tokens = collectives.all_reduce_sum(
            self.worker.tokens(experience.prompts, experience.responses), self.grid.groups.dp
        )
        values["token_gain"] = tokens["plain"] / (tokens["computed"] or 1.0) if tokens["plain"] else 1.0
        seconds = {
            **got.seconds,
            "train": trained_at - training,
            "refit": refitted - trained_at,
            **(look.seconds if look else {}),
            "step": done - begun,
        }
        return values, seconds

    def _collect(self) -> Collected:
        """Sample, score and select; again while too few groups are kept and rollout.refills allows it."""
        c, target = self.config, self.config.rollout.prompts
        groups, rows = list(self.carried.groups), self.carried.finished()
        sums: Counter[str] = Counter()
        seconds: Counter[str] = Counter()
        kept: list[int] = []
        for _ in range(1 + c.rollout.refills):
            prompts = self.train_source.take(self.taken, target)
            groups += open_groups(prompts, self.taken)
            self.taken += 1
            rows = self._sample(rows, groups, len(prompts), sums, seconds)
            outcomes, too_old = give_up(
                self._gather(rows, groups),
                [i for i, g in enumerate(groups) if self.step - int(g.step) >= c.rollout.max_carried_steps],
            )
            check_lost(f"step {self.step}", sums["lost"] + too_old, sums["asked"], c.rollout.max_lost_share)
            check_scored(f"step {self.step}", sums["unscored"], sums["scored"])
            selection = select(outcomes, c.algo.dynamic_sampling)
            kept = selection.kept
            if len(kept) >= target:
                break
        if c.rollout.refills:  # what is kept beyond the target waits for the next step
            selection = selection.without(kept[target:])
        self.carried = carry(groups, rows, selection.closed)
        mine = set(selection.kept)
        trained = [row for row in rows if row.group in mine and row.rollout.finish != "cut"]
        if c.algo.overlong_filter:
            trained = [row for row in trained if row.rollout.finish != "length"]
        values = {
            **figures(outcomes, selection),
            **adaptive.even_figures(outcomes, selection, adaptive.rounds_of(c.rollout)),
            "unscored_share": sums["unscored"] / (sums["scored"] or 1.0),
            "verdict_errors": sums["errors"],
            "lost_share": (sums["lost"] + too_old) / sums["asked"],
            "late": sums["late"],
        }
        if c.rollout.partial_tokens:
            values["carried"] = float((outcomes.state == CUT).sum())
        if c.rollout.refills:
            values |= {"prompts_sampled": sums["asked"] / c.rollout.n, "carried_groups": float(len(kept[target:]))}
        if c.rollout.partial_tokens or c.rollout.refills:
            values |= staleness(trained, self.updates, self.grid)
        return Collected(groups, trained, outcomes, selection, values, dict(seconds))

    def _look(self, got: Collected) -> Look | None:
        """The diagnostics of this step, where theory.every has it."""
        t = self.config.theory
        if not t.every or self.step % t.every:
            return None
        rounds = adaptive.rounds_of(self.config.rollout)
        n = rounds.least if rounds else self.config.rollout.n
        parts = got.groups, got.rows, got.outcomes, got.selection, n, self.worker, self.rollouts
        return Look(t, self.step, *parts, self.sampling())

    def _shaped(self, outcomes: Outcomes) -> Outcomes:
        c, o = self.config, outcomes
        rewards = shaped(o.rewards, o.tokens, o.repeats, c.shaping, c.rollout.max_tokens, self.step)
        return replace(o, rewards=rewards)

    def _sample(
        self, rows: list[Row], groups: list[OpenGroup], new: int, sums: Counter[str], seconds: Counter[str]
    ) -> list[Row]:
        """`rows` and what this replica samples: rollouts that go on, and those of the `new` last groups.

        Adds what they came to, on all ranks, to sums, and this rank's seconds to seconds.
        """
        c, grid, begun = self.config.rollout, self.grid, self.carried.begun()
        loads = self.carried.loads(grid) if c.partial_tokens else [0] * grid.data
        rounds = adaptive.rounds_of(c)

        def sample(slots: list[Slot], begun: Mapping[Slot, Rollout], loads: list[int]) -> None:
            mine = own_slots(list(begun), slots, loads, grid)
            sampled = self.rollouts.sample(mine, groups, self.sampling(), begun)
            rows.extend(share_with_model_group(sampled.rows, grid))
            sums.update(collectives.all_reduce_sum(sampled.counts()))
            seconds.update(sampled.seconds)

        n = rounds.first if rounds else c.n
        sample(list(product(range(len(groups) - new, len(groups)), range(n))), begun, loads)
        if rounds and not self.stuck():
            sample(adaptive.allocate_rest(self._gather(rows, groups), rounds, c), {}, [0] * grid.data)
        return in_order(rows)

    def _gather(self, rows: list[Row], groups: list[OpenGroup]) -> Outcomes:
        """What became of the rollouts so far; a collective."""
        c, n = self.config, self.config.rollout.n
        if c.rollout.adaptive != "off":  # as many columns as the largest group has siblings
            n = int(collectives.all_reduce_max({"n": max((row.rollout.index + 1.0 for row in rows), default=1.0)})["n"])
        return gather(rows, len(groups), n, self.grid.groups.dp, c.shaping.repetition_ngram)

    def stuck(self) -> bool:
        """Whether the engine of any rank was given up; all ranks get the same answer."""
        return self.rollouts.stuck()

    def check_engines(self, state: str) -> None:
        if self.stuck():
            raise UserError(
                f"a rollout engine did not stop when told to (its rank is named above); {state}: start the same "
                "command again to go on"
            )

    def refit(self) -> dict[str, float]:
        """Hand the actor's weights to the engines, and check that they compute the same where that is asked for."""
        for model in self._models():  # the actor's weights are streamed next
            model.offload(weights=model is not self.worker)
        self.rollouts.engine.wake()
        figures = {"refit_again": float(refit(self.worker, self.rollouts.engine, self.updates))}
        if self.config.train.verify_reshard:
            tolerance = self.config.train.verify_tolerance
            figures["reshard_gap_max"] = verify_reshard(self.worker, self.rollouts.engine, self.updates, tolerance)
        self.worker.offload()
        return figures

    def _models(self) -> list[Stage]:
        return [self.worker, *([self.critic] if self.critic else [])]

    def evaluate(self, progress: Progress) -> Evaluation:
        e = self.config.evaluate
        r = self.config.rollout
        stops = self.stop_ids, r.stop_strings
        sampling = Sampling(e.temperature, e.top_p, e.top_k, r.max_tokens, *stops, log_probs=False)
        evaluation = evaluate(self.rollouts, self.held_out, e, sampling)
        if evaluation.lost:
            progress.note(evaluation.remark())
        return evaluation

    def sampling(self) -> Sampling:
        r = self.config.rollout
        return Sampling(
            r.temperature, r.top_p, r.top_k, r.max_tokens, self.stop_ids, r.stop_strings, budget=r.partial_tokens
        )

    def save(self) -> None:
        run = {
            "updates": self.updates,
            "critic_updates": self.critic_updates,
            "taken": self.taken,
            "trained_s": self.trained_s,
            "stalls": [[stall.best, stall.count] for stall in self._stalls()],
            "before": self.before,
            "fingerprint": self.fingerprint,
            "spent": self.seconds(),
        }
        root = Path(self.config.run.dir) / "checkpoints"
        checkpoint.save(
            root,
            self.step,
            self._parts(),
            run,
            self.config.train.keep_checkpoints,
            lambda directory: write(self.carried, directory, self.grid),
        )

    def restore(self, directory: Path) -> None:
        """Go on from a checkpoint whose fingerprint the caller has checked."""
        run = checkpoint.read_run(directory)
        checkpoint.load(directory, self._parts())
        self.step, self.updates = run[checkpoint.STEP], run["updates"]
        self.before, self.spent = run["before"], run["spent"]
        self.critic_updates, self.taken = run["critic_updates"], run["taken"]
        self.trained_s = run["trained_s"]
        for stall, found in zip(self._stalls(), run["stalls"], strict=True):
            stall.best, stall.count = found
        self.carried = read(directory, self.train_source, self.config.rollout.prompts, self.grid)

    def _reset_reference(self, values: dict[str, float], progress: Progress) -> None:
        if self.reference is None:
            return
        if "pass_at_1" in values:
            self.reference.stall.record(values["pass_at_1"])
        why = self.reference.due(self.step, values["reference_kl"])
        values["reference_reset"] = float(bool(why))
        if why:
            self.reference.reset()
            progress.note(f"step {self.step}: the reference is now the policy: {why}")

    def _stalls(self) -> list[Stall]:
        return [self.stall, *([self.reference.stall] if self.reference else [])]

    def _parts(self) -> list[checkpoint.Part]:
        for model in self._models():
            model.reload()
        parts = [checkpoint.Part("", self.worker.actor, self.worker.optimizer)]
        if self.critic:
            parts.append(checkpoint.Part("critic", self.critic.critic, self.critic.optimizer))
        if self.reference:
            parts.append(checkpoint.Part("reference", self.worker.actor, weights=self.reference.weights))
        return parts

    def seconds(self) -> float:
        """Wall-clock seconds of the job so far, up to the checkpoint for processes that were killed."""
        return self.spent + time.time() - self.started
