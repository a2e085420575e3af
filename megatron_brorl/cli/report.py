"""`brorl report`: page, curves and summary of a run; `brorl rollouts`: list, filter and export rollouts."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import Any

from megatron_brorl.errors import UserError
from megatron_brorl.files import read_object, write_text

PAGE = "report.html"
COMPARISON = "comparison.html"


def add_commands(commands: Any) -> None:
    text = "write an HTML page about a run (result, curves, prompts, rollouts, configuration), or one to compare runs"
    command = commands.add_parser("report", help=text, description=text)
    command.add_argument("runs", metavar="RUN", nargs="+", help="run.dir of a training run, finished or running")
    text = "file to write (default: report.html in RUN, or comparison.html)"
    command.add_argument("--out", type=Path, metavar="FILE", help=text)
    text = "maximum size of the file; rollouts fill the space that is left (%(default)s)"
    command.add_argument("--megabytes", type=float, default=5.0, metavar="MB", help=text)
    command.set_defaults(command=_report)

    text = "list, filter and export the rollouts of a run, with rewards and answers"
    command = commands.add_parser("rollouts", help=text, description=text)
    command.add_argument("run", metavar="RUN", type=Path, help="run.dir of a training run")

    when = command.add_mutually_exclusive_group()
    when.add_argument("--step", type=int, metavar="K", help="a training step, counted from 1")
    text = "the evaluation after K steps (default: the last one)"
    when.add_argument("--evaluation", type=int, metavar="K", help=text)

    command.add_argument("--prompt", metavar="ID", help="show one prompt with its responses")
    command.add_argument("--right", action="store_true", help="only correct responses")
    command.add_argument("--wrong", action="store_true", help="only wrong responses")
    command.add_argument("--mixed", action="store_true", help="only prompts whose responses have different rewards")
    command.add_argument("--contains", metavar="TEXT", default="", help="only responses that contain this text")

    text = "number of prompts to list; 0 lists all (%(default)s)"
    command.add_argument("--limit", type=int, default=50, metavar="N", help=text)
    command.add_argument("--export", type=Path, metavar="FILE", help="write the rollouts as .jsonl or .parquet")
    command.set_defaults(command=_rollouts)


def _report(args: argparse.Namespace) -> int:
    """Write the page of a run, draw its curves again and print its summary; or write the page of several runs."""
    # Matplotlib is imported here, because it would slow down the start of every command.
    from megatron_brorl.report.content import read_run
    from megatron_brorl.report.page import page

    runs = [Path(run).absolute() for run in args.runs]
    out = args.out.absolute() if args.out else runs[0] / (PAGE if len(runs) == 1 else COMPARISON)
    if out.suffix != ".html":  # so that no other file of the run is overwritten
        raise UserError(f"--out {args.out}: must end in .html")
    if not args.megabytes > 0:
        raise UserError(f"--megabytes {args.megabytes}: must be above 0")
    text = page(runs, args.megabytes)
    write_text(out, text)
    written = f"{out} ({len(text.encode()) / 1e6:.1f} MB)"
    if len(runs) == 1 and read_run(runs[0]).rows:
        show(runs[0], written)
    else:
        print(f"report   {written}")
    return 0


def show(directory: Path, page: str = "") -> None:
    """Draw the curves of a run, print its summary if it has ended, and print the paths of its files.

    page: path of its report, or "" to print the command that writes it.
    """
    from megatron_brorl.report.content import SUMMARY
    from megatron_brorl.report.plots import plot_run

    figure = plot_run(directory)  # the last file of a run: main.finished looks for it
    findings: dict[str, str] = {}
    path = directory / SUMMARY
    if path.is_file():
        remedy = "delete it to report without it"
        summary = read_object(path, remedy)
        findings = summary.get("findings", {})
        try:
            print("\n".join(_lines(summary)))
        except KeyError as e:
            raise UserError(f"{path}: the key {e} is missing: another version wrote the file; {remedy}") from None
    print(f"curves   {figure}")
    print(f"model    {directory / 'model'}")
    print(f"report   {page or shlex.join(['brorl', 'report', str(directory)])}")
    for sentence in findings.values():  # print warnings last, where they are noticed
        print(f"warning: {sentence}")


def _lines(summary: dict[str, Any]) -> list[str]:
    """Return a summary as text."""
    from megatron_brorl.algo.pass_at_k import widest

    steps = f"{summary['steps']} step{'' if summary['steps'] == 1 else 's'}"
    lines = [f"{steps}, N = {summary['rollouts_per_prompt']} rollouts, {summary['held_out_prompts']} held-out prompts"]
    for name in ("before", "after"):
        rate = summary[f"pass_at_1_{name}"]
        if not rate:
            lines.append(f"pass@1 {name:6}  not measured")
            continue
        k_and_rate = widest((summary[name] or {}).get("pass_at_k", {}))
        at_k = f"   pass@{k_and_rate[0]}  {k_and_rate[1]:.4f}" if k_and_rate else ""
        lines.append(f"pass@1 {name:6}  {rate['mean']:.4f}  95% interval {rate['low']:.4f} to {rate['high']:.4f}{at_k}")
        reward = summary[f"mean_reward_{name}"]
        if reward["mean"] != rate["mean"]:
            interval = f"95% interval {reward['low']:.4g} to {reward['high']:.4g}"
            lines.append(f"reward {name:6}  {reward['mean']:.4g}  {interval}")
    if best := summary.get("best_checkpoint"):
        name = best["metric"].replace("_at_", "@")
        lines.append(f"best     after {best['step']} steps, {name} {best['value']:.4f}: checkpoints/best")
    tasks = _task_lines(summary["before"], summary["after"]) if summary["before"] and summary["after"] else []
    job = f"job {summary['job_seconds']:.0f} s, peak memory {summary['peak_rss_mib']:.0f} MiB over all processes"
    return [*lines, *tasks, job]


def _task_lines(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Return pass@1 of each task before and after, if there are several tasks."""
    from megatron_brorl.rollout_log import one_line

    tasks = {one_line(name): (before["by_task"].get(name), rate) for name, rate in after["by_task"].items()}
    if len(tasks) < 2:
        return []
    width = max(map(len, tasks))
    lines = [f"  {name:{width}}  {_percent(first)} -> {_percent(last)}" for name, (first, last) in tasks.items()]
    return ["pass@1 by task, with 95% intervals:", *lines]


def _percent(rate: dict[str, float] | None) -> str:
    """Return a rate and its interval, in percent."""
    return f"{rate['mean']:.1%} ({100 * rate['low']:.1f} to {100 * rate['high']:.1f})" if rate else "not measured"


def _rollouts(args: argparse.Namespace) -> int:
    from megatron_brorl.report.rollout_browser import export, listed, print_prompt, print_prompts, read
    from megatron_brorl.rollout_log import FOLDER, entries, filter_rows

    folder = args.run / FOLDER
    kind = "step" if args.step is not None else "evaluation" if args.evaluation is not None else ""
    number = args.step if args.step is not None else args.evaluation
    if args.limit < 0:
        raise UserError(f"--limit {args.limit}: must not be negative")

    # Filters may match no rollout, but an unknown prompt is an error.
    unfiltered = read(folder, kind, number, args.prompt)
    matches = unfiltered.filtered(args.prompt, args.mixed, args.right, args.wrong, args.contains)
    if args.prompt is not None and not len(matches.groups):
        raise UserError(f"{folder}: {unfiltered.moment} has no prompt {args.prompt!r} that passes the filters")

    if args.export is not None:
        if folder.resolve() in args.export.resolve().parents:
            raise UserError(f"{args.export}: {folder} belongs to the run; write to another folder")
        print(f"{export(matches, args.export)} rollouts of {matches.moment} written to {args.export}")
        return 0

    if args.prompt is None:
        print_prompts(matches, unfiltered, args.limit)
        print(f"recorded: {listed(entries(folder))}")
    else:
        for group in matches.groups.to_pylist():
            print_prompt(matches.moment, group, filter_rows(matches.rollouts, "group", [group["group"]]).to_pylist())
    return 0
