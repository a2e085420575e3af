"""Conclusions from a run: reasons why it learned nothing (`findings`), and a summary of its result (`verdict`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from megatron_brorl.algo.advice import METRICS, Cause, large_first_update, why_no_signal
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
    changed: Mapping[str, Any] | None = None,
    raised: str = "",
) -> dict[str, str]:
    """Return a sentence, by name, for each reason why the run learned little or why learning was not measured.

    rows: the lines of metrics.jsonl. before, after: the held-out evaluations, if there are any. weights_differ:
    whether the trained weights differ from those of model.path. changed: the result of content.compared, if the
    evaluations are recorded. raised: a verifier's or environment's first exception.
    """
    sentences: dict[str, str] = {}
    means = {name: _mean(rows, name) for name in METRICS}
    cause = why_no_signal(means)

    if not rows:
        sentences["no step"] = f"no step was trained: train.steps = {config.train.steps}; raise it"
    elif cause and raised and (_mean(rows, "verifier_errors") or 0.0) > 0.5 * (_mean(rows, "rollouts") or 0.0):
        sentences["raised"] = (
            f"most responses have no score of their own: {raised}; fix it, or return the lowest reward"
        )
    elif cause:
        sentences[cause] = _no_signal(cause, config, rows)
    elif not weights_differ:
        sentences["weights unchanged"] = _unchanged(config, rows)

    first = next((row for row in rows if row.get("updates")), {})
    if advice := large_first_update(first, config.optim.lr):
        sentences["large first update"] = advice

    if changed and (sentence := _got_worse(changed, rows)):
        sentences["got worse"] = sentence

    solved = any(e and e["pass_at_1"]["mean"] for e in (before, after))
    all_wrong = set() if config.reward.group_function else {row.get("all_wrong_share") for row in rows} - {None}
    if all_wrong == {1} and not (cause or solved) and any(row.get("reward_std") for row in rows):
        sentences["never correct"] = (
            f"no reward of the run reached reward.correct_at = {config.reward.correct_at:g} (mean "
            f"{_number(_mean(rows, 'reward') or 0.0)}), so pass@k is 0 and only mean rewards show progress: set "
            "reward.correct_at to the smallest reward of a correct response, if there is one"
        )

    if before is None:
        sentences["no held-out"] = (
            "there is no held-out evaluation, so it is unknown whether the model improved: set data.held_out"
        )
    elif after and after["pass_at_1"]["mean"] > 0:
        # If no response at all was right, another finding reports it.
        never_right = [{name for name, p in e["by_task"].items() if p["mean"] == 0} for e in (before, after)]
        tasks = sorted(set.intersection(*never_right))
        if tasks:
            sentences["task never right"] = (
                f"no held-out response to {', '.join(tasks)} was right, before or after: use easier prompts of that "
                "kind, or check their reference answers and their verifier"
            )
    return sentences


def _no_signal(cause: Cause, config: Config, rows: Sequence[Row]) -> str:
    count = f"{sum(row.get('rollouts') or 0 for row in rows):,.0f}"
    rollout = config.rollout
    extract = config.reward.extract
    limit = f"rollout.max_tokens = {rollout.max_tokens}"
    cut_share = _mean(rows, "cut_off_share") or 0.0
    reward = _mean(rows, "reward") or 0.0
    # Rewards above 0 that never reach reward.correct_at are a separate cause.
    shortfall = f" (mean reward {reward:.3g}, reward.correct_at = {config.reward.correct_at:g})" if reward else ""
    how_many = f"every one of {count} responses was" if cut_share == 1 else f"{cut_share:.0%} of {count} responses were"
    sentences: dict[Cause, str] = {
        "cut off": f"{how_many} cut off at {limit}: raise it, or "
        "use a prompt form after which the model ends its answers (data.chat, data.template)",
        "no answer": f'no response of {count} had an answer where reward.extract = "{extract}" looks for it, '
        f"{_PLACES[extract]}: ask for that form in data.template or data.system_prompt, or set reward.extract to the "
        "form that the model gives" + (f"; {cut_share:.0%} were cut off at {limit}" if cut_share else ""),
        "none right": f"no response of {count} was right{shortfall}: check that the verifier calls a reference answer "
        "right, then use easier prompts, a larger rollout.n or a warm start (brorl sft)"
        + (f"; {cut_share:.0%} were cut off at {limit}" if cut_share else ""),
        "all right": f"every one of {count} responses was right, so there is nothing to learn: use harder prompts",
        "no mixed group": f"no group had a signal, because the rewards in each group were equal: raise "
        f"rollout.n = {rollout.n}, or use prompts that the model sometimes gets right (brorl pass-rates)",
    }
    return sentences[cause]


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
    rows: Sequence[Row], summary: Row, wanted: int, evaluations: Sequence[Row], changed: Row | None
) -> dict[str, Any]:
    """Return headline, tone, details and findings (sentences), and the state of a run.

    wanted: train.steps, 0 if unknown. evaluations: the results of content.RecordedEvaluation.as_dict. changed: the
    result of content.compared.
    """
    tone, headline, details = _change(changed) if changed and changed["passes"] else _unpaired(evaluations)
    recorded = summary.get("findings", {})
    sentences = list(recorded.values())
    # A running run has no findings yet. Its metrics show whether there is a signal.
    cause = None if summary else why_no_signal({name: _mean(rows, name) for name in METRICS})
    if cause:
        sentences.append(f"nothing to learn from so far ({cause}; mean over {len(rows)} steps)")
    doubts = set(recorded) - {"large first update", "got worse", "never correct"}
    if (cause or doubts) and tone == "good":
        tone = "unclear"
    if cause or doubts - {"no held-out", "task never right"}:
        tone = "bad"
    state = _state(rows, summary, wanted)
    return {"headline": headline, "tone": tone, "details": details, "findings": sentences, "state": state}


def _metrics(changed: Mapping[str, Any]) -> list[tuple[str, Tone, str]]:
    """Return name, direction and a sentence of pass@1, mean reward (first if nothing was right), pass@k and tasks.

    Of T tasks, only those with p < 0.05 / T are included (Bonferroni), because one of many often changes by chance.
    """
    first, *others = changed["passes"]
    shares = {f"pass@{p['k']}": p for p in (first, *others[::-1])}
    tasks = changed["tasks"] if len(changed["tasks"]) > 1 else []
    shares |= {f"pass@1 ({t['task']})": t for t in tasks if t["difference"]["p"] < 0.05 / len(tasks)}
    metrics = [(name, *_compare_values(name, p, "{:.1%}".format, _points, " points")) for name, p in shares.items()]
    if reward := changed["reward"]:
        metrics.insert(1 if first["before"] or first["after"] else 0, ("mean reward", *reward_change(reward)))
    return metrics


def _change(changed: Mapping[str, Any]) -> tuple[Tone, str, list[str]]:
    """Compare two evaluations of the same prompts."""
    metrics = _metrics(changed)
    clear = {tone: sentence for _, tone, sentence in reversed(metrics) if tone != "unclear"}  # the first of each tone
    headline = [clear[t] for t in ("good", "bad") if t in clear] or [metrics[0][2]]
    tone: Tone = "unclear" if len(clear) != 1 else next(iter(clear))
    begin = {"good": "It learned", "bad": "It got worse", "unclear": "No change beyond chance"}[tone]
    begin = "Mixed result" if len(clear) > 1 else begin
    # Unclear changes of pass@k between the smallest and the largest k repeat those of the two.
    always = {"mean reward", *(f"pass@{changed['passes'][i]['k']}" for i in (0, -1))}
    details = [f"{s}." for name, t, s in metrics if s not in headline and (t != "unclear" or name in always)]
    n = changed["samples"]
    details.append(
        f"Newly solved: {len(changed['solved'])} of {changed['prompts']} prompts, newly lost: {len(changed['lost'])} "
        f"(a prompt is solved if {f'at least one of {n} samples is' if n > 1 else 'its one sample is'} right)."
    )
    return tone, f"{begin}: {'; '.join(headline)} over {changed['prompts']} held-out prompts.", details


def _got_worse(changed: Mapping[str, Any], rows: Sequence[Row]) -> str | None:
    """Return a sentence about the held-out metrics that fell beyond chance; None if none did."""
    fell = [(name, sentence) for name, tone, sentence in _metrics(changed) if tone == "bad"]
    if not fell:
        return None
    facts = [fell[0][1], *([f"so did {', '.join(name for name, _ in fell[1:])}"] if fell[1:] else [])]
    facts.append(f"{len(changed['lost'])} of {changed['prompts']} prompts are newly lost")
    if changed["distinct"]:
        facts.append("distinct answers per prompt {:.1f} -> {:.1f}".format(*changed["distinct"]))
    if entropy := [row["entropy"] for row in rows if row.get("entropy") is not None]:
        facts.append(f"entropy {entropy[0]:.3g} -> {entropy[-1]:.3g} nats")
    remedy = "use an earlier checkpoint (train.keep_best), lower optim.lr, or raise algo.kl_coef"
    return f"held-out {'; '.join(facts)}: {remedy}"


def reward_change(p: Mapping[str, Any]) -> tuple[Tone, str]:
    """Return the direction of a change of the mean reward and a sentence."""
    return _compare_values("mean reward", p, _number, lambda x: _number(x, "+"))


def _compare_values(
    name: str, p: Mapping[str, Any], level: Callable[[float], str], gap: Callable[[float], str], unit: str = ""
) -> tuple[Tone, str]:
    """Return the direction of a change ("unclear" if its interval contains 0) and a sentence."""
    difference = p["difference"]
    tone: Tone = "good" if difference["low"] > 0 else "bad" if difference["high"] < 0 else "unclear"
    word = {"good": "rose", "bad": "fell", "unclear": "went"}[tone]
    ends = f"from {level(p['before'])} to {level(p['after'])}"
    interval = f"95% interval {gap(difference['low'])} to {gap(difference['high'])}"
    return tone, f"{name} {word} {ends}, {gap(difference['mean'])}{unit} ({interval})"


def _points(share: float) -> str:
    value = round(100 * share, 1)
    return f"{value:+.1f}" if value else "0.0"


def _number(value: float, sign: str = "") -> str:
    """Return four significant digits, as `short` in page/dom.js does. sign: "+" shows the sign of positive values."""
    rounded = float(f"{value:.4g}") or 0.0  # not -0.0
    return f"{rounded:{sign if rounded else ''}g}"


def _unpaired(evaluations: Sequence[Mapping[str, Any]]) -> tuple[Tone, str, list[str]]:
    """Describe evaluations that cannot be compared prompt by prompt."""
    if not evaluations:
        return "unclear", "Learning was not measured: there is no held-out evaluation.", []
    first, last = evaluations[0], evaluations[-1]
    if len(evaluations) == 1:
        when = f"after {first['steps']} steps" if first["steps"] else "before the first step"
        return "unclear", f"Learning was not measured: the only evaluation, {when}, has {_level(first)}.", []
    # The interval of a difference needs the pairs of prompts.
    before, after = (e["passes"][0]["mean"] for e in (first, last))
    headline = f"pass@1 went from {before:.1%} to {after:.1%}, {_points(after - before)} points."
    if first["reward"] or last["reward"]:
        headline = f"Before: {_level(first)}. After: {_level(last)}."
    details = ["The change has no interval, because too few rollouts of the evaluations are recorded."]
    return "unclear", headline, details


def _level(e: Mapping[str, Any]) -> str:
    """Return pass@1 of an evaluation, with the mean reward if it differs."""
    text = f"pass@1 {e['passes'][0]['mean']:.1%}"
    r = e["reward"]
    if not r:
        return text
    ends = f" (95% interval {_number(r['low'])} to {_number(r['high'])})" if "low" in r else ""
    return f"{text} and mean reward {_number(r['mean'])}{ends}"


def _state(rows: Sequence[Row], summary: Row, wanted: int) -> str:
    if summary:
        seconds = summary.get("job_seconds")
        duration = "" if seconds is None else f" in {seconds:.0f} s" if seconds < 600 else f" in {seconds / 3600:.1f} h"
        steps = summary["steps"]
        return f"ended after {steps} step{'' if steps == 1 else 's'}{duration}"
    steps_done = rows[-1]["step"] + 1 if rows else 0
    return f"has not ended: {steps_done}{f' of {wanted}' if wanted else ''} steps done"


def _mean(rows: Sequence[Row], name: str) -> float | None:
    values = [row[name] for row in rows if row.get(name) is not None]
    return sum(values) / len(values) if values else None
