"""What runs had spent when they got how far: tables at checkpoints, time to a target, and generation by itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from megatron_brorl.report.held_out import Evaluation
from megatron_brorl.report.run_files import Row, RunFiles

BYTES = {"fp32": 4, "bf16": 2}  # of a weight, by rollout.dtype
Over = Literal["seconds", "rollouts"]


def checkpoints(run: RunFiles, found: Sequence[Evaluation]) -> list[dict[str, Any]]:
    """A row per evaluation: steps done, seconds of these steps, rollouts sampled and kept by then, and its passes.

    Kept: of groups that were trained on, as the shares of the steps have it. Evaluations take no time here.
    """
    rows = []
    for e in found:
        done = [row for row in run.rows if row["step"] < e.steps]
        rows.append(
            {
                "steps": e.steps,
                "seconds": sum(_time(row, "step") for row in done),
                "rollouts": sum(_known(row, "rollouts") for row in done),
                "kept": sum(_kept(row) for row in done),
                "passes": [{"k": k, **e.passes[k]} for k in sorted(e.passes)],
            }
        )
    return rows


def reached(places: Sequence[float], heights: Sequence[float], target: float) -> float | None:
    """The first place at which a curve, linear between its points, is at `target` or above; None where it never is.

    places ascend; heights: of the points there, as many.
    """
    for i, (x, y) in enumerate(zip(places, heights, strict=True)):
        if y >= target:
            if not i:
                return x
            x0, y0 = places[i - 1], heights[i - 1]  # below the target, so that y > y0
            return x0 + (x - x0) * (target - y0) / (y - y0)
    return None


def times_to_target(tables: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any] | None]:
    """Per run the pass@1 that it ended with, and when each of the runs first held that; None without an evaluation.

    tables: checkpoints of each run. runs: seconds and rollouts of every run, None where it never held the target. A
    curve of noisy points is early by luck as well: a target that was held once may be lost again.
    """
    curves = [[(row, _pass_at_1(row)) for row in table if row["passes"]] for table in tables]
    found: list[dict[str, Any] | None] = []
    for own in curves:
        if not own:
            found.append(None)
            continue

        # The end of one run, for all of them.
        target = own[-1][1]
        runs = []
        for curve in curves:
            heights = [height for _, height in curve]
            spent = {
                over: reached([row[over] for row, _ in curve], heights, target) for over in ("seconds", "rollouts")
            }
            runs.append(spent if curve and spent["seconds"] is not None else None)
        found.append({"target": target, "runs": runs})
    return found


def generation(run: RunFiles) -> dict[str, Any] | None:
    """Of all steps of a run, sampling by itself and as a part of the whole; None where no step has sampled anything.

    rollouts_per_s: over the seconds of `generate` alone. end_to_end_per_s, kept_per_s: rollouts, and those that were
    trained on, over whole steps. rows: rollouts that a device decodes together, mean over turns. intensity: operations
    per byte of weights that decoding reads, 2 x rows over the bytes of a weight; attention and its keys and values not
    counted. prompt_hits: share of prompt tokens that rows found computed, mean over rollouts; prompt_shared: the
    most that siblings leave to be found, 1 - 1 / N. None where a figure is not known.
    """
    rollouts = sum(_known(row, "rollouts") for row in run.rows)
    seconds, whole = (sum(_time(row, name) for row in run.rows) for name in ("generate", "step"))
    if not (rollouts and seconds and whole):
        return None

    # Turns are what tokens are spread over: a mean over turns is tokens over the sum of tokens / rows.
    told = [(_tokens(row), _time(row, "kv_cache/rows")) for row in run.rows]
    told = [(tokens, rows) for tokens, rows in told if tokens and rows]
    rows = sum(tokens for tokens, _ in told) / sum(tokens / rows for tokens, rows in told) if told else None
    size, n = BYTES.get(run.key("rollout", "dtype", "")), run.key("rollout", "n", 0)
    return {
        # Samples per second, as the paper's table 2 and its table 1 have them.
        "rollouts_per_s": rollouts / seconds,
        "tokens_per_s": sum(_tokens(row) for row in run.rows) / seconds,
        "end_to_end_per_s": rollouts / whole,
        "kept_per_s": sum(_kept(row) for row in run.rows) / whole,
        "share_of_step": seconds / whole,
        # What decides whether decoding waits for memory.
        "rows": rows,
        "intensity": 2 * rows / size if rows and size else None,
        "prompt_hits": _mean_over_rollouts(run.rows, "kv_cache/prompt_hits"),
        "prompt_shared": 1 - 1 / n if n else None,
    }


def _mean_over_rollouts(rows: Sequence[Row], name: str) -> float | None:
    told = [(_known(row, "rollouts"), _time(row, name)) for row in rows if name in (row.get("time") or {})]
    count = sum(n for n, _ in told)
    return sum(n * value for n, value in told) / count if count else None


def _pass_at_1(row: dict[str, Any]) -> float:
    return float(row["passes"][0]["mean"])


def _time(row: Row, name: str) -> float:
    return float((row.get("time") or {}).get(name) or 0.0)


def _known(row: Row, name: str) -> float:
    value = row.get(name)  # null where there was nothing to take a mean of
    return float(value) if isinstance(value, (int, float)) else 0.0


def _tokens(row: Row) -> float:
    return _known(row, "rollouts") * _known(row, "response_tokens")


def _kept(row: Row) -> float:
    return _known(row, "rollouts") * _known(row, "kept_share")
