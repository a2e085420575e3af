"""`brorl simulate` and `brorl pass-rates`."""

from __future__ import annotations

import argparse
import typing
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

from megatron_brorl.errors import UserError
from megatron_brorl.rollout_log import FOLDER
from megatron_brorl.theory.simulator import Curves, Settings, simulate, write_csv


def add_commands(commands: Any) -> None:
    text = "print the success rates of a run's prompts, and the share of mixed groups for N = 8 to 1024"
    command = commands.add_parser("pass-rates", help=text, description=text)
    command.add_argument("run", metavar="RUN", type=Path, help="run.dir of a training run or an evaluation")
    command.set_defaults(command=_pass_rates)

    text = "run the paper's token simulator, which shows where probability mass moves for each N"
    command = commands.add_parser("simulate", help=text, description=text)
    command.add_argument("--n", type=int, nargs="+", default=[4, 8, 16, 512, 51200], help="draws per step")
    text = "seeds; every N runs with every seed"
    command.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3], help=text)

    types = typing.get_type_hints(Settings)
    for setting in fields(Settings):
        kind: Any = types[setting.name]
        options = {"type": kind} if kind in (int, float) else {"choices": get_args(kind)}
        text = f"{setting.metadata['help']} ({setting.default})"
        command.add_argument(f"--{setting.name.replace('_', '-')}", default=setting.default, help=text, **options)

    command.add_argument("--out", type=Path, default=Path("runs/simulate"), help="folder for simulate.png, curves.csv")
    command.set_defaults(command=_simulate)


def _simulate(args: argparse.Namespace) -> int:
    from megatron_brorl.report.plots import save, simulation_figure  # imports matplotlib, which is slow
    from megatron_brorl.tracking.progress import progress

    settings = Settings(**{f.name: getattr(args, f.name) for f in fields(Settings)})
    jobs = [(n, seed) for n in sorted(set(args.n)) for seed in sorted(set(args.seeds))]
    for n, seed in jobs:
        if n < 1 or seed < 0:
            raise UserError(f"--n {n} --seeds {seed}: draws must be at least 1 and seeds not negative")

    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise UserError(f"{args.out}: cannot be created: {e.strerror}; give a writable folder with --out") from None
    curves: list[Curves] = []
    with progress(len(jobs), "simulate") as p:
        for n, seed in jobs:
            curves.append(simulate(n, seed, settings))
            p.update(len(curves), {"N": str(n), "seed": str(seed)})

    write_csv(args.out / "curves.csv", curves, every=10)
    figure = save(simulation_figure(curves, settings), args.out / "simulate.png")

    rows = [("N", "seed", "Q_pos(0)", f"Q_pos({settings.steps})", "improved", "worst drop")]
    for curve in curves:
        summary = curve.summary()
        q_pos = (f"{summary['q_pos_initial']:.4f}", f"{summary['q_pos_final']:.4f}")
        changes = (f"{summary['improved_share']:.2%}", f"{summary['worst_drop']:.1e}")
        rows.append((str(curve.n), str(curve.seed), *q_pos, *changes))
    print("\n".join(aligned(rows)))
    print(f"figure   {figure}")
    print(f"curves   {args.out / 'curves.csv'}")
    return 0


def _pass_rates(args: argparse.Namespace) -> int:
    import numpy as np

    from megatron_brorl.algo.pass_at_k import SIZES, mixed_share
    from megatron_brorl.cli.evaluate import ANSWERS
    from megatron_brorl.report.comparison import read_answers
    from megatron_brorl.report.plots import latest_groups, plot_pass_rates

    if (args.run / FOLDER).is_dir() or not (args.run / ANSWERS).is_file():
        kind, groups = latest_groups(args.run)
    else:
        kind = "evaluation"
        groups = [answer | {"rollouts": answer["samples"]} for answer in read_answers(args.run / ANSWERS).values()]
    right, rollouts = np.array([(group["right"], group["rollouts"]) for group in groups]).T
    rates = right / rollouts
    print(f"{len(rates)} prompts, the last {kind} of each, {rollouts.min()} to {rollouts.max()} rollouts per prompt")
    low, middle, high = np.quantile(rates, (0.25, 0.5, 0.75))
    print(f"success rate: mean {rates.mean():.3f}, quartiles {low:.3f} {middle:.3f} {high:.3f}")
    print(f"{(rates == 0).sum()} prompts without a right rollout, {(rates == 1).sum()} without a wrong one")

    counts = [group.get("reward_counts") or [group["right"], group["rollouts"] - group["right"]] for group in groups]
    if any(g.get("reward") is not None and abs(g["reward"] - g["right"] / g["rollouts"]) > 1e-6 for g in groups):
        print(f"mean reward {np.mean([g['reward'] for g in groups]):.4g}; groups are mixed if their rewards differ")
    shares = [mixed_share(counts, n) for n in SIZES]
    table = [("N", "mixed groups", "rollouts per mixed group")]
    for n, share in zip(SIZES, shares, strict=True):
        bounds = ("at least ", "at most ") if n > rollouts.min() else ("", "")
        table.append((str(n), f"{bounds[0]}{share:.1%}", f"{bounds[1]}{n / share:.0f}" if share else "-"))
    print("\n".join(aligned(table)))
    print(f"figure   {plot_pass_rates(rates, shares, args.run / 'pass_rates.png')}")
    return 0


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table with right-aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
