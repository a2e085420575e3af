"""Checks of a run's verifiers before the run starts: they can be loaded, and they accept reference answers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from megatron_brorl.config.schema import RewardConfig
from megatron_brorl.errors import UserError
from megatron_brorl.rewards import custom, registry
from megatron_brorl.rewards.sandbox import isolation, probe
from megatron_brorl.rewards.scoring import verifier_name, worth
from megatron_brorl.rewards.worker_pool import RewardPool, ScoreRequest
from megatron_brorl.rewards.worker_process import call_in_worker
from megatron_brorl.types import Prompt, Verdict

_ROWS = 8  # rows to look at, for each verifier and each of its tasks

Judged = list[tuple[Prompt, Verdict]]


@dataclass(frozen=True)
class CheckedVerifiers:
    """What `check_verifiers` found."""

    sha256: Mapping[str, str] = field(default_factory=dict)  # of the file of each custom verifier
    impure: frozenset[str] = frozenset()  # verifiers that may score equal answers differently
    unsandboxed: bool = False  # programs of the model run without isolation


def check_verifiers(names: Iterable[str], config: RewardConfig) -> CheckedVerifiers:
    """Check that the verifiers of a run's rows can be used here. Raises UserError if not."""
    entries = {name: registry.entry(name, "verifier", config) for name in sorted(names)}

    # Verifiers that run programs of the model need a sandbox.
    isolation.tell_workers(config.unsandboxed, config.timeout_s)
    executing = [name for name, entry in entries.items() if entry.executes]
    if executing and not config.unsandboxed:
        reason = call_in_worker("megatron_brorl.rewards.sandbox.probe:problem")
        if reason:
            raise probe.refuse(f"verifier {executing[0]!r}", reason)

    sources = {name: custom.look_at(name) for name, entry in entries.items() if entry.foreign}
    impure = frozenset(name for name, source in sources.items() if not source.pure)
    hashes = {name: source.sha256 for name, source in sources.items()}
    return CheckedVerifiers(hashes, impure, bool(executing) and config.unsandboxed)


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
        judged_by = registry.entry(prompt.verifier, "verifier", config)
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
