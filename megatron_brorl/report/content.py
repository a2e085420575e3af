"""The content of a report page, as JSON has it; page/*.js draws it and computes nothing but means of what it draws."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_brorl.errors import UserError
from megatron_brorl.report.held_out import Evaluation, against, change, evaluations
from megatron_brorl.report.run_files import RunFiles, read_run
from megatron_brorl.report.series import by_task, curves, heat, spread
from megatron_brorl.report.spent import checkpoints, generation, times_to_target
from megatron_brorl.report.verdict import verdict
from megatron_brorl.tracking import metric_docs


def content(folders: Sequence[Path]) -> tuple[dict[str, Any], list[RunFiles], list[Sequence[Evaluation]]]:
    """Content without rollouts, and what it is made of. Raises UserError where a folder holds no run."""
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise UserError("brorl report: a run is named twice; name each once")
    runs = [read_run(folder) for folder in folders]
    held_out: list[Sequence[Evaluation]] = [evaluations(run) for run in runs]
    several = len(runs) > 1
    parts = zip(_names(runs), runs, held_out, strict=True)
    made = time.strftime("%Y-%m-%d %H:%M:%S %Z")
    found: dict[str, Any] = {"made": made, "runs": [_run(*part, several) for part in parts]}
    found["meanings"] = meanings(sorted({name for run in found["runs"] for name in run["curves"]["values"]}))
    if several:
        found["against"] = against(runs, held_out)
        found["time_to"] = times_to_target([run["checkpoints"] for run in found["runs"]])
    return found, runs, held_out


def _run(name: str, run: RunFiles, found: Sequence[Evaluation], several: bool) -> dict[str, Any]:
    """several: of a comparison, which has no room for the prompts of each."""
    changed = change(run, found)  # None where two evaluations cannot be paired
    own: dict[str, Any] = {
        # What it is, and how far.
        "name": name,
        "folder": str(run.folder),
        "n": run.summary.get("rollouts_per_prompt", run.key("rollout", "n", None)),
        "steps": run.steps,  # done
        "seconds": run.summary.get("job_seconds"),  # None until it has ended
        "memory_mib": run.summary.get("peak_rss_mib"),  # of all processes
        # What came of it.
        "verdict": verdict(run, found, changed),
        "evaluations": [e.as_dict() for e in found],
        "change": changed,
        "curves": curves(run.rows),  # every figure
        # What it took.
        "checkpoints": checkpoints(run, found),
        "generation": generation(run),
        # What it was made with.
        "config": {f"{section}.{key}": value for section, keys in run.config.items() for key, value in _keys(keys)},
        "starts": run.starts,
    }

    # Prompts, where there is room for them.
    if not several:
        own["by_task"] = by_task(run)
        own |= {f.__name__: {kind: f(run, kind) for kind in ("evaluation", "step")} for f in (spread, heat)}
    return own | {"missing": missing(run, found)}


def meanings(names: Sequence[str]) -> dict[str, dict[str, str]]:
    """Return unit, meaning and bad values of each documented metric of a step."""
    found = {}
    for name in names:
        file = "time" if name.startswith("time/") else "step"
        if entry := metric_docs.find(name.removeprefix("time/"), file):
            found[name] = {"unit": entry[1].unit, "meaning": entry[1].meaning, "bad": entry[1].bad}
    return found


def missing(run: RunFiles, found: Sequence[Evaluation]) -> dict[str, str]:
    """Why a part of the page is not there, by the part: a sentence each."""
    said = {}
    # Of metrics.jsonl.
    names = {name for row in run.rows for name in row}
    if not run.rows:
        said["curves"] = "No step is done yet: there is nothing to draw."
    if not any(name.startswith("theory_good_turing/") for name in names):
        said["theory"] = "No figures of unsampled answers are recorded: theory.every = 0, or no step is done."

    # Of evaluations.
    if not found:
        said["evaluation"] = "No held-out evaluation: give data.held_out, or wait for the first one."
    elif len(found) == 1:
        said["evaluation"] = "One held-out evaluation so far: a change needs two."

    # Of rollouts/.
    if not run.moments:
        said["rollouts"] = (
            "No rollouts are recorded: a run records them in run.dir/rollouts from its first evaluation on."
        )
    elif not run.of_kind("step"):
        said["steps"] = "No step's rollouts are recorded yet."

    # Of run.json, and of checkpoints in its place.
    if not run.config:
        said["config"] = "The configuration is not recorded: the run is older than run.json, and has no checkpoint."
    elif not run.starts:
        said["starts"] = (
            "Command and versions are not recorded: the run is older than run.json. The keys are those of its newest "
            "checkpoint, which has what decides a run's results alone."
        )
    return said


def _keys(values: Any) -> list[tuple[str, Any]]:
    return list(values.items()) if isinstance(values, Mapping) else []


def _names(runs: Sequence[RunFiles]) -> list[str]:
    """Of the folders; with as many of their parents as tell them apart."""
    for depth in range(1, max(len(run.folder.parts) for run in runs) + 1):
        names = ["/".join(run.folder.parts[-depth:]) for run in runs]
        if len(set(names)) == len(names):
            break
    return names
