"""Conclusions from a run: reasons why it learned nothing (`findings`), and a summary of its result (`verdict`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from megatron_brorl.algo.first_update import large_first_update
from megatron_brorl.algo.group_signal import METRICS, Cause, why_no_signal
from megatron_brorl.config.schema import Config

Row = Mapping[str, Any]
Tone = Literal["good", "bad", "unclear"]

_PLACES = {
    "verifier": "where the rows' verifiers look for it",
    "full": "in the whole response",
    "answer_tag": "inside the last <answer>...</answer>",
    "boxed": r"inside the only \boxed{...}",
}


def findings(
    config: Config,
    rows: Sequence[Row],
    before: Mapping[str, Any] | None,
    after: Mapping[str, Any] | None,
    weights_differ: bool,
    raised: str = "",
) -> dict[str, str]:
    """Return a sentence, by name, for each reason why the run learned little or why learning was not measured.

    rows: the lines of metrics.jsonl. before, after: the held-out evaluations, if there are any. weights_differ:
    whether the trained weights differ from those of model.path. raised: a verifier's or environment's first exception.
    """
    found: dict[str, str] = {}
    means = {name: _mean(rows, name) for name in METRICS}
    why = why_no_signal(means)

    if not rows:
        found["no step"] = f"no step was trained: train.steps = {config.train.steps}; raise it"
    elif why and raised and (_mean(rows, "verifier_errors") or 0.0) > 0.5 * (_mean(rows, "rollouts") or 0.0):
        found["raised"] = f"most responses have no score of their own: {raised}; fix it, or return the lowest reward"
    elif why:
        found[why] = _no_signal(why, config, rows)
    elif not weights_differ:
        found["weights unchanged"] = _unchanged(config, rows)

    first = next((row for row in rows if row.get("updates")), {})
    if advice := large_first_update(first, config.optim.lr):
        found["large first update"] = advice

    if before is None:
        found["no held-out"] = (
            "there is no held-out evaluation, so it is unknown whether the model improved: set data.held_out"
        )
    elif after and after["pass_at_1"]["mean"] > 0:
        # If no response at all was right, another finding reports it.
        never = [{name for name, p in e["by_task"].items() if p["mean"] == 0} for e in (before, after)]
        tasks = sorted(set.intersection(*never))
        if tasks:
            found["task never right"] = (
                f"no held-out response to {', '.join(tasks)} was right, before or after: use easier prompts of that "
                "kind, or check their reference answers and their verifier"
            )
    return found


def _no_signal(why: Cause, config: Config, rows: Sequence[Row]) -> str:
    count = f"{sum(row.get('rollouts') or 0 for row in rows):,.0f}"
    rollout = config.rollout
    extract = config.reward.extract
    turn = config.environment.max_turn_tokens
    limit = f"rollout.max_tokens = {rollout.max_tokens}" + (f" or environment.max_turn_tokens = {turn}" if turn else "")
    cut = _mean(rows, "cut_off_share") or 0.0
    reward = _mean(rows, "reward") or 0.0
    # Rewards above 0 that never reach reward.correct_at are a separate cause.
    short = f" (mean reward {reward:.3g}, reward.correct_at = {config.reward.correct_at:g})" if reward else ""
    how_many = f"every one of {count} responses was" if cut == 1 else f"{cut:.0%} of {count} responses were"
    sentences: dict[Cause, str] = {
        "cut off": f"{how_many} cut off at {limit}: raise it, or "
        "use a prompt form after which the model ends its answers (data.chat, data.template)",
        "no answer": f'no response of {count} had an answer where reward.extract = "{extract}" looks for it, '
        f"{_PLACES[extract]}: ask for that form in data.template or data.system_prompt, or set reward.extract to the "
        "form that the model gives" + (f"; {cut:.0%} were cut off at {limit}" if cut else ""),
        "none right": f"no response of {count} was right{short}: check that the verifier calls a reference answer "
        "right, then use easier prompts, a larger rollout.n or a warm start (brorl sft)"
        + (f"; {cut:.0%} were cut off at {limit}" if cut else ""),
        "all right": f"every one of {count} responses was right, so there is nothing to learn: use harder prompts",
        "no mixed group": f"no group had a signal, because the rewards in each group were equal: raise "
        f"rollout.n = {rollout.n}, or use prompts that the model sometimes gets right (brorl pass-rates)",
    }
    return sentences[why]


def _unchanged(config: Config, rows: Sequence[Row]) -> str:
    updates, skipped = (sum(row.get(name) or 0 for row in rows) for name in ("updates", "updates_skipped"))
    if not updates and skipped:
        reason = "every update was skipped because its gradient was not finite: lower optim.lr, or train in fp32"
    elif not updates:
        reason = "no update was made; critic.warmup_steps is the number of steps in which the actor waits"
    elif not config.optim.lr:
        reason = "optim.lr = 0: raise it"
    else:
        reason = (
            f"{updates:.0f} updates at optim.lr = {config.optim.lr:g} are too small for weights in "
            f"{config.model.dtype}: raise optim.lr, or shorten optim.warmup_steps"
        )
    return f"the trained weights are those of model.path: {reason}"


def verdict(
    rows: Sequence[Row],
    summary: Row,
    wanted: int,
    evaluations: Sequence[Mapping[str, Any]],
    changed: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Return headline, tone, details and findings (sentences), and the state of a run.

    wanted: train.steps, 0 if it is unknown. evaluations: content.RecordedEvaluation.as_dict of each. changed: the
    result of content.compared.
    """
    tone, headline, details = _change(changed) if changed and changed["passes"] else _unpaired(evaluations)
    named = summary.get("findings", {})
    found = list(named.values())
    # A running run has no findings yet. Its metrics show whether there is a signal.
    why = None if summary else why_no_signal({name: _mean(rows, name) for name in METRICS})
    if why:
        found.append(f"nothing to learn from so far ({why}; mean over {len(rows)} steps)")
    doubts = set(named) - {"large first update"}
    if (why or doubts) and tone == "good":
        tone = "unclear"
    if why or doubts - {"no held-out", "task never right"}:
        tone = "bad"
    state = _state(rows, summary, wanted)
    return {"headline": headline, "tone": tone, "details": details, "findings": found, "state": state}


def _change(changed: Mapping[str, Any]) -> tuple[Tone, str, list[str]]:
    """Compare two evaluations of the same prompts."""
    first, *others = changed["passes"]
    tone, sentence = _compare_values(f"pass@{first['k']}", first, "{:.1%}", _points, " points")
    sentences = [sentence]
    if changed["reward"]:
        tone_of_reward, sentence = _compare_values("mean reward", changed["reward"], "{:.3g}", "{:+.3g}".format)
        sentences.append(sentence)
        if tone == "unclear" and tone_of_reward != "unclear":  # The headline reports the reward.
            tone = tone_of_reward
            sentences.reverse()
    begin = {"good": "It learned", "bad": "It got worse", "unclear": "No change beyond chance"}[tone]
    headline = f"{begin}: {sentences[0]} over {changed['prompts']} held-out prompts."
    details = [f"{sentence}." for sentence in sentences[1:]]

    # A policy with less entropy can lose prompts that it solved before in many tries.
    if others:
        wide = others[-1]
        tone_of_wide, sentence = _compare_values(f"pass@{wide['k']}", wide, "{:.1%}", _points, " points")
        details.append(f"{sentence}.")
        if tone == "good" and tone_of_wide == "bad":
            details.append(f"Its answers are less diverse, and it solves fewer prompts in {wide['k']} tries.")
    n = changed["samples"]
    details.append(
        f"Newly solved: {len(changed['solved'])} of {changed['prompts']} prompts, newly lost: {len(changed['lost'])} "
        f"(right or never {f'in {n} samples' if n > 1 else 'in its one sample'})."
    )
    return tone, headline, details


def _compare_values(
    name: str, p: Mapping[str, Any], level: str, gap: Callable[[float], str], unit: str = ""
) -> tuple[Tone, str]:
    """Return the direction of a change ("unclear" if its interval contains 0) and a sentence."""
    d = p["difference"]
    tone: Tone = "good" if d["low"] > 0 else "bad" if d["high"] < 0 else "unclear"
    word = {"good": "rose", "bad": "fell", "unclear": "went"}[tone]
    ends = f"from {level.format(p['before'])} to {level.format(p['after'])}"
    interval = f"95% interval {gap(d['low'])} to {gap(d['high'])}"
    return tone, f"{name} {word} {ends}, {gap(d['mean'])}{unit} ({interval})"


def _points(share: float) -> str:
    value = round(100 * share, 1)
    return f"{value:+.1f}" if value else "0.0"


def _unpaired(evaluations: Sequence[Mapping[str, Any]]) -> tuple[Tone, str, list[str]]:
    """Describe evaluations that cannot be compared prompt by prompt."""
    if not evaluations:
        return "unclear", "Learning was not measured: there is no held-out evaluation.", []
    first, last = evaluations[0], evaluations[-1]
    if len(evaluations) == 1:
        when = f"after {first['steps']} steps" if first["steps"] else "before the first step"
        return "unclear", f"Learning was not measured: the only evaluation, {when}, has {_level(first)}.", []
    # The interval of a difference needs the pairs of prompts.
    p, q = (e["passes"][0]["mean"] for e in (first, last))
    headline = f"pass@1 went from {p:.1%} to {q:.1%}, {_points(q - p)} points."
    details = ["The change has no interval, because too few rollouts of the evaluations are recorded."]
    if first["reward"] or last["reward"]:
        details.append(f"Before: {_level(first)}. After: {_level(last)}.")
    return "unclear", headline, details


def _level(e: Mapping[str, Any]) -> str:
    """Return pass@1 of an evaluation, with the mean reward if it differs."""
    text = f"pass@1 {e['passes'][0]['mean']:.1%}"
    r = e["reward"]
    if not r:
        return text
    ends = f" (95% interval {r['low']:.3g} to {r['high']:.3g})" if "low" in r else ""
    return f"{text} and mean reward {r['mean']:.3g}{ends}"


def _state(rows: Sequence[Row], summary: Row, wanted: int) -> str:
    if summary:
        seconds = summary.get("job_seconds")
        took = "" if seconds is None else f" in {seconds:.0f} s" if seconds < 600 else f" in {seconds / 3600:.1f} h"
        steps = summary["steps"]
        return f"ended after {steps} step{'' if steps == 1 else 's'}{took}"
    done = rows[-1]["step"] + 1 if rows else 0
    return f"has not ended: {done}{f' of {wanted}' if wanted else ''} steps done"


def _mean(rows: Sequence[Row], name: str) -> float | None:
    values = [row[name] for row in rows if row.get(name) is not None]
    return sum(values) / len(values) if values else None
