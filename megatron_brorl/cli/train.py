"""`brorl train`: reinforcement learning, from a model to a model, with an evaluation before and after."""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Callable
from typing import Any

import torch

from megatron_brorl import ranks
from megatron_brorl.algo.estimators import widest
from megatron_brorl.cli.batch_sizes import batch_line
from megatron_brorl.cli.build import Session
from megatron_brorl.cli.card import of_run
from megatron_brorl.cli.dry_run import dry_run
from megatron_brorl.cli.files import write_json
from megatron_brorl.cli.fingerprint import Changes, change_line, check_fingerprint
from megatron_brorl.cli.program import NOTHING, Program
from megatron_brorl.cli.references import check
from megatron_brorl.config.load import load
from megatron_brorl.config.schema import Config
from megatron_brorl.metrics import METRICS_FILE, read_metrics
from megatron_brorl.progress import progress
from megatron_brorl.record import run_record
from megatron_brorl.report.content import SUMMARY
from megatron_brorl.report.findings import findings
from megatron_brorl.timeline import span
from megatron_brorl.train.callbacks import Callbacks
from megatron_brorl.train.console import evaluation_line, evaluation_metrics
from megatron_brorl.train.keep_best import keep_last
from megatron_brorl.train.loop import Trainer
from megatron_brorl.train.reference import ReferencePolicy
from megatron_brorl.train.state import RunState, saved
from megatron_brorl.train.training_models import TrainingModels


def run(args: argparse.Namespace) -> int:
    """Train as a configuration file says. Returns as execute."""
    words, config = ["train", args.config, *args.overrides], load(args.config, args.overrides)
    if args.dry_run:
        return dry_run(config)
    return execute(config, lambda ranks: run_record.command(words, ranks), NOTHING)


def execute(config: Config, command: Callable[[int], str], program: Program) -> int:
    """Train, from the newest checkpoint where there is one. Returns 0, or ranks.SAVED where it was cut short.

    A signal does that, the end of the job (job_end) or a callback. The model goes to run.dir/model, what came of it to
    run.dir/summary.json. command: what starts it again on so many ranks, for its record.
    """
    begun = time.time()  # before model and data are loaded
    with Session(config, program=program) as session:
        trainer = build_trainer(session, begun)

        # Go on from a checkpoint; files of lines go on with its step.
        found, changes = session.newest_checkpoint(), Changes()
        if found:
            changes = check_fingerprint(saved(found)["fingerprint"], trainer.fingerprint, found)
            trainer.restore(found)
        resume_step = trainer.state.step if found else None  # None starts new files
        writer = session.writer(resume_step)
        trainer.recorder = session.recorder(resume_step)
        # What it was started with, for those who read it later.
        if session.is_main_rank:
            # A summary of an earlier end would show a run that is still going as finished.
            (session.dir / SUMMARY).unlink(missing_ok=True)
            device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
            world = session.grid.world
            values = dataclasses.asdict(config)
            run_record.write(session.dir, values, resume_step, command(world), world, device, changes)

        # Train, and evaluate once more where the steps were not cut short.
        with progress(config.train.steps, "train", session.is_main_rank, start=trainer.state.step) as p:
            p.note(session.report)
            if session.is_main_rank:
                p.note(_sizes(trainer))
            if found:
                p.note(f"resumed from {found} with step {trainer.state.step}")
            if changes:
                p.note(f"changed since that checkpoint: {change_line(changes)}")
            # All ranks agree on a stop, so that all of them leave here or none.
            if not trainer.run(writer, p, lambda: session.stop_requested(trainer.saving.seconds_to_come())):
                p.note(f"{session.stopped_by}; the state is saved: start the same command again to go on")
                return ranks.SAVED
            evaluation = trainer.evaluate(p) if trainer.held_out else None
            after = evaluation.as_dict() if evaluation else None  # beside trainer.state.before
            if evaluation and session.is_main_rank:
                keep_last(config, trainer.state, evaluation_metrics(evaluation))
            if after:
                p.note(f"held-out after: {evaluation_line(after)}")

        # The peak is a sum over ranks: all of them take part in it.
        differs = session.export(trainer.worker, of_run(session, trainer.state, after))
        peak = session.peak_rss_mib()
        if session.is_main_rank:
            from megatron_brorl.cli.report import show  # and matplotlib, which the other ranks do without

            with span("report"):
                summary = _summary(session, trainer, after, peak, differs)
                write_json(session.dir / SUMMARY, summary)
                show(session.dir)
                # Last, for what it raises undoes nothing of the run.
                program.callbacks.tell("on_end", summary)
        program.callbacks.check(f"the run is done, and {session.dir} has all of it")
    return 0


def build_trainer(session: Session, started: float) -> Trainer:
    """The models, engine and verifiers of a run that has not begun. started: Unix time at which the job began."""
    config = session.config
    session.preflight()  # before anything takes memory
    # A verifier that cannot judge these rows ends the run before a model is loaded.
    check(session, [*session.sources.first(), *session.sources.held_out])

    # Engines size their caches by what is free when they start.
    worker = session.worker(config.optim)
    models = TrainingModels(
        worker,
        session.critic(),
        ReferencePolicy(worker, config.reference) if config.algo.kl_coef else None,
    )
    models.offload()

    # Engine and verifiers start last, with what is left.
    return Trainer(
        config=config,
        grid=session.grid,
        worker=worker,
        rollouts=session.rollouts(),
        train_source=session.sources.train,
        held_out=session.sources.held_out,
        callbacks=session.program.callbacks if session.is_main_rank else Callbacks(),
        stop_ids=session.stop_ids,
        fingerprint=session.fingerprint(),
        started=started,
        state=RunState(began=started),
        critic=models.critic,
        reference=models.reference,
    )


def _sizes(trainer: Trainer) -> str:
    """batch_line of the prompts that the next step takes."""
    prompts = trainer.train_source.take(trainer.state.taken.prompts, trainer.config.rollout.prompts)
    longest = max(len(prompt.token_ids) for prompt in prompts)
    limit = trainer.worker.options.tokens_per_micro_batch
    return batch_line(trainer.config, longest, limit, trainer.grid.data, trainer.grid.context)


def _summary(
    session: Session, trainer: Trainer, after: dict[str, Any] | None, peak_rss_mib: float, weights_differ: bool
) -> dict[str, Any]:
    """summary.json: what the run came to. after: the evaluation at its end, as that before its first step.

    weights_differ: whether training has changed any.
    """
    before, best = trainer.state.before, trainer.state.best
    rows = read_metrics(session.dir / METRICS_FILE)

    # Held-out figures first, and whole evaluations further below.
    return {
        "pass_at_1_before": before["pass_at_1"] if before else None,
        "pass_at_1_after": after["pass_at_1"] if after else None,
        **_widest("before", before),
        **_widest("after", after),
        # pass@1 counts correct responses; what a run with partial credit is trained for is the mean reward.
        "mean_reward_before": before["mean_reward"] if before else None,
        "mean_reward_after": after["mean_reward"] if after else None,
        "held_out_prompts": len(trainer.held_out),
        "rollouts_per_prompt": session.config.rollout.n,
        "steps": trainer.state.step,
        "best_checkpoint": {"step": best.step, "figure": best.figure, "value": best.value} if best else None,
        "job_seconds": trainer.seconds(),
        "peak_rss_mib": peak_rss_mib,
        "before": before,
        "after": after,
        "findings": findings(session.config, rows, before, after, weights_differ),
    }


def _widest(when: str, evaluation: dict[str, Any] | None) -> dict[str, float]:
    """{"pass_at_8_before": ...}: pass@k of the largest k, which belongs beside pass@1."""
    found = widest(evaluation["pass_at_k"]) if evaluation else None
    return {f"pass_at_{found[0]}_{when}": found[1]} if found else {}
