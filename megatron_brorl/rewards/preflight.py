"""Checks of a run's verifiers before the run starts: they can be loaded, and they accept reference answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from megatron_brorl.config.schema import RewardConfig
from megatron_brorl.errors import UserError
from megatron_brorl.rewards import custom, registry
from megatron_brorl.rewards.sandbox import isolation
from megatron_brorl.rewards.sandbox.run import refuse
from megatron_brorl.rewards.scoring import final_reward, verifier_name
from megatron_brorl.rewards.worker_pool import RewardPool, ScoreRequest
from megatron_brorl.rewards.worker_process import call_in_worker
from megatron_brorl.types import Prompt, ScoreResult

_ROWS_PER_TASK = 8  # rows to check for each verifier and each of its tasks

Scored = list[tuple[Prompt, ScoreResult]]
Score = Callable[[Sequence[ScoreRequest]], list[ScoreResult]]


@dataclass(frozen=True)
class CheckedVerifiers:
    """The result of `check_verifiers`."""

    sha256: Mapping[str, str] = field(default_factory=dict)  # of the file of each custom verifier
    impure: frozenset[str] = frozenset()  # verifiers that may score equal answers differently
    unsandboxed: bool = False  # whether programs that the model wrote run without isolation


def check_verifiers(names: Iterable[str], config: RewardConfig) -> CheckedVerifiers:
    """Check that the verifiers of a run's rows can be used here. Raises UserError if not."""
    entries = {name: registry.entry(name, "verifier", config) for name in sorted(names)}

    isolation.set_environment(config.unsandboxed, config.timeout_s)
    executing = [name for name, entry in entries.items() if entry.executes]
    if executing and not config.unsandboxed:
        reason = call_in_worker("megatron_brorl.rewards.sandbox.run:problem")
        if reason:
            raise refuse(f"verifier {executing[0]!r}", reason)

    checks = {name: custom.validate(name) for name, entry in entries.items() if entry.is_custom}
    return CheckedVerifiers(
        sha256={name: sha256 for name, (sha256, _) in checks.items()},
        impure=frozenset(name for name, (_, pure) in checks.items() if not pure),
        unsandboxed=bool(executing) and config.unsandboxed,
    )


def check_references(pool: RewardPool, prompts: Sequence[Prompt], config: RewardConfig) -> tuple[str, list[str]]:
    """Score reference answers as if they were the answers of responses, and with a user's function also other texts.

    Returns the rewards in words, and warnings. Raises UserError if a user's function fails on all texts, or if another
    verifier fails on a reference, or accepts none although it must.
    """
    groups: dict[tuple[str, bool], list[Prompt]] = {}  # by verifier_name and whether the rows lack a reference
    for prompt in prompts:
        if prompt.answer is not None or registry.entry(prompt.verifier, "verifier", config).is_custom:
            groups.setdefault((verifier_name(prompt), prompt.answer is None), []).append(prompt)
    if not groups:
        return "no row has a reference answer to try a verifier on", []

    scored: dict[str, Scored] = {}
    lines, warnings = [], []
    for (name, _), group in groups.items():
        rows = group[:: math.ceil(len(group) / _ROWS_PER_TASK)]  # at even distances, because a file may be sorted
        is_custom = registry.entry(rows[0].verifier, "verifier", config).is_custom
        references, new_warnings = try_texts(pool.score, f"verifier {name!r}", rows, is_custom)
        warnings += new_warnings
        if not references:
            lines.append(f"verifier {name!r} scores texts for {len(rows)} rows")
            continue
        scored[name] = references
        rewards = [score.reward for _, score in references]
        low, high = min(rewards), max(rewards)
        span = f"{low:g}" if low == high else f"{low:g} to {high:g}"
        lines.append(f"verifier {name!r} gives {span} to the reference answers of {len(references)} rows")
    return "\n".join(lines), warnings + _warnings(scored, config)


def try_texts(score: Score, what: str, rows: Sequence[Prompt], is_custom: bool = True) -> tuple[Scored, list[str]]:
    """Score each row's reference answer, and with a user's function the prompt, an empty text and 0 as responses.

    Returns the scores of references, and one warning if the function fails on some texts. Raises UserError if it fails
    on all of them, or if another verifier fails on a reference.
    """
    kinds = ("the reference answer", "the prompt's text", "an empty text", "the text 0")[: 4 if is_custom else 1]
    tried = [
        (prompt, kind, text.strip())
        for prompt in rows
        for kind, text in zip(kinds, (prompt.answer, prompt.text, "", "0"), strict=False)
        if text is not None
    ]
    scores = score([ScoreRequest(prompt, text) for prompt, _, text in tried])
    results = [(prompt, kind, result) for (prompt, kind, _), result in zip(tried, scores, strict=True)]
    failed = [(prompt, kind, result) for prompt, kind, result in results if result.status != "ok"]
    references = [(prompt, result) for prompt, kind, result in results if kind == kinds[0] and result.status == "ok"]
    if not failed:
        return references, []
    prompt, kind, first = failed[0]
    where = f"{kind} of row {prompt.id}: {first.status}: {first.reason}"
    if not is_custom or len(failed) == len(results):
        remedy = "raise its time limit" if first.status == "timeout" else "fix it or the row"
        raise UserError(f"{what} fails on {where}; {remedy}")
    names = ", ".join(dict.fromkeys(kind for _, kind, _ in failed))
    return references, [f"{what} fails on {names}, for example on {where}: such a response scores 0"]


def _warnings(scored: Mapping[str, Scored], config: RewardConfig) -> list[str]:
    """Return warnings about reference answers that do not count as correct."""
    wrong = {
        name: [(prompt, score) for prompt, score in rows if not final_reward(score, cut_off=False, config=config)[1]]
        for name, rows in scored.items()
    }
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
