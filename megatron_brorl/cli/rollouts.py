"""`brorl rollouts`: look at, filter and export the rollouts of a run."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from megatron_brorl.errors import UserError


def add_command(commands: Any) -> None:
    """Add it to the parser."""
    text = "rollouts of a run: prompts with right of N, answers with counts, a right and a wrong response"
    command = commands.add_parser("rollouts", help=text, description=text)
    command.add_argument("run", metavar="RUN", type=Path, help="run.dir of a training run")

    when = command.add_mutually_exclusive_group()
    when.add_argument("--step", type=int, metavar="K", help="a step, from 0, as in metrics.jsonl")
    when.add_argument("--evaluation", type=int, metavar="K", help="the evaluation after K steps; default: the last")

    command.add_argument("--prompt", metavar="ID", help="one prompt with its responses")
    command.add_argument("--right", action="store_true", help="only right responses")
    command.add_argument("--wrong", action="store_true", help="only wrong responses")
    command.add_argument("--mixed", action="store_true", help="only prompts with right and wrong responses")
    command.add_argument("--contains", metavar="TEXT", default="", help="responses with this in their text")

    command.add_argument("--limit", type=int, default=50, metavar="N", help="prompts listed; 0: all (%(default)s)")
    command.add_argument("--export", type=Path, metavar="FILE", help="write the rollouts as .jsonl or .parquet")
    command.set_defaults(command=_rollouts)


def _rollouts(args: argparse.Namespace) -> int:
    from megatron_brorl.report.rollout_browser import Filters, export, listed, print_prompt, print_prompts, read
    from megatron_brorl.rollout_log import FOLDER, filter_rows, moments

    folder = args.run / FOLDER
    kind = "step" if args.step is not None else "evaluation" if args.evaluation is not None else ""
    number = args.step if args.step is not None else args.evaluation
    if args.limit < 0:
        raise UserError(f"--limit {args.limit}: must not be negative")

    # An empty result of a filter is an answer; an unknown prompt is an error.
    whole = read(folder, kind, number, args.prompt)
    found = whole.filtered(Filters(args.prompt, args.mixed, args.right, args.wrong, args.contains))
    if args.prompt is not None and not len(found.groups):
        raise UserError(f"{folder}: {whole.moment} has no prompt {args.prompt!r} that passes the filters")

    if args.export is not None:
        if folder.resolve() in args.export.resolve().parents:
            raise UserError(f"{args.export}: {folder} is the run's own; name another place to write to")
        print(f"{export(found, args.export)} rollouts of {found.moment} written to {args.export}")
        return 0

    if args.prompt is None:
        print_prompts(found, whole, args.limit)
        print(f"recorded are {listed(moments(folder))}")
    else:
        for group in found.groups.to_pylist():
            print_prompt(found.moment, group, filter_rows(found.rollouts, "group", [group["group"]]).to_pylist())
    return 0
