"""Lines that a run prints on the console."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from megatron_brorl.algo.advice import why_no_signal
from megatron_brorl.algo.pass_at_k import widest
from megatron_brorl.train.evaluate import Evaluation


def after_steps_text(steps: int) -> str:
    """Return "after 12 steps": a count of finished steps."""
    return f"after {steps} step{'' if steps == 1 else 's'}"


def evaluation_line(evaluation: dict[str, Any]) -> str:
    """Return pass@1 with its interval, pass@k of the largest k, and the mean reward if it differs from pass@1."""
    share, reward = evaluation["pass_at_1"], evaluation["mean_reward"]
    parts = [f"pass@1 {100 * share['mean']:.1f}% (95% interval {100 * share['low']:.1f} to {100 * share['high']:.1f})"]
    if k_and_value := widest(evaluation["pass_at_k"]):
        parts.append(f"pass@{k_and_value[0]} {100 * k_and_value[1]:.1f}%")
    if reward["mean"] != share["mean"]:
        parts.append(f"mean reward {reward['mean']:.4g} (95% interval {reward['low']:.4g} to {reward['high']:.4g})")
    return ", ".join(parts)


def evaluation_metrics(evaluation: Evaluation) -> dict[str, float]:
    """Return the metrics of an evaluation for metrics.jsonl."""
    share, reward = evaluation.pass_at_1, evaluation.mean_reward
    by_k = {f"pass_at_{k}": value for k, value in evaluation.pass_at_k.items()}
    rewards = {"held_out_reward": reward.mean, "held_out_reward_low": reward.low, "held_out_reward_high": reward.high}
    return by_k | {"pass_at_1": share.mean, "pass_at_1_low": share.low, "pass_at_1_high": share.high} | rewards


def pass_at_k(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return pass@k by k from metrics of evaluation_metrics; empty without an evaluation."""
    return {k: v for key, v in metrics.items() if (k := key.removeprefix("pass_at_")).isdigit()}


def console_line(metrics: dict[str, float], seconds: dict[str, float]) -> dict[str, str]:
    """Return the metrics of a step to print, by label. Problems are included only if they occurred."""
    shown = {
        "reward": _formatted(metrics["reward"], ".3f"),
        "kept": _formatted(metrics["kept_share"], ".0%"),
        "tokens": _formatted(metrics["response_tokens"], ".1f"),
    }

    if "teacher_kl" in metrics:
        shown["teacher KL"] = _formatted(metrics["teacher_kl"], ".3g")

    # In nats, between engine and trainer. A large gap is the first sign of weights that did not arrive.
    if "logprob_gap_max" in metrics:
        shown["gap"] = f"{metrics['logprob_gap_max']:.1e}"
    shown["took"] = f"{seconds['step']:.1f}s"

    if "throughput/tokens_per_s" in seconds:
        shown["tok/s/device"] = f"{seconds['throughput/tokens_per_s']:.0f}"
    if "throughput/update_mfu" in seconds:
        shown["MFU"] = f"{100 * seconds['throughput/update_mfu']:.0f}%"
    if seconds.get("ranks/idle", 0.0) >= 0.01:
        shown["idle"] = f"{100 * seconds['ranks/idle']:.0f}%"

    if why := why_no_signal(metrics):
        shown["no signal"] = why
    if metrics["updates_skipped"]:
        shown["updates skipped (gradient not finite)"] = f"{metrics['updates_skipped']:.0f}"
    # Answers on which a verifier raised count as wrong, although the verifier may be at fault.
    if metrics["verifier_errors"]:
        label = "environment raised" if "turns" in metrics else "verifier raised"
        shown[label] = f"{metrics['verifier_errors']:.0f}x"
    if metrics["nonfinite_rows"]:
        shown["rows left out (not finite)"] = f"{metrics['nonfinite_rows']:.0f}"
    if metrics["lost_share"]:
        shown["lost"] = f"{100 * metrics['lost_share']:.2g}%"

    if "explained_variance" in metrics:
        shown["explained"] = f"{100 * metrics['explained_variance']:.0f}%"
    if "carried_rollouts" in metrics:
        shown["carried"] = f"{metrics['carried_rollouts']:.0f}"

    if "pass_at_1" in metrics:
        shown["pass@1"] = f"{100 * metrics['pass_at_1']:.1f}%"
        if k_and_value := widest(pass_at_k(metrics)):
            shown[f"pass@{k_and_value[0]}"] = f"{100 * k_and_value[1]:.1f}%"
        if metrics["held_out_reward"] != metrics["pass_at_1"]:
            shown["held-out reward"] = f"{metrics['held_out_reward']:.3g}"
    return shown


def _formatted(value: float, form: str) -> str:
    """Format a value; "-" for nan, because a step that closes no group has no means."""
    return "-" if math.isnan(value) else format(value, form)
