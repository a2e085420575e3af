"""Verifiers made of others: [[reward.combination]] in the configuration.

sum      the parts' rewards times their weights, which add up to 1
product  the parts' rewards multiplied
gate     the last part's reward where every other part gives at least 1, else 0

The answer of a combination is what its parts found in the response, as a JSON list, so that equal findings are judged
once and count as one answer.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence

from megatron_brorl.config.schema import CombinationConfig
from megatron_brorl.errors import UserError
from megatron_brorl.rewards.extract import extract
from megatron_brorl.rewards.returned import MOST_PARTS, score_of
from megatron_brorl.rewards.verifier import Entry, Score, Verifier, VerifierRow

_ROUNDING = 1e-9  # by which weights such as 0.1 + 0.2 + 0.7 may miss 1


def check(combination: CombinationConfig, where: str) -> None:
    """Raise UserError naming the first key of a combination (at `where`) that cannot be."""
    parts, names = combination.parts, [part.verifier for part in combination.parts]

    # Its name and its parts' names.
    if not combination.name.isidentifier():
        raise UserError(f"{where}.name = {combination.name!r}: must be a word of letters, digits and _")
    if not 2 <= len(parts) <= MOST_PARTS:
        raise UserError(f"{where}.parts: there are {len(parts)}; a combination has 2 to {MOST_PARTS}")
    again = [name for name in names if names.count(name) > 1]
    if again:
        raise UserError(f"{where}.parts: verifier {again[0]!r} stands there twice; give it once, with one weight")

    # Weights, where they have a meaning.
    for i, part in enumerate(parts):
        if combination.how == "sum" and not part.weight >= 0:
            raise UserError(f"{where}.parts[{i}].weight = {part.weight}: must not be negative")
        if combination.how != "sum" and part.weight != 1:
            raise UserError(f'{where}.parts[{i}].weight = {part.weight}: only how = "sum" has weights; leave it out')
    total = math.fsum(part.weight for part in parts)
    if combination.how == "sum" and abs(total - 1) > _ROUNDING:
        raise UserError(f"{where}.parts: the weights add up to {total:g}; make it 1, so that the best reward is 1")


def combine(combination: CombinationConfig, entries: Sequence[Entry], max_chars: int) -> Entry:
    """The entry of a checked combination, whose parts have these entries; max_chars: of what one part finds."""
    names = [part.verifier for part in combination.parts]
    limits = [min(max_chars, entry.max_chars) for entry in entries]

    # The answer of the whole is the list of what each part has found.
    def find(text: str) -> str | None:
        found = [extract(text, entry.find, most).answer for entry, most in zip(entries, limits, strict=True)]
        return None if found == [None] * len(found) else json.dumps(found)

    def check_row(row: VerifierRow, where: str) -> None:
        for entry in entries:
            entry.check_row(row, where)

    def load() -> Verifier:
        return _judging(combination, [(name, entry.load()) for name, entry in zip(names, entries, strict=True)])

    # It may do what all of its parts may, and needs what any of them needs.
    return Entry(
        about=f"{combination.how} of {', '.join(names)}",
        load=load,
        find=find,
        check_row=check_row,
        max_chars=12 * sum(limits) + 100,  # a character takes up to twelve in JSON
        pure=all(entry.pure for entry in entries),
        executes=any(entry.executes for entry in entries),
        # With a foreign part a sum or a product may be negative.
        foreign=any(entry.foreign for entry in entries),
    )


def _judging(combination: CombinationConfig, parts: Sequence[tuple[str, Verifier]]) -> Verifier:
    weights = [part.weight for part in combination.parts]
    reward_of: Callable[[list[float]], float] = {
        "sum": lambda rewards: math.fsum(w * r for w, r in zip(weights, rewards, strict=True)),
        "product": math.prod,
        # A part may be a sum itself, such as 0.1 + 0.2 + 0.7.
        "gate": lambda rewards: rewards[-1] if all(r >= 1 - _ROUNDING for r in rewards[:-1]) else 0.0,
    }[combination.how]

    def judge(answer: str, row: VerifierRow) -> Score:
        # Each part judges what it found; a part's own parts stay with it.
        scores = []
        for (_, verify), found in zip(parts, _findings(answer, len(parts)), strict=True):
            scores.append(Score(0.0, "no answer") if found is None else score_of(verify(found, row)))

        named = [(name, score) for (name, _), score in zip(parts, scores, strict=True)]
        reasons = "; ".join(f"{name}: {score.reason}" for name, score in named if score.reason)
        return Score(reward_of([s.reward for s in scores]), reasons, {name: score.reward for name, score in named})

    return judge


def _findings(answer: str, count: int) -> list[str | None]:
    """What each part found; of a text that is no list of findings, such as a reference answer, the text for each."""
    try:
        found = json.loads(answer)
    except (ValueError, RecursionError):
        found = None
    if isinstance(found, list) and len(found) == count and all(f is None or isinstance(f, str) for f in found):
        return found
    return [answer] * count
