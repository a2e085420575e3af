"""`brorl report`: a run as a page, its curves and its summary; `brorl rollouts`: list, filter and export rollouts."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import Any

from megatron_brorl.errors import UserError
from megatron_brorl.files import write_text

PAGE = "report.html"
SEVERAL = "comparison.html"


def add_commands(commands: Any) -> None:
    """Add both commands to the parser of `brorl`."""
    text = "a run as one HTML file: what came of it, curves, prompts, rollouts, configuration; or several runs compared"
    command = commands.add_parser("report", help=text, description=text)
    command.add_argument("runs", metavar="RUN", nargs="+", help="run.dir of a training run, ended or still going")
    command.add_argument("--out", type=Path, metavar="FILE", help="left out: report.html in RUN, or comparison.html")
    size = "of the file at most, of which rollouts get what the rest leaves (%(default)s)"
    command.add_argument("--megabytes", type=float, default=5.0, metavar="MB", help=size)
    command.set_defaults(command=_report)

    text = "rollouts of a run: prompts with right of N, answers with counts, a right and a wrong response side by side"
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


def _report(args: argparse.Namespace) -> int:
    """Write the page of a run, draw its curves again and print its summary; or write the page of several runs.

    Raises UserError for a folder without a run, and for a file that cannot be written.
    """
    # Matplotlib is imported here, because it would slow down the start of every command.
    from megatron_brorl.report.content import read_run
    from megatron_brorl.report.page import page

    runs = [Path(run).absolute() for run in args.runs]
    out = args.out.absolute() if args.out else runs[0] / (PAGE if len(runs) == 1 else SEVERAL)
    if out.suffix != ".html":  # never over a file of the run
        raise UserError(f"--out {args.out}: must end in .html")
    if not args.megabytes > 0:
        raise UserError(f"--megabytes {args.megabytes}: must be above 0")
    text = page(runs, args.megabytes)
    write_text(out, text)
    said = f"{out} ({len(text.encode()) / 1e6:.1f} MB)"
    if len(runs) == 1 and read_run(runs[0]).rows:
        show(runs[0], said)
    else:
        print(f"report   {said}")
    return 0


def show(directory: Path, page: str = "") -> None:
    """Draw the curves of a run, print its summary if it has ended, and print where the files are.

    page: where its report is; "" prints the command that makes it.
    """
    from megatron_brorl.report.content import SUMMARY
    from megatron_brorl.report.plots import plot_run, plot_theory

    theory = plot_theory(directory)
    figure = plot_run(directory)  # last, because main.finished reads it as the end of a run
    found: dict[str, str] = {}
    if (directory / SUMMARY).is_file():
        summary = json.loads((directory / SUMMARY).read_text(encoding="utf-8"))
        found = summary.get("findings", {})
        print("\n".join(_lines(summary)))
    print(f"curves   {figure}")
    if theory:
        print(f"theory   {theory}")
    print(f"model    {directory / 'model'}")
    print(f"report   {page or shlex.join(['brorl', 'report', str(directory)])}")
    for sentence in found.values():  # last, where a reader looks first
        print(f"warning: {sentence}")


def _lines(s: dict[str, Any]) -> list[str]:
    """Return a summary as text."""
    from megatron_brorl.algo.pass_at_k import widest

    lines = [f"{s['steps']} steps, N = {s['rollouts_per_prompt']} rollouts, {s['held_out_prompts']} held-out prompts"]
    for name in ("before", "after"):
        p = s[f"pass_at_1_{name}"]
        if not p:
            lines.append(f"pass@1 {name:6}  not measured")
            continue
        k = widest((s[name] or {}).get("pass_at_k", {}))
        more = f"   pass@{k[0]}  {k[1]:.4f}" if k else ""
        lines.append(f"pass@1 {name:6}  {p['mean']:.4f}  95% interval {p['low']:.4f} to {p['high']:.4f}{more}")
        r = s[f"mean_reward_{name}"]
        if r["mean"] != p["mean"]:
            lines.append(f"reward {name:6}  {r['mean']:.4g}  95% interval {r['low']:.4g} to {r['high']:.4g}")
    if best := s.get("best_checkpoint"):
        name = best["figure"].replace("_at_", "@")
        lines.append(f"best     after {best['step']} steps, {name} {best['value']:.4f}: checkpoints/best")
    return [*lines, f"job {s['job_seconds']:.0f} s, peak memory {s['peak_rss_mib']:.0f} MiB over all processes"]


def _rollouts(args: argparse.Namespace) -> int:
    from rich.console import Console

    from megatron_brorl.report.rollout_browser import Filters, Page, export, listed, one_prompt, prompt_list, read
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

    # FORCE_COLOR must not put control codes into a file, so rich does not decide.
    console = Console() if sys.stdout.isatty() else None
    page = Page(console if console and not console.is_dumb_terminal else None)
    if args.prompt is None:
        prompt_list(page, found, whole, args.limit)
        page.line(f"recorded are {listed(moments(folder))}")
    else:
        for group in found.groups.to_pylist():
            one_prompt(page, found.moment, group, filter_rows(found.rollouts, "group", [group["group"]]).to_pylist())
    return 0
