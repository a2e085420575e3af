"""What came of a run in a few sentences: did it learn, by how much and how surely, and what is wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from megatron_brorl.algo.no_signal import FIGURES, Why, why_no_signal
from megatron_brorl.report.held_out import Evaluation
from megatron_brorl.report.run_files import RunFiles

Tone = Literal["good", "bad", "unclear"]

_NO_SIGNAL: dict[Why, str] = {
    "cut off": "nearly all responses are cut off at rollout.max_tokens",
    "no answer": "no response has an answer where reward.extract looks for it",
    "none right": "no response is right",
    "all right": "every response is right, so that nothing is left to learn",
    "no mixed group": "the rewards in every group are equal",
}


def verdict(run: RunFiles, found: Sequence[Evaluation], changed: Mapping[str, Any] | None) -> dict[str, Any]:
    """headline, tone, details (sentences) and findings (what is wrong)."""
    tone, headline, details = _change(changed) if changed and changed["passes"] else _unpaired(run, found)
    findings = list(run.summary.get("findings", {}).values())

    # Of a run without a summary its rows say what is wrong.
    means = {name: _mean([row.get(name) for row in run.rows]) for name in FIGURES}
    why = None if run.summary else why_no_signal(means)
    if why:
        findings.append(f"nothing to learn from so far: {_NO_SIGNAL[why]} (mean over {len(run.rows)} steps)")
    if findings and tone == "good":
        tone = "unclear"
    if why or _broke(run.summary.get("findings", {})):
        tone = "bad"
    return {"headline": headline, "tone": tone, "details": details, "findings": findings, "state": _state(run)}


def percent(share: float) -> str:
    """Of a share, to a tenth."""
    return f"{share:.1%}"


def points(share: float) -> str:
    """Of a difference of shares, with its sign; a rounded nothing has none."""
    value = round(100 * share, 1)
    return f"{value:+.1f}" if value else "0.0"


def _broke(findings: Mapping[str, str]) -> bool:
    """Whether a finding says that nothing was learned; the others are remarks."""
    return bool(set(findings) - {"no held-out", "task never right"})


def _change(changed: Mapping[str, Any]) -> tuple[Tone, str, list[str]]:
    """Of two evaluations of the same prompts."""
    # pass@1 comes first, because runs with other rewards have it too.
    first, *others = changed["passes"]
    reward = changed["reward"]  # None where it is pass@1
    tone, word = _word(first["difference"])
    begin: dict[Tone, str] = {"good": "It learned", "bad": "It got worse", "unclear": "No change beyond chance"}
    # Sentences in the order in which they are told.
    sentences = [_moved(first, word)]
    if reward:
        # Where pass@1 says nothing, the headline is the reward's.
        tone_of_reward, word = _word(reward["difference"])
        sentences.append(_moved_reward(reward, word))
        if tone == "unclear" and tone_of_reward != "unclear":
            tone = tone_of_reward
            sentences.reverse()
    # The other of the two figures is the first detail.
    headline = f"{begin[tone]}: {sentences[0]} over {changed['prompts']} held-out prompts."
    details = [f"{sentence}." for sentence in sentences[1:]]

    # The widest k: what sharpening a policy costs.
    if others:
        details.append(f"{_moved(others[-1], _word(others[-1]['difference'])[1])}.")
    if tone == "good" and others and _word(others[-1]["difference"])[0] == "bad":
        details.append(f"It answers more surely and solves fewer prompts in {others[-1]['k']} tries.")
    solved, lost, n = len(changed["solved"]), len(changed["lost"]), changed["samples"]
    tries = f"in {n} samples" if n > 1 else "in its one sample"
    details.append(
        f"Newly solved: {solved} of {changed['prompts']} prompts, newly lost: {lost} (right or never {tries})."
    )
    return tone, headline, details


def _word(difference: Mapping[str, float]) -> tuple[Tone, str]:
    """By whether the interval holds 0."""
    if difference["low"] > 0:
        return "good", "rose"
    if difference["high"] < 0:
        return "bad", "fell"
    return "unclear", "went"


def _moved(p: Mapping[str, Any], word: str) -> str:
    d = p["difference"]
    interval = f"95% interval {points(d['low'])} to {points(d['high'])}"
    ends = f"from {percent(p['before'])} to {percent(p['after'])}"
    return f"pass@{p['k']} {word} {ends}, {points(d['mean'])} points ({interval})"


def _moved_reward(reward: Mapping[str, Any], word: str) -> str:
    d = reward["difference"]
    interval = f"95% interval {d['low']:+.3g} to {d['high']:+.3g}"
    return f"mean reward {word} from {reward['before']:.3g} to {reward['after']:.3g}, {d['mean']:+.3g} ({interval})"


def _level(e: Evaluation) -> str:
    """pass@1 of an evaluation, and the mean reward beside it."""
    text = f"pass@1 {percent(e.passes[1]['mean'])}"
    if not e.reward:
        return text
    ends = f" (95% interval {e.reward['low']:.3g} to {e.reward['high']:.3g})" if "low" in e.reward else ""
    return f"{text} and mean reward {e.reward['mean']:.3g}{ends}"


def _unpaired(run: RunFiles, found: Sequence[Evaluation]) -> tuple[Tone, str, list[str]]:
    """Where two evaluations cannot be compared prompt by prompt."""
    details = [sentence] if (sentence := _reward(run)) else []
    if not found:
        return "unclear", "Whether it learned is not known: there is no held-out evaluation.", details
    p = found[0].passes[1]
    if len(found) == 1:
        when = "before the first step" if not found[0].steps else f"after {found[0].steps} steps"
        headline = f"Whether it learned is not known yet: the one evaluation, {when}, has {_level(found[0])}."
        return "unclear", headline, details

    # Means alone: their intervals do not say how prompts moved together.
    q = found[-1].passes[1]
    headline = f"pass@1 went from {percent(p['mean'])} to {percent(q['mean'])}, {points(q['mean'] - p['mean'])} points."
    if found[0].reward or found[-1].reward:
        details.insert(0, f"Before: {_level(found[0])}. After: {_level(found[-1])}.")
    details.insert(0, "No interval of the change: the evaluations' rollouts are not recorded, or hold too few prompts.")
    return "unclear", headline, details


def _reward(run: RunFiles) -> str:
    """Of training, which says less than an evaluation: its prompts change from step to step."""
    rewards = [row["reward"] for row in run.rows if row.get("reward") is not None]
    if len(rewards) < 2:
        return ""
    few = min(5, len(rewards) // 2)
    first, last = (sum(part) / few for part in (rewards[:few], rewards[-few:]))
    steps = f"first {few} steps" if few > 1 else "first step"
    return f"Mean training reward: {first:.3f} in the {steps}, {last:.3f} in the last."


def _state(run: RunFiles) -> str:
    """How far it is."""
    steps = f"{run.steps} step{'' if run.steps == 1 else 's'}"
    if run.summary:
        seconds = run.summary.get("job_seconds")
        took = "" if seconds is None else f" in {seconds:.0f} s" if seconds < 600 else f" in {seconds / 3600:.1f} h"
        return f"ended after {steps}{took}"
    wanted = run.key("train", "steps", 0)
    of = f" of {wanted}" if wanted else ""
    if not run.rows:
        return f"no step{of} is done yet"
    return f"has not ended: {run.steps}{of} step{'' if (wanted or run.steps) == 1 else 's'} done"


def _mean(values: Sequence[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return sum(known) / len(known) if known else None
