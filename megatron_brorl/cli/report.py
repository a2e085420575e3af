"""`brorl report`: a run as a page, its curves and its summary, which `brorl train` ends with too."""

from __future__ import annotations

import argparse
import json
import shlex
from pathlib import Path
from typing import Any

from megatron_brorl.algo.pass_at_k import widest
from megatron_brorl.errors import UserError
from megatron_brorl.files import write_text
from megatron_brorl.report.content import SUMMARY, read_run
from megatron_brorl.report.page import page
from megatron_brorl.report.plots import plot_run, plot_theory

PAGE, SEVERAL = "report.html", "comparison.html"


def report(args: argparse.Namespace) -> int:
    """Write the page of a run, draw its curves again and print its summary; or write the page of several runs.

    Raises UserError for a folder without a run, and for a file that cannot be written.
    """
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
    theory = plot_theory(directory)
    figure = plot_run(directory)  # last, because cli.finished takes it for the end of a run
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
