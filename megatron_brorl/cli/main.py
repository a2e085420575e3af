"""The command line: the only place that builds objects and wires them together."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

from megatron_brorl import ranks
from megatron_brorl.cli import evaluate as evaluate_cli
from megatron_brorl.cli import theory as theory_cli
from megatron_brorl.cli.evaluate import write_json
from megatron_brorl.config.load import load
from megatron_brorl.config.renamed import with_names_of_now
from megatron_brorl.errors import UserError
from megatron_brorl.outputs import check_outputs

# What runs did before a key decided it: checkpoints that are older than the key were written with this.
BEFORE_THE_KEY: dict[str, dict[str, Any]] = {"optim": {"decay_norms_and_biases": True}}


def main(arguments: list[str] | None = None) -> None:
    """Run one command and exit: 0 done, 2 a mistake of the user's in one line, 75 stopped by a signal and resumable."""
    warnings.filterwarnings("ignore", module=r"(megatron|torch)\.")  # chatter about optional packages
    warnings.filterwarnings("ignore", message="Please use DTensor instead", category=FutureWarning)
    args = _parse(arguments)
    try:
        status = _run_ranks(args) if hasattr(args, "processes") else args.command(args)
    except UserError as e:
        # One process per node speaks: the mistake is the same for all of its ranks.
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"brorl: {e}", file=sys.stderr)
        status = 2
    except BrokenPipeError:  # the reader (head, less) has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 0
    sys.exit(status)


def _run_ranks(args: argparse.Namespace) -> int:
    """A command of ranks: as one of them, or as the launcher of them all."""
    # A mistake in it is told once, and before anything is started, imported or written.
    check_outputs(load(args.config, args.overrides), args.name, args.config)
    if args.processes > 0:
        from megatron_brorl.cli.launch import launch

        command = [sys.executable, "-m", "megatron_brorl", args.name, args.config, *args.overrides]
        return launch(args.processes, command)
    ranks.begin(saves=args.command is _train)
    from megatron_brorl.parallel import device

    device.leave_out_compiler()
    status: int = args.command(args)
    return status


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    """Options may stand anywhere among the overrides, which argparse's subcommands alone do not allow."""
    parser = _parser()
    args, rest = parser.parse_known_args(arguments)
    unknown = [x for x in rest if x.startswith("-") or not hasattr(args, "overrides")]
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if rest:
        args.overrides += rest
    if getattr(args, "flags", None):
        args.overrides += args.flags
    if args.command is evaluate_cli.evaluate:
        args.overrides += evaluate_cli.overrides(args)
    return args


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="brorl", description="Reinforcement learning with hundreds of rollouts per prompt, on Megatron-Core."
    )
    commands = parser.add_subparsers(required=True, metavar="command")
    for name, function, text in [
        ("train", _train, "reinforcement learning: sample, score, update, evaluate before and after"),
        ("sft", _sft, "supervised training on solved examples (a warm start)"),
        ("evaluate", evaluate_cli.evaluate, "pass@1 and pass@k of a model on held-out prompts or benchmarks"),
    ]:
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument(
            "--processes", type=int, default=0, help="start this many ranks here; leave it out under torchrun or Slurm"
        )
        command.add_argument("config", help="TOML file")
        command.add_argument("overrides", nargs="*", metavar="section.key=value", help="replace single values")
        if name == "train":
            command.add_argument(
                "--verify-reshard",
                dest="flags",
                action="append_const",
                const="train.verify_reshard=true",
                help="after each refit, compare the engine's log-probs with the actor's (config: train.verify_reshard)",
            )
        if name == "evaluate":
            evaluate_cli.add_options(command)
        command.set_defaults(command=function, name=name)
    report = commands.add_parser("report", help="draw the curves of a run again and print its summary")
    report.add_argument("run_dir")
    report.set_defaults(command=_report)
    evaluate_cli.add_compare(commands)
    text = "what this machine has of what a run needs; exit code 1 where something is wrong"
    commands.add_parser("doctor", help=text, description=text).set_defaults(command=_doctor)
    theory_cli.add_commands(commands)
    return parser


def _train(args: argparse.Namespace) -> int:
    from megatron_brorl.checkpoints import training as checkpoint
    from megatron_brorl.cli.build import Session
    from megatron_brorl.metrics import METRICS_FILE, read_metrics
    from megatron_brorl.progress import progress
    from megatron_brorl.theory.agreement import agreement
    from megatron_brorl.train.console import evaluation_line
    from megatron_brorl.train.loop import Trainer
    from megatron_brorl.train.reference import ReferencePolicy
    from megatron_brorl.train.stall import Stall
    from megatron_brorl.train.state import RunState

    begun = time.time()
    config = load(args.config, args.overrides)
    with Session(config) as session:
        worker = session.worker(config.optim)
        trainer = Trainer(
            config,
            session.grid,
            worker,
            session.rollouts(),
            session.sources.train,
            session.sources.held_out,
            session.stop_ids,
            session.fingerprint(),
            config.run.started or begun,
            state=RunState(stall=Stall(config.train.stall_margin)),
            critic=session.critic(),
            reference=ReferencePolicy(worker, config.reference) if config.algo.kl_coef else None,
        )
        found = session.newest_checkpoint()
        if found:
            _check_fingerprint(checkpoint.read_run(found)["fingerprint"], trainer.fingerprint, found)
            trainer.restore(found)
        writer = session.writer(trainer.state.step if found else None)
        trainer.rollout_log = session.rollout_log(trainer.state.step if found else None)
        with progress(config.train.steps, "train", session.is_main_rank, start=trainer.state.step) as p:
            p.note(session.report)
            if found:
                p.note(f"resumed from {found}")
            if not trainer.run(writer, p, session.stop_requested):
                p.note("stopped by a signal; the state is saved: start the same command again to go on")
                return ranks.SAVED
            after = trainer.evaluate(p).as_dict() if trainer.held_out else None
            if after:
                p.note(f"held-out after: {evaluation_line(after)}")
        session.export(worker)
        peak = session.peak_rss_mib()
        if session.is_main_rank:
            write_json(
                session.dir / "summary.json",
                {
                    "pass_at_1_before": trainer.state.before["pass_at_1"] if trainer.state.before else None,
                    "pass_at_1_after": after["pass_at_1"] if after else None,
                    **_widest("before", trainer.state.before),
                    **_widest("after", after),
                    "held_out_prompts": len(trainer.held_out),
                    "rollouts_per_prompt": config.rollout.n,
                    "steps": trainer.state.step,
                    "job_seconds": trainer.seconds(),
                    "peak_rss_mib": peak,
                    "before": trainer.state.before,
                    "after": after,
                    "theory": agreement(read_metrics(session.dir / METRICS_FILE)),
                },
            )
            _show(session.dir)
    return 0


def _sft(args: argparse.Namespace) -> int:
    from megatron_brorl.cli.build import Session
    from megatron_brorl.progress import progress
    from megatron_brorl.train.sft import sft, sft_optim

    config = load(args.config, args.overrides)
    optim = sft_optim(config.sft, config.optim)
    with Session(config) as session:
        worker = session.worker(optim)
        writer = session.writer(None)
        with progress(config.sft.steps, "sft", session.is_main_rank) as p:
            p.note(session.report)
            sft(worker, session.sources.train, session.tokenizer, config.sft, optim, writer, p)
        session.export(worker)
    return 0


def _report(args: argparse.Namespace) -> int:
    directory = Path(args.run_dir)
    if not (directory / "metrics.jsonl").is_file():
        raise UserError(f"{directory}: holds no metrics.jsonl; give the run.dir of a training run")
    _show(directory)
    return 0


def _doctor(_: argparse.Namespace) -> int:
    from megatron_brorl.cli.doctor import examine, report

    lines, status = report(examine())
    print("\n".join(lines))
    return status


def _widest(when: str, evaluation: dict[str, Any] | None) -> dict[str, float]:
    """{"pass_at_8_before": ...}: pass@k of the largest k, which belongs beside pass@1."""
    from megatron_brorl.algo.estimators import widest

    found = widest(evaluation["pass_at_k"]) if evaluation else None
    return {f"pass_at_{found[0]}_{when}": found[1]} if found else {}


def _show(directory: Path) -> None:
    """Draw the plot and print the summary of a finished run."""
    from megatron_brorl.algo.estimators import widest
    from megatron_brorl.report.plot import plot_run
    from megatron_brorl.report.theory import plot_theory
    from megatron_brorl.theory.agreement import agreement_lines

    figure = plot_run(directory)
    theory = plot_theory(directory)
    summary = directory / "summary.json"
    if summary.is_file():
        s = json.loads(summary.read_text(encoding="utf-8"))
        print(f"{s['steps']} steps, N = {s['rollouts_per_prompt']} rollouts, {s['held_out_prompts']} held-out prompts")
        for name in ("before", "after"):
            p = s[f"pass_at_1_{name}"] or {"mean": math.nan, "low": math.nan, "high": math.nan}
            k = widest((s[name] or {}).get("pass_at_k", {}))
            more = f"   pass@{k[0]}  {k[1]:.4f}" if k else ""
            print(f"pass@1 {name:6}  {p['mean']:.4f}  95% interval {p['low']:.4f} to {p['high']:.4f}{more}")
        if s.get("theory"):
            print("\n".join(agreement_lines(s["theory"])))
        print(f"job {s['job_seconds']:.0f} s, peak memory {s['peak_rss_mib']:.0f} MiB over all processes")
    print(f"curves   {figure}")
    if theory:
        print(f"theory   {theory}")
    print(f"model    {directory / 'model'}")


def _check_fingerprint(saved: dict[str, Any], current: dict[str, Any], where: Path) -> None:
    for section, values in current.items():
        found = {**BEFORE_THE_KEY.get(section, {}), **with_names_of_now(section, saved.get(section, {}))}
        for key, value in values.items():
            old = found.get(key)
            if old != value:
                raise UserError(
                    f"{where}: was written with {section}.{key} = {old!r}, now {value!r}: set it back, or start anew "
                    "with another run.dir or train.resume=never"
                )
