"""The figures of a cluster: who waits for whom, and what a device gets done. Wall-clock ones, beside the metrics.

Of a phase count the seconds in which a rank does its own work: its engine's call, its verdicts after that, its passes
and optimizer steps without the reduction of gradients, in which it waits for the others. Exchange and refit are
collectives, whose seconds are those of all of it.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from megatron_brorl.parallel import collectives
from megatron_brorl.tracking.timeline import Timeline

PHASES = ("generate", "score", "exchange", "train", "refit")
_TRAINING = ("forward", "optimizer step")  # spans of passes, of which the second reduces gradients

Columns = Mapping[str, npt.NDArray[np.float64]]  # a figure of every rank [ranks]


def cluster_figures(
    timeline: Timeline, seconds: Mapping[str, float], trained_tokens: float, peak: float | None
) -> dict[str, float]:
    """The figures of a step, the same on every rank; a collective of one message.

    seconds: this rank's phases. trained_tokens: of all ranks. peak: operations per second of a device; None: unknown,
    and no utilisation is told.
    """
    own = {**own_figures(timeline), **{f"wall_{name}": seconds[name] for name in ("train", "step")}}
    table = np.array(collectives.all_gather(list(own.values())))
    ranks = dict(zip(own, table.T, strict=True))
    return {**waiting(ranks), **throughput(ranks, trained_tokens, peak), **kv_cache(ranks)}


def own_figures(timeline: Timeline) -> dict[str, float]:
    """What this rank has to tell of its step."""
    t = timeline
    usage = [s.values for s in t.spans if s.name == "generate" and "kv_turns" in s.values]
    return {
        "generate": t.seconds("generate") - t.total("generate", "idle"),
        "score": t.seconds("verdicts"),
        "exchange": t.seconds("exchange"),
        "train": sum(map(t.seconds, _TRAINING)) - t.seconds("reduce gradients"),
        "refit": t.seconds("refit"),
        "sampled_tokens": t.total("generate", "tokens"),
        "forward_s": t.seconds("forward"),
        "forward_flops": t.total("forward", "flops"),
        "update_s": t.seconds("optimizer step"),
        "update_flops": t.total("optimizer step", "flops"),
        "kv_peak": max((u["kv_peak"] for u in usage), default=0.0),
        "kv_sum": sum(u["kv_mean"] * u["kv_turns"] for u in usage),
        "kv_turns": sum(u["kv_turns"] for u in usage),
        "prompt_tokens": sum(u["prompt_tokens"] for u in usage),
        "prompt_found": sum(u["prompt_found"] for u in usage),
    }


def waiting(ranks: Columns) -> dict[str, float]:
    """Slowest, mean and fastest rank of each phase in seconds, and the share of it that a rank idles in the mean.

    ranks/idle is that of the whole step: what ranks lose to the slowest one of each phase, over the step.
    """
    found: dict[str, float] = {}
    lost = 0.0
    for phase in PHASES:
        column = ranks[phase]
        slowest, mean, fastest = float(column.max()), float(column.mean()), float(column.min())
        if slowest <= 0:
            continue  # this step had no such phase
        found |= {f"ranks/{phase}_slowest": slowest, f"ranks/{phase}_mean": mean, f"ranks/{phase}_fastest": fastest}
        found[f"ranks/{phase}_idle"] = 1 - mean / slowest
        lost += slowest - mean

    step = float(ranks["wall_step"].max())
    return {**found, "ranks/step_slowest": step, "ranks/idle": lost / step if step > 0 else 0.0}


def throughput(ranks: Columns, trained_tokens: float, peak: float | None) -> dict[str, float]:
    """Response tokens per second and device, TFLOP/s of a device, and its share of the peak (model FLOPs utilisation).

    Seconds are those of the slowest rank. Operations of generation are not counted: "mfu", of the whole step, is what
    training and scoring passes come to.
    """
    devices = len(ranks["wall_step"])
    sampled, step = ranks["sampled_tokens"].sum(), ranks["wall_step"].max()
    forward, update = ranks["forward_flops"].sum(), ranks["update_flops"].sum()
    rates = {
        "tokens_per_s": (sampled, step),
        "generate_tokens_per_s": (sampled, ranks["generate"].max()),
        "train_tokens_per_s": (trained_tokens, ranks["wall_train"].max()),
        "forward_tflops": (forward / 1e12, ranks["forward_s"].max()),
        "update_tflops": (update / 1e12, ranks["update_s"].max()),
    }
    found = {f"throughput/{name}": float(done / s) / devices for name, (done, s) in rates.items() if done and s > 0}

    if peak:
        for name in ("forward", "update"):
            if f"throughput/{name}_tflops" in found:
                found[f"throughput/{name}_mfu"] = 1e12 * found[f"throughput/{name}_tflops"] / peak
        if forward + update and step > 0:
            found["throughput/mfu"] = float((forward + update) / step) / devices / peak
    return found


def kv_cache(ranks: Columns) -> dict[str, float]:
    """The share of the engine's pages that hold keys and values, where it says so: at most, and in the mean over the
    turns of all ranks. Rows are rollouts decoded together: each draws one token a turn. Prompt hits: of the prompt
    tokens of all rows, those that another row had in memory."""
    turns = float(ranks["kv_turns"].sum())
    if not turns:
        return {}
    drawn = float(ranks["sampled_tokens"][ranks["kv_turns"] > 0].sum())
    return {
        "kv_cache/peak": float(ranks["kv_peak"].max()),
        "kv_cache/mean": float(ranks["kv_sum"].sum()) / turns,
        "kv_cache/rows": drawn / turns,
        "kv_cache/prompt_hits": float(ranks["prompt_found"].sum() / ranks["prompt_tokens"].sum()),
    }
