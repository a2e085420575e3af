"""The page of a study, made of its design and its table alone."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_brorl.cli.files import write_text
from megatron_brorl.errors import UserError
from megatron_brorl.report.benchmarks import table
from megatron_brorl.report.style import save
from study import figures, map_page
from study.design import Comparison, Design, sha256
from study.end_points import (
    Place,
    Results,
    chosen_rates,
    differences,
    final_shares,
    seconds_to_end,
    support,
    tuning_table,
)
from study.inference import MixedFit, PairedT, holm, mixed_model, paired_t
from study.plateau import gain, parts_done, reached

PAGE = "page.md"


def write(design: Design, rows: Sequence[dict[str, Any]], directory: Path, command: str) -> Path:
    """page.md and its figures; returns the page's path. Sections of phases that are not there yet are left out."""
    results = Results(rows)
    parts = [_head(design, rows, command), _claims(design)]
    if results.runs("tune"):
        parts.append(_tuning(design, results))
    if results.runs("test"):
        for prompt_set in ("trained", "unseen"):
            name = f"curves_{prompt_set}.png"
            save(figures.curves(design, results, prompt_set), directory / name)
            parts.append(f"![pass@1 on {prompt_set} prompts over seconds and over rollouts]({name})\n")
        tests = tested(design, results)
        drawn = {label(c): (list(by_seed.values()), test) for c, by_seed, test, _ in tests}
        save(figures.differences(drawn), directory / "differences.png")
        parts += [
            _differences(design, tests),
            _times(design, results),
            "![Differences by warm start](differences.png)\n",
            _runs(design, results),
        ]
        if design.maps:
            parts.append(map_page.section(design, results))
        if design.evaluation.support:
            parts.append(_support(design, results))
        if design.mixed_model:
            parts.append(_mixed(design, results))
    if results.runs("plateau"):
        save(figures.curves(design, results, "trained", "plateau"), directory / "curves_plateau.png")
        parts += [_plateau(design, results), "![pass@1 from the plateau on](curves_plateau.png)\n"]
    write_text(directory / PAGE, "\n".join(parts))
    return directory / PAGE


Test = tuple[Comparison, dict[int, float], PairedT | None, str]  # differences by warm start; why there is no test


def tested(design: Design, results: Results) -> list[Test]:
    """Every declared comparison, in the order of the design."""
    found: list[Test] = []
    for c in design.comparisons:
        try:
            by_seed = differences(design, c, results)
        except UserError as e:
            found.append((c, {}, None, str(e)))
            continue
        enough = len(by_seed) > 1
        test = paired_t(list(by_seed.values()), design.level) if enough else None
        found.append((c, by_seed, test, "" if enough else "one warm start has no interval"))
    return found


def adjusted(tests: Sequence[Test]) -> list[float]:
    """Holm's p-values; a comparison without a test counts in the family as one with p = 1."""
    return holm([test.p if test else 1.0 for _, _, test, _ in tests])


def label(c: Comparison) -> str:
    """A comparison in words."""
    figure = "pass@1" if c.figure == "pass_at_1" else "pass@k"
    what = f"{'area' if c.end_point == 'area' else 'final'} {figure} over {c.over}"
    phase = ", from the plateau" if c.phase == "plateau" else ""
    return f"{c.after} - {c.before}: {what}, {c.prompt_set}, {'+'.join(c.bins)}{phase}"


def _head(design: Design, rows: Sequence[dict[str, Any]], command: str) -> str:
    machines, versions = sorted({row["machine"] for row in rows}), sorted({row["versions"] for row in rows})
    loads = [row["load_average"] for row in rows]
    lines = [
        f"# {design.name}: {design.question}",
        "",
        f"Design sha256 `{sha256(design)}`, which every row of [results.parquet](results.parquet) repeats; "
        f"{len({row['run'] for row in rows})} runs. Seconds are those of training steps (sampling, scoring, updates, "
        "refit) on the slowest rank; evaluations stop the clock.",
        "",
        f"Machine: {'; '.join(machines)}; load average when a run began {min(loads):.1f} to {max(loads):.1f}.",
        "",
        *(f"Versions: {', '.join(f'{k} {v}' for k, v in json.loads(text).items())}" for text in versions),
        "",
        f"```\npython tools/run_study.py {command}\n```",
        "",
    ]
    return "\n".join(lines)


def _claims(design: Design) -> str:
    rows = [["claim", "refuted by"], *([c.claim, c.refuted_by] for c in design.claims)]
    return f"## Declared before the runs\n\n{table(rows)}"


def _tuning(design: Design, results: Results) -> str:
    """The score of every rate; the chosen one in bold."""
    scores = tuning_table(design, results)
    try:
        chosen = chosen_rates(design, results)
    except UserError:
        chosen = {}  # not all of them are tuned yet
    rows = [["arm", *(f"lr x {f:g}" for f in design.tuning.factors), "at the edge"]]
    for arm in (a for a in design.arms if a.name in scores):
        cells = []
        for factor in design.tuning.factors:
            lr = arm.lr * factor
            score = scores[arm.name].get(lr)
            text = "" if score is None else f"{score:.1%} ({lr:.2g})" if score > float("-inf") else f"failed ({lr:.2g})"
            cells.append(f"**{text}**" if chosen.get(arm.name) == lr else text)
        edges = {arm.lr * min(design.tuning.factors), arm.lr * max(design.tuning.factors)}
        rows.append([arm.name, *cells, "yes" if chosen.get(arm.name) in edges else ""])
    t = design.tuning
    return (
        f"## Rates\n\nMean height of pass@1 on {t.prompt_set} prompts over {t.over}, warm starts "
        f"{', '.join(map(str, design.warm_starts.tune))}, bins {', '.join(t.bins)}; the highest is chosen, of equal "
        f"ones the lower rate.\n\n{table(rows)}"
    )


def _differences(design: Design, tests: Sequence[Test]) -> str:
    rows = [["comparison", "difference (95% interval)", "t", "degrees", "p, two-sided", "p, Holm", "by warm start"]]
    for (c, by_seed, test, why), p in zip(tests, adjusted(tests), strict=True):
        own = ", ".join(f"{d:+.1%}" for d in by_seed.values())
        if test is None:
            rows.append([label(c), why, "", "", "", "", own])
            continue
        gap = f"{test.mean:+.1%} ({test.low:+.1%} to {test.high:+.1%})"
        mark = "**" if p <= design.level else ""
        rows.append([label(c), gap, f"{test.t:.2f}", str(test.degrees), f"{test.p:.2g}", f"{mark}{p:.2g}{mark}", own])
    return (
        f"## Differences\n\nPaired by warm start, {len(tests)} declared comparisons; bold: at most {design.level:g} "
        f"after Holm's correction. Both curves are read up to where the shorter one ends.\n\n{table(rows)}"
    )


def _times(design: Design, results: Results) -> str:
    """How soon one arm of a compared pair holds what the other one ends with, both ways round."""
    pairs = [(c.after, c.before, of) for c in design.comparisons if c.phase == "test" for of in c.bins]
    both = dict.fromkeys(pair for a, b, of in pairs for pair in ((a, b, of), (b, a, of)))
    rows = [["", "bin", *(f"warm start {seed}" for seed in design.warm_starts.test)]]
    for one, other, of in both:
        cells = [_seconds(results, one, other, of, seed) for seed in design.warm_starts.test]
        rows.append([f"{one} holds what {other} ends with", of, *cells])
    return (
        "## Time to a target\n\nSeconds until a run first has the pass@1 on trained prompts that another one ends "
        "with, on straight lines between evaluations; in brackets when that one ended. No declared comparison: curves "
        f"are noisy, and a few points long.\n\n{table(rows)}"
    )


def _seconds(results: Results, one: str, other: str, of: str, seed: int) -> str:
    try:
        first, end = seconds_to_end(results, *(Place("test", arm, of, seed) for arm in (one, other)))
    except (UserError, ValueError):  # not done, or ended by an error before its first evaluation
        return "-"
    return f"never ({end:.1f})" if first is None else f"{first:.1f} ({end:.1f})"


def _runs(design: Design, results: Results) -> str:
    """Means over warm starts of how the test runs ended."""
    k = design.evaluation.k
    names = ["pass@1 trained", f"pass@{k} trained", "pass@1 unseen", f"pass@{k} unseen"]
    rows = [["bin", "arm", "runs", "lr", "steps", "rollouts", "tokens", "seconds", *names, "kept"]]
    for of in design.prompts.bins:
        for arm in design.arms:
            found = [n for n, r in results.runs("test").items() if (r["arm"], r["bin"]) == (arm.name, of.name)]
            if not found:
                continue
            trained = [results.of(n, "trained")[-1] for n in found]
            unseen = [results.of(n, "unseen")[-1] for n in found]
            ends = [_mean(trained, key) for key in ("steps", "rollouts", "tokens", "seconds")]
            scores = [_share(part, key) for part in (trained, unseen) for key in ("pass_at_1", "pass_at_k")]
            lr = f"{trained[0]['lr']:.2g}"
            kept = _share(trained, "kept_share")
            rows.append([of.name, arm.name, str(len(found)), lr, *(f"{x:,.0f}" for x in ends), *scores, kept])
    return f"## Ends\n\nMeans over warm starts; kept: of the groups since the evaluation before.\n\n{table(rows)}"


def _support(design: Design, results: Results) -> str:
    rows = [["bin", "arm", "warm start", "prompts with a right answer before", "after", "lost", "gained"]]
    for of in design.prompts.bins:
        for arm in design.arms:
            for name, row in results.runs("test").items():
                if (row["arm"], row["bin"]) != (arm.name, of.name) or row["error"]:
                    continue
                s = support(results, name)
                if s:
                    cells = map(str, (row["warm_start"], s.before, s.after, s.lost, s.gained))
                    rows.append([of.name, arm.name, *cells])
    return (
        f"## Support\n\n{design.evaluation.support:,} samples of each of the {design.prompts.trained} trained prompts, "
        f"before and after a run.\n\n{table(rows)}"
    )


def _mixed(design: Design, results: Results) -> str:
    """A model per bin, of the last evaluations on trained prompts."""
    rows = [["bin", "effect", "share right (95% interval, normal)"]]
    notes = []
    for of in design.prompts.bins:
        shares = final_shares(results, of.name, "trained")
        arms = [a.name for a in design.arms if any(row["arm"] == a.name for row in shares)]
        if len(arms) < 2 or len({row["warm_start"] for row in shares}) < 2:
            notes.append(f"{of.name}: a model needs two arms and two warm starts.")
            continue
        fit: MixedFit = mixed_model(shares, arms[0])
        for arm, e in fit.effects.items():
            rows.append([of.name, f"{arm} - {arms[0]}", f"{e.mean:+.1%} ({e.low:+.1%} to {e.high:+.1%})"])
        spread = ", ".join(f"{name} {value**0.5:.3f}" for name, value in fit.variances.items())
        notes.append(f"{of.name}: standard deviations {spread}" + ("." if fit.converged else "; **did not converge**."))
    return (
        "## Mixed model\n\nShare right ~ arm, with random effects of warm start, run and prompt, the last two crossed; "
        f"final evaluation, trained prompts.\n\n{table(rows)}\n" + "\n".join(f"* {note}" for note in notes) + "\n"
    )


def _plateau(design: Design, results: Results) -> str:
    plateau = design.plateau[0]
    rows = [["warm start", "bin", "continuations of " + plateau.arm + ": rate, gain", "plateau"]]
    for seed in plateau.warm_starts:
        for of in plateau.bins:
            parts = parts_done(plateau, results, seed, of)
            gains = [f"{results.of(n, 'trained')[0]['lr']:.2g}: {gain(results, n):+.1%}" for n in parts]
            rows.append([str(seed), of, ", ".join(gains), "yes" if reached(plateau, results, seed, of) else "no"])
    return (
        f"## Plateau\n\n{plateau.arm} goes on, its rate times {plateau.cut:g} after a continuation that gains less "
        f"than {plateau.gain:.1%} on trained prompts; it is reached when the next one gains less too. Then "
        f"{', '.join(plateau.arms)} go on from its weights and optimizer.\n\n{table(rows)}"
    )


def _mean(rows: Sequence[Mapping[str, Any]], key: str) -> float:
    return sum(row[key] for row in rows) / len(rows)


def _share(rows: Sequence[Mapping[str, Any]], key: str) -> str:
    return "" if any(row[key] is None for row in rows) else f"{_mean(rows, key):.1%}"
