"""`brorl report`: the curves and the summary of a run, which `brorl train` ends with too."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from megatron_brorl.algo.estimators import widest
from megatron_brorl.errors import UserError
from megatron_brorl.metrics import METRICS_FILE
from megatron_brorl.report.plot import plot_run
from megatron_brorl.report.theory import plot_theory
from megatron_brorl.theory.agreement import agreement_lines

SUMMARY = "summary.json"


def report(args: argparse.Namespace) -> int:
    """Draw a run's curves again and print its summary. Raises UserError for a folder without a run."""
    directory = Path(args.run_dir).absolute()
    if not (directory / METRICS_FILE).is_file():
        raise UserError(f"{directory}: holds no {METRICS_FILE}; give the run.dir of a training run")
    show(directory)
    return 0


def show(directory: Path) -> None:
    """Draw the curves of a run, print its summary, where it has ended, and say where the files are."""
    figure = plot_run(directory)
    theory = plot_theory(directory)
    found: dict[str, str] = {}  # what kept the run from learning
    if (directory / SUMMARY).is_file():
        summary = json.loads((directory / SUMMARY).read_text(encoding="utf-8"))
        found = summary.get("findings", {})
        print("\n".join(_lines(summary)))
    print(f"curves   {figure}")
    if theory:
        print(f"theory   {theory}")
    print(f"model    {directory / 'model'}")
    for sentence in found.values():  # last, where a reader looks first
        print(f"warning: {sentence}")


def _lines(s: dict[str, Any]) -> list[str]:
    """A summary for people."""
    lines = [f"{s['steps']} steps, N = {s['rollouts_per_prompt']} rollouts, {s['held_out_prompts']} held-out prompts"]
    for name in ("before", "after"):
        p = s[f"pass_at_1_{name}"]
        if not p:
            lines.append(f"pass@1 {name:6}  not measured")
            continue
        k = widest((s[name] or {}).get("pass_at_k", {}))
        more = f"   pass@{k[0]}  {k[1]:.4f}" if k else ""
        lines.append(f"pass@1 {name:6}  {p['mean']:.4f}  95% interval {p['low']:.4f} to {p['high']:.4f}{more}")
    if s.get("theory"):
        lines += agreement_lines(s["theory"])
    return [*lines, f"job {s['job_seconds']:.0f} s, peak memory {s['peak_rss_mib']:.0f} MiB over all processes"]
