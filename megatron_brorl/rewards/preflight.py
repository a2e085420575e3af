"""Checks of a run's verifiers before the run starts: they can be loaded, and they accept reference answers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from megatron_brorl.config.schema import RewardConfig
from megatron_brorl.errors import UserError
from megatron_brorl.rewards import custom, registry
from megatron_brorl.rewards.sandbox import isolation, probe
from megatron_brorl.rewards.scoring import final_reward, verifier_name
from megatron_brorl.rewards.worker_pool import RewardPool, ScoreRequest
from megatron_brorl.rewards.worker_process import call_in_worker
from megatron_brorl.types import Prompt, ScoreResult

_ROWS_PER_TASK = 8  # rows to check for each verifier and each of its tasks

Scored = list[tuple[Prompt, ScoreResult]]


@dataclass(frozen=True)
class CheckedVerifiers:
    """The result of `check_verifiers`."""

    sha256: Mapping[str, str] = field(default_factory=dict)  # of the file of each custom verifier
    impure: frozenset[str] = frozenset()  # verifiers that may score equal answers differently
    unsandboxed: bool = False  # whether programs that the model wrote run without isolation


def check_verifiers(names: Iterable[str], config: RewardConfig) -> CheckedVerifiers:
    """Check that the verifiers of a run's rows can be used here. Raises UserError if not."""
    entries = {name: registry.entry(name, "verifier", config) for name in sorted(names)}

    # Verifiers that run programs written by the model need a sandbox.
    isolation.set_environment(config.unsandboxed, config.timeout_s)
    executing = [name for name, entry in entries.items() if entry.executes]
    if executing and not config.unsandboxed:
        reason = call_in_worker("megatron_brorl.rewards.sandbox.probe:problem")
        if reason:
            raise probe.refuse(f"verifier {executing[0]!r}", reason)

    found = {name: custom.validate(name) for name, entry in entries.items() if entry.is_custom}
    return CheckedVerifiers(
        sha256={name: sha256 for name, (sha256, _) in found.items()},
        impure=frozenset(name for name, (_, pure) in found.items() if not pure),
        unsandboxed=bool(executing) and config.unsandboxed,
    )


def check_references(pool: RewardPool, prompts: Sequence[Prompt], config: RewardConfig) -> tuple[str, list[str]]:
    """Score reference answers as if they were the answers of responses, and without them a user's function on any text.

    Returns the rewards in words, and warnings. Raises UserError if a verifier fails on a reference answer, if a
    verifier that must accept references accepts none of them, or if a user's function fails on every row without one.
    """
    groups: dict[str, list[Prompt]] = {}
    without: dict[str, list[Prompt]] = {}  # rows without a reference answer of users' functions
    for prompt in prompts:
        if prompt.answer is not None:
            groups.setdefault(verifier_name(prompt), []).append(prompt)
        elif registry.entry(prompt.verifier, "verifier", config).is_custom:
            without.setdefault(verifier_name(prompt), []).append(prompt)
    if not groups and not without:
        return "no row has a reference answer to try a verifier on", []

    scored: dict[str, Scored] = {}
    lines = [_try_texts(pool, name, _some(group)) for name, group in without.items()]
    for name, group in groups.items():
        rows = _some(group)
        scores = pool.score([ScoreRequest(prompt, (prompt.answer or "").strip()) for prompt in rows])
        scored[name] = list(zip(rows, scores, strict=True))
        _check_status(name, scored[name])
        rewards = [score.reward for score in scores]
        low, high = min(rewards), max(rewards)
        span = f"{low:g}" if low == high else f"{low:g} to {high:g}"
        lines.append(f"verifier {name!r} gives {span} to the reference answers of {len(rows)} rows")
    return "\n".join(lines), _warnings(scored, config)


def _some(rows: Sequence[Prompt]) -> Sequence[Prompt]:
    """Return rows at even distances, which cover a file that is sorted by difficulty or source."""
    return rows[:: -(-len(rows) // _ROWS_PER_TASK)]


def _try_texts(pool: RewardPool, name: str, rows: Sequence[Prompt]) -> str:
    """Score each prompt's own text and a number as responses. Raises UserError if the function fails on all of them."""
    scores = pool.score([ScoreRequest(prompt, text) for prompt in rows for text in (prompt.text, "0")])
    first = scores[0]
    if all(score.status != "ok" for score in scores):
        remedy = "raise reward.timeout_s" if first.status == "timeout" else "fix the function or the rows"
        raise UserError(
            f"verifier {name!r} fails on each of {len(rows)} rows with the prompt's text and with 0 as response; row "
            f"{rows[0].id}: {first.status}: {first.reason}; {remedy}; a function must score any text"
        )
    return f"verifier {name!r} scores texts for {len(rows)} rows without a reference answer"


def _check_status(name: str, rows: Scored) -> None:
    for prompt, score in rows:
        if score.status != "ok":
            remedy = "raise reward.timeout_s" if score.status == "timeout" else "fix the verifier or the row"
            raise UserError(
                f"verifier {name!r} fails on the reference answer of row {prompt.id}: {score.status}: "
                f"{score.reason}; {remedy}"
            )


def _warnings(scored: Mapping[str, Scored], config: RewardConfig) -> list[str]:
    """Return warnings about reference answers that do not count as correct."""
    wrong = {name: [(p, v) for p, v in rows if not final_reward(v, False, config)[1]] for name, rows in scored.items()}
    # A verifier with several tasks must accept a reference of at least one task.
    accepting = {rows[0][0].verifier for name, rows in scored.items() if len(wrong[name]) < len(rows)}
    warnings = []
    for name, rows in ((name, rows) for name, rows in wrong.items() if rows):
        prompt, score = rows[0]
        verifier = registry.entry(prompt.verifier, "verifier", config)
        what = (
            f"verifier {name!r} gives {score.reward:g} to the reference answer of row {prompt.id}, below "
            f"reward.correct_at = {config.correct_at:g} ({len(rows)} of {len(scored[name])} rows checked)"
        )
        # This package's verifiers compare with the reference, so no other response can score higher.
        if verifier.accepts_reference and prompt.verifier not in accepting:
            raise UserError(f"{what}: no response could be correct; fix the rows, or name another verifier")
        if verifier.accepts_reference:
            warnings.append(f"{what}: perhaps no response to these rows is correct; check them")
        # A custom function may demand more than a reference contains, such as tags.
        elif verifier.is_custom:
            warnings.append(f"{what}: check the verifier, or ignore this if references are not complete responses")
    return warnings
