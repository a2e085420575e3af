"""Before a run begins: whether its verifiers can judge, and accept, the reference answers of some of its rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megatron_brorl.config.schema import RewardConfig
from megatron_brorl.errors import UserError
from megatron_brorl.rewards.pool import RewardPool, ScoreRequest
from megatron_brorl.rewards.registry import entry
from megatron_brorl.rewards.scoring import verifier_name, worth
from megatron_brorl.types import Prompt, Verdict

_ROWS = 8  # of each verifier, and of each of its tasks, that are looked at

Judged = list[tuple[Prompt, Verdict]]


def check_references(pool: RewardPool, prompts: Sequence[Prompt], config: RewardConfig) -> tuple[str, list[str]]:
    """Have the verifiers judge reference answers as the answers that they would find in a response.

    Returns what was looked at in words, and warnings. Raises UserError where a verifier fails on a reference answer,
    and where one that must accept references accepts none of those that were looked at.
    """
    # Rows at even distances, so that a file sorted by difficulty or source is seen from end to end.
    groups: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        if prompt.answer is not None:
            groups.setdefault(verifier_name(prompt), []).append(prompt)
    chosen = {name: rows[:: -(-len(rows) // _ROWS)] for name, rows in groups.items()}

    # All are submitted before the first verdict is waited for.
    futures = {
        name: [(p, pool.submit(ScoreRequest(p, (p.answer or "").strip()))) for p in rows]
        for name, rows in chosen.items()
    }
    judged = {name: [(p, future.result()) for p, future in rows] for name, rows in futures.items()}
    for name, rows in judged.items():
        _check_status(name, rows)
    return _looked_at(judged), _refused(judged, config)


def _check_status(name: str, rows: Judged) -> None:
    for prompt, verdict in rows:
        if verdict.status != "ok":
            remedy = "raise reward.timeout_s" if verdict.status == "timeout" else "mend the verifier or the row"
            raise UserError(
                f"verifier {name!r} fails on the reference answer of row {prompt.id}: {verdict.status}: "
                f"{verdict.reason}; {remedy}"
            )


def _refused(judged: Mapping[str, Judged], config: RewardConfig) -> list[str]:
    """Warnings of reference answers that do not count as correct."""
    wrong = {name: [(p, v) for p, v in rows if not worth(v, False, config)[1]] for name, rows in judged.items()}
    accepting = {rows[0][0].verifier for name, rows in judged.items() if len(wrong[name]) < len(rows)}
    # A verifier with several tasks accepts references if it accepts those of any task.
    warnings = []
    for name, rows in wrong.items():
        if not rows:
            continue

        # The first row stands for all of them.
        prompt, verdict = rows[0]
        judged_by = entry(prompt.verifier, "verifier", config)
        said = (
            f"verifier {name!r} gives {verdict.reward:g} to the reference answer of row {prompt.id}, below "
            f"reward.correct_at = {config.correct_at:g} ({len(rows)} of {len(judged[name])} rows looked at)"
        )

        # This package's verifiers compare with the reference, so that no other response can do better.
        if judged_by.accepts_reference and prompt.verifier not in accepting:
            raise UserError(f"{said}: no response could be correct; mend the rows, or name another verifier")
        if judged_by.accepts_reference:
            warnings.append(f"{said}: perhaps no response to these rows is correct; check them")
        # A function of the user's own may ask for more than a reference has, such as a form.
        elif judged_by.foreign:
            warnings.append(f"{said}: check the verifier, unless a reference answer alone is no whole response")
    return warnings


def _looked_at(judged: Mapping[str, Judged]) -> str:
    found = []
    for name, rows in judged.items():
        rewards = sorted({verdict.reward for _, verdict in rows})
        ends = f"{rewards[0]:g}" if len(rewards) == 1 else f"{rewards[0]:g} to {rewards[-1]:g}"
        found.append(f"verifier {name!r} gives {ends} to the reference answers of {len(rows)} rows")
    return "\n".join(found) or "no row has a reference answer to try a verifier on"
