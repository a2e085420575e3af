"""`python tools/run_study.py`: the phases of a study in turn, and its page."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from megatron_brorl.errors import UserError
from study import order, places, processes, results
from study.design import Design, canonical, read, sha256
from study.end_points import Results, chosen_rates
from study.order import Run
from study.plateau import next_part, on_from

DESIGN = "design.json"


def main(description: str | None = None) -> None:
    """Read the command line, run, and exit: 2 with one line for what the user can mend."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("design", type=Path, help="TOML file of the design")
    parser.add_argument("directory", type=Path, help="where runs, results and the page go")
    parser.add_argument("--plan", action="store_true", help="print what would be run, and stop")
    parser.add_argument("--page", action="store_true", help="write the page of what is there, and run nothing")
    args = parser.parse_args()
    try:
        design = read(args.design)
        design.run_config([])  # a key that is wrong is told before anything is run
        if args.plan:
            print(plan(design))
            return
        check_unchanged(design, args.directory)
        if not args.page:
            run_all(design, args.directory)
        write_page(design, args.directory, args.design)
    except UserError as e:
        print(f"study: {e}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("study: stopped; start the same command again to go on", file=sys.stderr)
        sys.exit(130)


def plan(design: Design) -> str:
    """Runs by phase, and the seconds of training that they may take; evaluations and warm starts come on top."""
    w = design.warm_starts
    counts = {
        "tune": len(order.tuning(design)),
        "test": len(order.testing(design, {a.name: a.lr for a in design.arms})),
        "plateau (at most)": sum(len(p.warm_starts) * len(p.bins) * (p.most + len(p.arms)) for p in design.plateau),
    }
    total, seconds = sum(counts.values()), design.budget.seconds
    lines = [f"design {design.name}, sha256 {sha256(design)}", f"warm starts: {len(w.tune) + len(w.test)}"]
    lines += [f"{name}: {count} runs" for name, count in counts.items()]
    lines += [f"pilots: {len(w.test) * len(design.prompts.bins)} of {m.steps} steps" for m in design.maps if m.pilot]
    lines.append(f"{total} runs of {seconds:g} s of training: {total * seconds / 60:.0f} minutes, without evaluations")
    return "\n".join(lines)


def check_unchanged(design: Design, directory: Path) -> None:
    """Note the design before the first run. Raises UserError where the directory holds another's."""
    path, text = directory / DESIGN, canonical(design)
    if path.is_file():
        before = path.read_text(encoding="utf-8")
        if before != text:
            raise UserError(
                f"{path}: the design has changed since its first run ({_first_change(before, text)}): give the changed "
                "design a directory of its own, or put it back"
            )
        return
    directory.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def run_all(design: Design, directory: Path) -> None:
    """Every run that is not done, phase by phase. Raises UserError where one fails."""
    if design.mixed_model and importlib.util.find_spec("statsmodels") is None:
        raise UserError(
            "mixed_model = true needs statsmodels, which is not installed: pip install 'megatron-brorl[study]', before "
            "the runs"
        )
    with processes.alone(directory):
        ranks, commit = processes.Ranks(design.processes), processes.commit()

        def run_each(runs: Sequence[Run]) -> None:
            for number, run in enumerate(runs, start=1):
                if results.is_done(directory, run.name):
                    continue
                begun = time.monotonic()
                processes.fresh(places.work(directory, run.name))
                ranks.run("trial.make", (design, directory, run, commit), directory / "logs" / f"{run.name}.log")
                print(f"{run.phase} {number}/{len(runs)}: {run.name} ({time.monotonic() - begun:.0f} s)", flush=True)

        for seed in (*design.warm_starts.tune, *design.warm_starts.test):
            place, log = places.place_of(directory, seed), directory / "logs" / f"w{seed}.log"
            if place.start.is_file():
                continue
            begun = time.monotonic()
            processes.fresh(place.folder)
            ranks.run("warm_start.make_model", (design, directory, seed), log, ranks=1)
            for stage in range(len(design.warm_starts.stages)):
                ranks.run("warm_start.train", (design, directory, seed, stage), log)
            ranks.run("warm_start.choose_prompts", (design, directory, seed), log)
            print(f"warm start {seed} ({time.monotonic() - begun:.0f} s)", flush=True)

        # Rates are chosen by what the tuning came to, which has warm starts and prompts of its own.
        run_each(order.tuning(design))
        rates = chosen_rates(design, _table(design, directory))
        run_each(order.testing(design, rates))
        # The advisor is asked before it could know how the arms come out.
        for pilot in order.pilots(design, rates):
            if not results.is_done(directory, pilot.name):
                log = directory / "logs" / f"{pilot.name}.log"
                processes.fresh(places.work(directory, pilot.name))
                ranks.run("pilot.sample", (design, directory, pilot), log)
                ranks.run("pilot.advise", (directory, pilot), log, ranks=1)
                ranks.run("pilot.note", (design, directory, pilot, commit), log, ranks=1)
                print(f"pilot: {pilot.name}", flush=True)
        for plateau in design.plateau:
            for seed in plateau.warm_starts:
                for of in plateau.bins:
                    while run := next_part(design, rates, _table(design, directory), seed, of):
                        run_each([run])
                    run_each(on_from(design, _table(design, directory), seed, of))


def write_page(design: Design, directory: Path, path: Path) -> None:
    """results.parquet of all runs, and the page made of it alone."""
    from study.page import write

    rows = results.read_all(directory, sha256(design))
    if not rows:
        raise UserError(f"{directory}: no run is done; start the command without --page")
    table = results.join(directory, rows)
    print(write(design, results.read([table], sha256(design)), directory, f"{path} {directory}"))


def _table(design: Design, directory: Path) -> Results:
    return Results(results.read_all(directory, sha256(design)))


def _first_change(before: str, now: str) -> str:
    """The first section that differs."""
    try:
        old, new = json.loads(before), json.loads(now)
        return next((key for key in new if old.get(key) != new[key]), "its keys")
    except (ValueError, AttributeError):
        return "design.json is damaged"
