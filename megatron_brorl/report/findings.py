"""What is wrong with a run that learned nothing, each with what to do: for summary.json, the console and the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_brorl.algo.no_signal import FIGURES, Why, why_no_signal
from megatron_brorl.config.schema import Config

Row = Mapping[str, Any]

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
) -> dict[str, str]:
    """A sentence for each thing that kept the run from learning, or from showing it, by its name; {} where none did.

    rows: the lines of metrics.jsonl. before, after: the held-out evaluations, where there are any. weights_differ:
    whether the trained weights are others than those of model.path.
    """
    found: dict[str, str] = {}
    means = {name: _mean(rows, name) for name in FIGURES}
    why = why_no_signal(means)

    # Why no step had anything to learn from; else why what it had changed nothing.
    if not rows:
        found["no step"] = f"no step was trained: train.steps = {config.train.steps}; raise it"
    elif why:
        found[why] = _no_signal(why, config, rows)
    elif not weights_differ:
        found["weights unchanged"] = _unchanged(config, rows)

    # What cannot be told, and what a mean over tasks hides.
    if before is None:
        found["no held-out"] = (
            "there is no held-out evaluation, so that nothing says whether the model got better: give data.held_out"
        )
    elif after and after["pass_at_1"]["mean"] > 0:
        # Where nothing at all was right, that is said above.
        tasks = [name for name, share in after["by_task"].items() if share == 0 == before["by_task"].get(name)]
        if tasks:
            found["task never right"] = (
                f"no held-out response to {', '.join(tasks)} was right, before or after: take easier prompts of that "
                "kind, or check their reference answers and their verifier"
            )
    return found


def _no_signal(why: Why, config: Config, rows: Sequence[Row]) -> str:
    count = f"{sum(row.get('rollouts') or 0 for row in rows):,.0f}"
    c, extract = config.rollout, config.reward.extract
    cut, reward = _mean(rows, "cut_off_share") or 0.0, _mean(rows, "reward") or 0.0
    # Only rewards other than 0 can be short of the mark.
    short = f" (mean reward {reward:.3g}, reward.correct_at = {config.reward.correct_at:g})" if reward else ""
    how_many = f"every one of {count} responses was" if cut == 1 else f"{cut:.0%} of {count} responses were"
    sentences: dict[Why, str] = {
        "cut off": f"{how_many} cut off at rollout.max_tokens = {c.max_tokens}: raise it, or "
        "put prompts in the form after which the model ends its answers (data.chat, data.template)",
        "no answer": f'no response of {count} had an answer where reward.extract = "{extract}" looks for it, '
        f"{_PLACES[extract]}: ask for that form in data.template or data.system_prompt, or set reward.extract to the "
        "form that the model gives" + (f"; {cut:.0%} were cut off at rollout.max_tokens" if cut else ""),
        "none right": f"no response of {count} was right{short}: check that the verifier calls a reference answer "
        "right, then take easier prompts, a larger rollout.n or a warm start (brorl sft)"
        + (f"; {cut:.0%} were cut off at rollout.max_tokens = {c.max_tokens}" if cut else ""),
        "all right": f"every one of {count} responses was right, so that nothing is left to learn: take harder prompts",
        "no mixed group": f"no group had a signal: the rewards in each were equal: raise rollout.n = {c.n}, or take "
        "prompts that the model gets right sometimes (tools/select_prompts.py)",
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


def _mean(rows: Sequence[Row], name: str) -> float | None:
    values = [row[name] for row in rows if row.get(name) is not None]
    return sum(values) / len(values) if values else None
