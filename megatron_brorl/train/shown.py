"""What a run tells on the way."""

from __future__ import annotations

from typing import Any

from megatron_brorl.train.evaluate import Evaluation


def percent(evaluation: dict[str, Any]) -> str:
    p = evaluation["pass_at_1"]
    return f"{100 * p['mean']:.1f}% (95% interval {100 * p['low']:.1f} to {100 * p['high']:.1f})"


def flat(evaluation: Evaluation) -> dict[str, float]:
    p = evaluation.pass_at_1
    passes = {f"pass_at_{k}": value for k, value in evaluation.pass_at_k.items()}
    return passes | {"pass_at_1": p.mean, "pass_at_1_low": p.low, "pass_at_1_high": p.high}


def watched(values: dict[str, float], seconds: dict[str, float]) -> dict[str, str]:
    shown = {
        "reward": f"{values['reward']:.3f}",
        "kept": f"{100 * values['kept_share']:.0f}%",
        "tokens": f"{values['response_tokens']:.1f}",
        "gap": f"{values['logprob_gap_max']:.1e}",
        "step": f"{seconds['step']:.1f}s",
    }
    if values["updates_skipped"]:
        shown["updates skipped (gradient not finite)"] = f"{values['updates_skipped']:.0f}"
    if values["nonfinite_rows"]:
        shown["rows left out (not finite)"] = f"{values['nonfinite_rows']:.0f}"
    if values["lost_share"]:
        shown["lost"] = f"{100 * values['lost_share']:.2g}%"
    if "explained_variance" in values:
        shown["explained"] = f"{100 * values['explained_variance']:.0f}%"
    if "carried" in values:
        shown["carried"] = f"{values['carried']:.0f}"
    if "pass_at_1" in values:
        shown["pass@1"] = f"{100 * values['pass_at_1']:.1f}%"
    return shown
