"""`brorl train`: reinforcement learning, with an evaluation before and after."""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Callable
from typing import Any

import torch

from megatron_brorl import signals
from megatron_brorl.algo.pass_at_k import widest
from megatron_brorl.checkpoints.model_card import Training
from megatron_brorl.cli.dry_run import dry_run
from megatron_brorl.cli.run_folder import Changes, change_line, check_fingerprint
from megatron_brorl.cli.session import Program, Session
from megatron_brorl.config.load import load
from megatron_brorl.config.schema import Config
from megatron_brorl.files import write_json
from megatron_brorl.report.content import SUMMARY
from megatron_brorl.report.findings import findings
from megatron_brorl.tracking import run_info
from megatron_brorl.tracking.metrics import METRICS_FILE, read_metrics
from megatron_brorl.tracking.progress import progress
from megatron_brorl.tracking.timeline import span
from megatron_brorl.train.callbacks import Callbacks
from megatron_brorl.train.console import evaluation_line, evaluation_metrics
from megatron_brorl.train.keep_best import keep_last
from megatron_brorl.train.models import TrainingModels
from megatron_brorl.train.reference import ReferencePolicy
from megatron_brorl.train.state import RunState, saved
from megatron_brorl.train.trainer import Trainer


def run(args: argparse.Namespace) -> int:
    """Train by a configuration file, see `execute`."""
    words, config = ["train", args.config, *args.overrides], load(args.config, args.overrides)
    if args.dry_run:
        return dry_run(config)
    return execute(config, lambda ranks: run_info.command(words, ranks), Program())


def execute(config: Config, command: Callable[[int], str], program: Program) -> int:
    """Train, from the newest checkpoint if there is one, and write run.dir/model and run.dir/summary.json.

    Returns 0, or signals.SAVED if a signal, the end of the job or a callback stopped the run. command: maps a number of
    ranks to the command line that starts the run on them, for the run's record.
    """
    begun = time.time()  # before model and data are loaded
    with Session(config, program=program) as session:
        trainer = build_trainer(session, begun)

        found, changes = session.newest_checkpoint(), Changes()
        if found:
            changes = check_fingerprint(saved(found)["fingerprint"], trainer.fingerprint, found)
            trainer.restore(found)
        resume_step = trainer.state.step if found else None  # None starts new files
        writer = session.writer(resume_step)
        trainer.recorder = session.recorder(resume_step)
        if session.is_main_rank:
            # The summary of an earlier end would show a running run as finished.
            (session.dir / SUMMARY).unlink(missing_ok=True)
            device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
            world = session.grid.world
            values = dataclasses.asdict(config)
            run_info.write(session.dir, values, resume_step, command(world), world, device, changes)

        with progress(config.train.steps, "train", session.is_main_rank, start=trainer.state.step) as p:
            p.note(session.report)
            if session.is_main_rank:
                p.note(_sizes(trainer))
            if found:
                p.note(f"resumed from {found} with step {trainer.state.step}")
            if changes:
                p.note(f"changed since that checkpoint: {change_line(changes)}")
            if not trainer.run(writer, p, lambda: session.stop_requested(trainer.saving.seconds_to_come())):
                p.note(f"{session.stopped_by}; the state is saved: run the same command again to continue")
                return signals.SAVED
            evaluation = trainer.evaluate(p) if trainer.held_out else None
            after = evaluation.as_dict() if evaluation else None
            if evaluation and session.is_main_rank:
                keep_last(config, trainer.state, evaluation_metrics(evaluation))
            if after:
                p.note(f"held-out after: {evaluation_line(after)}")

        differs = session.export(trainer.worker, _card(session, trainer.state, after))
        peak = session.peak_rss_mib()  # a collective
        if session.is_main_rank:
            from megatron_brorl.cli.report import show  # imports matplotlib

            with span("report"):
                summary = _summary(session, trainer, after, peak, differs)
                write_json(session.dir / SUMMARY, summary)
                show(session.dir)
                program.callbacks.tell("on_end", summary)
        program.callbacks.check(f"the run is complete in {session.dir}")
    return 0


def build_trainer(session: Session, started: float) -> Trainer:
    """Return models, engine and verifiers of a run before its first step. started: Unix time at which it began."""
    config = session.config
    session.preflight()
    session.check_verifiers([*session.sources.first(), *session.sources.held_out])

    # The engine starts last, because it takes the memory that is left.
    worker = session.worker(config.optim)
    models = TrainingModels(
        worker,
        session.critic(),
        ReferencePolicy(worker, config.reference) if config.algo.kl_coef else None,
    )
    models.offload()
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
    """Return batch_line for the prompts of the next step."""
    prompts = trainer.train_source.prompts(trainer.state.taken.prompts, trainer.config.rollout.prompts)
    longest = max(len(prompt.token_ids) for prompt in prompts)
    limit = trainer.worker.options.tokens_per_micro_batch
    return batch_line(trainer.config, longest, limit, trainer.grid.data, trainer.grid.context)


def batch_line(config: Config, longest_prompt: int, limit: int, replicas: int, context: int) -> str:
    """Return the sizes of a step in words: prompts x rollouts -> optimizer steps -> micro-batches.

    The number of micro-batches is an upper bound: for groups that are all kept and responses of rollout.max_tokens.
    longest_prompt: in tokens. limit: tokens of a micro-batch on one rank. context: the context-parallel size.
    """
    c, a = config.rollout, config.algo
    rollouts, steps = c.prompts * c.n, a.mini_batches * a.epochs

    # A micro-batch is full when no further sequence fits; a longer sequence has one of its own.
    fit = max(1, limit * context // (longest_prompt + c.max_tokens - 1))
    rows = -(-rollouts // (a.mini_batches * replicas))
    return (
        f"{_counted(c.prompts, 'prompt')} x {_counted(c.n, 'rollout')} = {rollouts:,} -> "
        f"{_counted(steps, 'optimizer step')} -> {'each ' if steps > 1 else ''}at most "
        f"{_counted(-(-rows // fit), 'micro-batch', 'es')} of up to {limit:,} tokens per rank"
    )


def _counted(count: int, name: str, plural: str = "s") -> str:
    return f"{count:,} {name}{plural if count != 1 else ''}"


def _card(session: Session, state: RunState, after: dict[str, Any] | None) -> Training:
    """Return the model card's content. after: the evaluation at the end."""
    rollout = session.config.rollout
    sizes = {"steps": state.step, "rollouts per prompt (N)": rollout.n, "prompts per step": rollout.prompts}
    card = session.card("reinforcement learning with verifiable rewards", "reinforcement-learning", sizes, state.began)
    verifiers = sorted(session.sources.verifiers)
    return dataclasses.replace(card, verifiers=verifiers, before=state.before, after=after)


def _summary(
    session: Session, trainer: Trainer, after: dict[str, Any] | None, peak_rss_mib: float, weights_differ: bool
) -> dict[str, Any]:
    """Return summary.json. after: the evaluation at the end. weights_differ: whether training has changed any."""
    before, best = trainer.state.before, trainer.state.best
    rows = read_metrics(session.dir / METRICS_FILE)
    return {
        "pass_at_1_before": before["pass_at_1"] if before else None,
        "pass_at_1_after": after["pass_at_1"] if after else None,
        **_widest("before", before),
        **_widest("after", after),
        # The mean reward includes partial credit.
        "mean_reward_before": before["mean_reward"] if before else None,
        "mean_reward_after": after["mean_reward"] if after else None,
        "held_out_prompts": len(trainer.held_out),
        "rollouts_per_prompt": session.config.rollout.n,
        "steps": trainer.state.step,
        "best_checkpoint": {"step": best.step, "figure": best.metric, "value": best.value} if best else None,
        "job_seconds": trainer.seconds(),
        "peak_rss_mib": peak_rss_mib,
        "before": before,
        "after": after,
        "findings": findings(session.config, rows, before, after, weights_differ),
    }


def _widest(when: str, evaluation: dict[str, Any] | None) -> dict[str, float]:
    """Return {"pass_at_8_before": ...}, the pass@k of the largest k."""
    found = widest(evaluation["pass_at_k"]) if evaluation else None
    return {f"pass_at_{found[0]}_{when}": found[1]} if found else {}
