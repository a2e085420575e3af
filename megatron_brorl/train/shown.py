"""What a run tells on the way."""

from __future__ import annotations

from typing import Any

from megatron_brorl.algo.estimators import widest
from megatron_brorl.train.evaluate import Evaluation


def percent(evaluation: dict[str, Any]) -> str:
    """pass@1 with its interval, and pass@k of the largest k."""
    p, more = evaluation["pass_at_1"], widest(evaluation["pass_at_k"])
    text = f"pass@1 {100 * p['mean']:.1f}% (95% interval {100 * p['low']:.1f} to {100 * p['high']:.1f})"
    return f"{text}, pass@{more[0]} {100 * more[1]:.1f}%" if more else text


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
    if values["verdict_errors"]:
        shown["verifier raised"] = f"{values['verdict_errors']:.0f}x"
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
        passes = {k: v for key, v in values.items() if (k := key.removeprefix("pass_at_")).isdigit()}
        if more := widest(passes):
            shown[f"pass@{more[0]}"] = f"{100 * more[1]:.1f}%"
    return shown
