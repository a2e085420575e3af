"""`brorl rollouts`: what a run sampled, to be looked at, filtered and exported."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from megatron_brorl.errors import UserError


def add_command(commands: Any) -> None:
    """Add it to the parser."""
    text = "what a run sampled: prompts with right of N, answers with counts, a right and a wrong response side by side"
    command = commands.add_parser("rollouts", help=text, description=text)
    command.add_argument("run", metavar="RUN", type=Path, help="run.dir of a training run")

    # When it was sampled.
    when = command.add_mutually_exclusive_group()
    when.add_argument("--step", type=int, metavar="K", help="a step, from 0, as in metrics.jsonl")
    when.add_argument("--evaluation", type=int, metavar="K", help="the evaluation after K steps; default: the last")

    # What of it.
    command.add_argument("--prompt", metavar="ID", help="one prompt with its responses")
    command.add_argument("--right", action="store_true", help="right responses alone")
    command.add_argument("--wrong", action="store_true", help="wrong responses alone")
    command.add_argument("--mixed", action="store_true", help="prompts with right and wrong responses alone")
    command.add_argument("--contains", metavar="TEXT", default="", help="responses with this in their text")

    # Where to.
    command.add_argument("--limit", type=int, default=50, metavar="N", help="prompts listed; 0: all (%(default)s)")
    command.add_argument("--export", type=Path, metavar="FILE", help="write the rollouts as .jsonl, .parquet or .csv")
    command.set_defaults(command=_rollouts)


def _rollouts(args: argparse.Namespace) -> int:
    from rich.console import Console

    from megatron_brorl.record.files import FOLDER, moments
    from megatron_brorl.report.rollout_pages import PlainPage, RichPage, one_prompt, prompt_list
    from megatron_brorl.report.rollouts import Filters, export, listed, read

    # What was asked for.
    folder = args.run / FOLDER
    kind = "step" if args.step is not None else "evaluation" if args.evaluation is not None else ""
    number = args.step if args.step is not None else args.evaluation
    if args.limit < 0:
        raise UserError(f"--limit {args.limit}: must not be negative")

    # A filter that leaves nothing is an answer; a prompt that is not there is a mistake.
    whole = read(folder, kind, number, args.prompt)
    found = whole.filtered(Filters(args.prompt, args.mixed, args.right, args.wrong, args.contains))
    if args.prompt is not None and not len(found.groups):
        raise UserError(f"{folder}: {whole.moment} has no prompt {args.prompt!r} that passes the filters")

    # A file of it.
    if args.export is not None:
        if folder.resolve() in args.export.resolve().parents:
            raise UserError(f"{args.export}: {folder} is the run's own; name another place to write to")
        print(f"{export(found, args.export)} rollouts of {found.moment} written to {args.export}")
        return 0

    # Or a page: the stream decides, not rich: FORCE_COLOR must not put control codes into a file.
    console = Console() if sys.stdout.isatty() else None
    page = RichPage(console) if console and not console.is_dumb_terminal else PlainPage()
    # All prompts in a line each, or one with what was answered.
    if args.prompt is None:
        prompt_list(page, found, whole, args.limit)
        page.line(f"recorded are {listed(moments(folder))}")
    else:
        for group, rollouts in found.of_each_group():
            one_prompt(page, found.moment, group, rollouts)
    return 0
