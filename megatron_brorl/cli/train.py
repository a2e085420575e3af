"""`brorl train`: reinforcement learning, with an evaluation before and after; `--dry-run`: all checks before a run.

`brorl sft`: supervised training on solved examples, a warm start for reinforcement learning.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_brorl import signals
from megatron_brorl.algo.pass_at_k import widest
from megatron_brorl.checkpoints import training as checkpoint
from megatron_brorl.checkpoints.model_card import InitialModel, TrainingFacts
from megatron_brorl.cli import preflight, run_folder
from megatron_brorl.cli.run_folder import Changes, change_line, check_fingerprint
from megatron_brorl.cli.session import Program, Session
from megatron_brorl.cli.teacher import teacher_directory
from megatron_brorl.config.load import load
from megatron_brorl.config.schema import Config
from megatron_brorl.data.source import SFT_STREAM
from megatron_brorl.errors import UserError
from megatron_brorl.files import write_json
from megatron_brorl.parallel import cpu_bridge, grid
from megatron_brorl.report.content import SUMMARY, change_of_run
from megatron_brorl.report.findings import findings
from megatron_brorl.tracking import run_info
from megatron_brorl.tracking.metrics import METRICS_FILE, read_metrics
from megatron_brorl.tracking.progress import progress
from megatron_brorl.tracking.timeline import span
from megatron_brorl.train.callbacks import Callbacks
from megatron_brorl.train.console import evaluation_line, evaluation_metrics
from megatron_brorl.train.models import ReferencePolicy, TrainingModels
from megatron_brorl.train.sampling_params import context, training_sampling_params
from megatron_brorl.train.sft import sft, sft_optim
from megatron_brorl.train.state import RunState, mark_last_as_best, read_state
from megatron_brorl.train.trainer import Trainer
from megatron_brorl.train.update import update_policy
from megatron_brorl.train.worker import OptimizerStep, Worker
from megatron_brorl.types import Experience, Prompt

_ROLLOUTS = 2  # rollouts in the forward and backward pass of the dry run
_TOKENS = 8  # tokens of each of these rollouts


def run(args: argparse.Namespace) -> int:
    """Train by a configuration file, or only make all checks with --dry-run. Returns the exit code."""
    config = load(args.config, args.overrides)
    program = Program(accept_changed_functions=args.accept_changed_functions)
    if args.dry_run:
        return dry_run(config, dataclasses.replace(program, on_check=_print_check))
    return execute(config, lambda ranks: run_info.command(["train", args.config, *args.overrides], ranks), program)


def execute(config: Config, command: Callable[[int], str], program: Program) -> int:
    """Train, from the newest checkpoint if there is one, and write run.dir/model and run.dir/summary.json.

    Returns 0, or signals.SAVED if a signal, the end of the job or a callback stopped the run. command: maps a number of
    ranks to the command line that starts the run on them, for the run's record.
    """
    begun = time.time()  # includes loading the model and the data
    with progress(config.train.steps, "train") as p, Session(config, program=program) as session:
        trainer = build_trainer(session, begun)

        folder = checkpoint.find(session.dir / "checkpoints")
        changes = Changes()
        if folder:
            saved = read_state(folder).fingerprint
            changes = check_fingerprint(saved, trainer.state.fingerprint, folder, program.accept_changed_functions)
            with span("loading the checkpoint"):
                trainer.restore(folder)
        resume_step = trainer.state.step if folder else None  # None creates new files
        writer = session.writer(resume_step)
        trainer.recorder = session.recorder(resume_step)
        if session.is_main_rank:
            # An earlier summary would make the running run look finished.
            (session.dir / SUMMARY).unlink(missing_ok=True)
            device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
            world = session.grid.world_size
            values = dataclasses.asdict(config)
            run_info.write(session.dir, values, resume_step, command(world), world, device, changes)

        p.begin(config.train.steps, trainer.state.step)
        p.note(session.report)
        prompts, n = config.rollout.prompts, config.rollout.n
        updates = config.algo.mini_batches * config.algo.epochs
        p.note(f"{prompts} prompts x {n} rollouts = {prompts * n:,} -> {updates} optimizer steps")
        if trainer.held_out and (differences := _evaluation_differences(config)):
            p.note(differences)
        if folder:
            p.note(f"resumed from {folder} with step {trainer.state.step}")
        if changes:
            p.note(f"changed since that checkpoint: {change_line(changes)}")
        if not trainer.run(writer, p, lambda: session.stop_requested(trainer.background_saver.seconds_to_come())):
            p.note(f"{session.stopped_by}; the state is saved: run the same command again to continue")
            return signals.SAVED
        evaluation = trainer.evaluate(p) if trainer.held_out else None
        after = evaluation.as_dict() if evaluation else None
        if evaluation and session.is_main_rank:
            mark_last_as_best(config, trainer.state, evaluation_metrics(evaluation))
        if after:
            p.note(f"held-out after: {evaluation_line(after)}")

        differs = session.export(trainer.models.actor, _card(session, trainer.state, after))
        peak = session.peak_rss_mib()  # a collective
        p.stop()
        if session.is_main_rank:
            from megatron_brorl.cli.report import show  # imports matplotlib

            with span("report"):
                summary = _summary(session, trainer, after, peak, differs)
                write_json(session.dir / SUMMARY, summary)
                show(session.dir)
                program.callbacks.call("on_end", summary)
        program.callbacks.raise_if_failed(f"the run is complete in {session.dir}")
    return 0


def run_sft(args: argparse.Namespace) -> int:
    """Train on the reference answers of the training prompts, and write run.dir/model. Returns 0."""
    config = load(args.config, args.overrides)
    began = time.time()
    optim = sft_optim(config.sft, config.optim)
    with progress(config.sft.steps, "sft") as p, Session(config, stream=SFT_STREAM) as session:
        worker = session.worker(optim)
        writer = session.writer(resume_step=None)
        p.begin(config.sft.steps)
        p.note(session.report)
        sft(worker, session.sources.train, session.tokenizer, config.sft, optim, writer, p)
        sizes = {"optimizer steps": config.sft.steps, "examples per step": config.sft.examples_per_step}
        session.export(worker, session.card("supervised training on solved examples", "sft", sizes, began))
    return 0


def build_trainer(session: Session, started: float) -> Trainer:
    """Return models, engine and verifiers of a run before its first step. started: Unix time at which it began."""
    config = session.config
    session.preflight()
    _ = session.own_algorithm  # A mistake in it must appear before the models are loaded.
    session.check_verifiers([*session.sources.representative_prompts(), *session.sources.held_out])

    # Start the engine last, because it uses the remaining memory.
    worker = session.worker(config.optim)
    critic = session.critic()
    reference = ReferencePolicy(worker, config.reference) if config.algo.kl_coef else None
    models = TrainingModels(worker, critic, reference, session.teacher())
    models.offload()
    return Trainer(
        config=config,
        grid=session.grid,
        models=models,
        runner=session.rollouts(),
        train_source=session.sources.train,
        held_out=session.sources.held_out,
        callbacks=session.program.callbacks if session.is_main_rank else Callbacks(),
        stop_ids=session.stop_ids,
        started=started,
        state=RunState(started_at=started, fingerprint=session.fingerprint()),
    )


def _evaluation_differences(config: Config) -> str:
    """Return the settings with which evaluations sample in another way than training, or "" without any."""
    evaluation, rollout = config.evaluate, config.rollout
    pairs = [
        ("temperature", evaluation.temperature, rollout.temperature),
        ("top_p", evaluation.top_p, rollout.top_p),
        ("top_k", 0, rollout.top_k),
    ]
    differences = [f"{key} {ours:g} instead of {training:g}" for key, ours, training in pairs if ours != training]
    return f"evaluations sample with {', '.join(differences)} in training" if differences else ""


def _card(session: Session, state: RunState, after: dict[str, Any] | None) -> TrainingFacts:
    """Return the model card's content. after: the evaluation at the end."""
    rollout = session.config.rollout
    sizes = {"steps": state.step, "rollouts per prompt (N)": rollout.n, "prompts per step": rollout.prompts}
    how_and_tag = "reinforcement learning with verifiable rewards", "reinforcement-learning"
    if session.config.teacher.path:
        teacher = InitialModel.of(session.config.teacher.path, teacher_directory(session.config))
        how_and_tag = f"on-policy distillation from {teacher.name}", "on-policy-distillation"
    card = session.card(*how_and_tag, sizes, state.started_at)
    verifiers = sorted(session.sources.verifiers - {"none"})
    return dataclasses.replace(card, verifiers=verifiers, before=state.initial_evaluation, after=after)


def _summary(
    session: Session, trainer: Trainer, after: dict[str, Any] | None, peak_rss_mib: float, weights_differ: bool
) -> dict[str, Any]:
    """Return summary.json. after: the evaluation at the end. weights_differ: whether training changed weights."""
    before, best = trainer.state.initial_evaluation, trainer.state.best
    rows = read_metrics(session.dir / METRICS_FILE)
    changed = change_of_run(session.dir)
    first_error = next((f"{text}: {reason}" for text, reason in trainer.runner.reported.items()), "")
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
        "best_checkpoint": {"step": best.step, "metric": best.metric, "value": best.value} if best else None,
        "job_seconds": trainer.run_seconds(),
        "peak_rss_mib": peak_rss_mib,
        "before": before,
        "after": after,
        "findings": findings(session.config, rows, before, after, weights_differ, changed, first_error),
    }


def _widest(when: str, evaluation: dict[str, Any] | None) -> dict[str, float]:
    """Return {"pass_at_8_before": ...}, the pass@k of the largest k."""
    widest_k = widest(evaluation["pass_at_k"]) if evaluation else None
    return {f"pass_at_{widest_k[0]}_{when}": widest_k[1]} if widest_k else {}


def dry_run(config: Config, program: Program) -> int:
    """Make all checks and return 0; a collective. Raises UserError at the first problem."""
    preflight.check_machine()
    session = Session(config, program=program)  # tokenizer, data, layout
    writable = session.share_errors(lambda: run_folder.check_writable(session.dir) if session.is_main_rank else "")
    _print_check("run.dir", writable)
    session.preflight()  # memory and disk

    _print_check("algorithm", ", ".join(f"{name} {sha256[:12]}" for name, sha256 in session.own_algorithm.items()))
    _print_check("inputs", ", ".join(f"{name} {sha256[:12]}" for name, sha256 in session.inputs().items()))
    folder = session.share_errors(lambda: checkpoint.find(session.dir / "checkpoints"))
    _print_check("checkpoint", session.share_errors(lambda: _checkpoint(session, folder)))
    kind, python = config.rollout.engine, config.engine.python
    _print_check("engine", session.share_errors(lambda: preflight.engine_line(kind, python)))
    sources = session.sources
    _print_check("reward", session.check_verifiers([*sources.representative_prompts(), *sources.held_out]))

    first_prompt = sources.train.prompts(start=0, count=1)[0]
    if agent := session.agent:
        max_length = context(config, session.shape)
        sampling = training_sampling_params(config, session.stop_ids, session.shape.experts)
        _print_check("agent run", agent.trial(first_prompt, sampling, max_length) if session.is_main_rank else "")
    worker = session.worker(config.optim, kind=_Worker)
    step = _forward_backward(worker, first_prompt, config)
    _print_check("micro-step", f"loss {step['loss']:.3g}, gradient norm {step['grad_norm']:.3g}, nothing is changed")
    grid.leave()  # without waiting for other ranks
    _print_check("dry run", "all checks passed; the same command without --dry-run starts the run")
    return 0


def _print_check(name: str, value: str) -> None:
    """Print the result of a check, on one rank. Further lines of `value` are indented like its first line."""
    if value and os.environ.get("RANK", "0") == "0":
        print(f"  ok  {name:12} {value}".replace("\n", f"\n{'':19}"), flush=True)


def _checkpoint(session: Session, folder: Path | None) -> str:
    """Return the checkpoint that the run would continue from, in words. Raises UserError if it could not."""
    if not folder:
        return "none: the run starts from the beginning"
    accept = session.program.accept_changed_functions
    changes = check_fingerprint(read_state(folder).fingerprint, session.fingerprint(), folder, accept)
    return f"continues from {folder}" + (f"\nchanged since that checkpoint: {change_line(changes)}" if changes else "")


class _Worker(Worker):
    """A worker that computes the norm of its gradient and does not step."""

    def _step(self, lr: float) -> OptimizerStep:
        with cpu_bridge.bridge():
            self.optimizer.prepare_grads()
            return OptimizerStep(float(self.optimizer.get_grad_norm()), applied=True)


def _forward_backward(worker: Worker, prompt: Prompt, config: Config) -> dict[str, float]:
    """Return the metrics of an update on two short rollouts with opposite advantages; a collective.

    Raises UserError if loss or gradient is not finite.
    """
    # Use the tokens of the prompt as responses, because they are in the vocabulary.
    ids = torch.tensor(prompt.token_ids, dtype=torch.int64)
    count = min(config.rollout.max_tokens, _TOKENS)
    responses = tuple(ids.repeat(count)[i : i + count] for i in range(_ROLLOUTS))
    prompts = (ids,) * _ROLLOUTS
    temperature = config.rollout.temperature
    log_probs: tuple[Tensor, ...] = tuple(worker.log_probs(prompts, responses, temperature))
    experience = Experience(
        prompts=prompts,
        responses=responses,
        rollout_log_probs=log_probs,
        old_log_probs=log_probs,
        advantages=tuple(torch.full((count,), sign) for sign in (1.0, -1.0)),
        reference_log_probs=log_probs if config.algo.kl_coef else None,
    )
    mini_batches = [list(range(_ROLLOUTS))]
    metrics = update_policy(worker, experience, mini_batches, config.algo, config.optim, temperature, first_update=0)
    if not math.isfinite(metrics["loss"]) or not math.isfinite(metrics["grad_norm"]):
        raise UserError(
            f"a forward and backward pass over {_ROLLOUTS} responses of {count} tokens: loss {metrics['loss']}, "
            f"gradient norm {metrics['grad_norm']}: not finite; check the weights of model.path, or train in fp32 "
            "(model.dtype)"
        )
    return metrics
