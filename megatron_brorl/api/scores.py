"""Rewards of given responses, by the verifiers of training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_brorl.api.engine import Sample
from megatron_brorl.config.schema import RewardConfig
from megatron_brorl.data.chat import spoken
from megatron_brorl.data.prompts import RowFormat, check_row
from megatron_brorl.errors import UserError
from megatron_brorl.rewards import custom
from megatron_brorl.rewards.custom import RewardFunction
from megatron_brorl.rewards.extract import Found, extract
from megatron_brorl.rewards.preflight import check_verifiers
from megatron_brorl.rewards.registry import entry
from megatron_brorl.rewards.scoring import final_reward, scores_cut_off
from megatron_brorl.rewards.worker_pool import RewardPool, ScoreRequest
from megatron_brorl.types import Prompt, ScoreResult

_NO_PROMPT = "-"  # of a reference alone
_UNSEEN = Found(None, "cut off")


@dataclass(frozen=True)
class Reward:
    """What a verifier says of a response."""

    reward: float  # as a run would train on it
    right: bool  # whether it counts as correct (reward.correct_at)
    reason: str  # in a few words, where the verifier gives one
    status: str  # "ok", or why there is no score: timeout, error, broken, invalid, crash, no_answer, length
    answer: str | None  # what of the response was judged
    parts: Mapping[str, float]  # what the reward is made of, by name


def score(
    responses: Sequence[str | Sample | Sequence[str | Sample]],
    rows: Sequence[str | Mapping[str, Any] | None],
    verifier: str | RewardFunction = "math",
    *,
    config: RewardConfig | None = None,
) -> list[Any]:
    """A Reward for each response, in the form of `responses`: a list, or what Engine.sample gave, a list for each row.

    rows: one per entry of responses: a reference answer, None, or a row as in data files. verifier: a name of the
    registry (a row may name another), "file.py:function", or a function (response, row) -> reward, which is called
    here without limits of time. config: as [reward] of a run; RewardConfig() by default. A response that max_tokens
    cut off counts as config.cut_off_factor says (0). Raises UserError for rows that the verifier cannot judge.
    """
    # The same defaults as those of a run's [reward].
    config = config or RewardConfig()
    function = None if isinstance(verifier, str) else verifier
    name = verifier if isinstance(verifier, str) else custom.IN_PROCESS
    _check(responses, rows, function)

    # The rows as a data file's, and what of each response is judged.
    prompts = [_prompt(row, i, RowFormat(name, config)) for i, row in enumerate(rows)]
    flat = [(p, r) for p, given in zip(prompts, responses, strict=True) for r in _listed(given)]
    found = [_found(prompt, response, config) for prompt, response in flat]

    # Judged by the processes of a run, which end with this call.
    requests = [ScoreRequest(p, *(f or _UNSEEN)) for (p, _), f in zip(flat, found, strict=True)]
    named = {prompt.verifier for prompt in prompts} - {custom.IN_PROCESS}
    impure = check_verifiers(named, config).impure
    with RewardPool(config.workers, config.timeout_s, impure=impure, function=function) as pool:
        verdicts = pool.score(requests)

    # Back into the form that was given.
    rewards = iter([_reward(r, f, v, config) for (_, r), f, v in zip(flat, found, verdicts, strict=True)])
    return [next(rewards) if _is_one(given) else [next(rewards) for _ in _listed(given)] for given in responses]


def _check(responses: Sequence[Any], rows: Sequence[Any], function: RewardFunction | None) -> None:
    if isinstance(responses, str) or isinstance(rows, str) or len(responses) != len(rows):
        raise UserError(
            f"score: {len(responses)} responses and {len(rows)} rows; give a list of responses, and a row for each"
        )
    if function is not None:
        custom.check_parameters(function, "reward")


def _prompt(row: str | Mapping[str, Any] | None, i: int, row_format: RowFormat) -> Prompt:
    raw = {"answer": row} if row is None or isinstance(row, str) else dict(row)
    # A row without an id is known by its place, which is what error messages say.
    where = f"rows[{i}]"
    checked = check_row({"prompt": _NO_PROMPT, **raw}, where, where, row_format)
    return Prompt(checked.id, spoken(checked.prompt), (), checked.answer, checked.verifier, checked.metadata)


def _is_one(given: object) -> bool:
    return isinstance(given, (str, Sample))


def _listed(given: Any) -> Sequence[str | Sample]:
    return [given] if _is_one(given) else given


def _cut_off(response: str | Sample) -> bool:
    return isinstance(response, Sample) and response.finish == "length"


def _found(prompt: Prompt, response: str | Sample, config: RewardConfig) -> Found | None:
    """The answer in a response; None where nothing looks for one."""
    judged_by = entry(prompt.verifier, "verifier", config)
    if _cut_off(response) and not scores_cut_off(judged_by, config):
        return None
    text = response.text if isinstance(response, Sample) else response
    return extract(text, judged_by.find, judged_by.max_chars)


def _reward(response: str | Sample, found: Found | None, verdict: ScoreResult, config: RewardConfig) -> Reward:
    reward, right = final_reward(verdict, _cut_off(response), config)
    answer, status = (found.answer, verdict.status) if found else (None, "length")
    return Reward(reward, right, verdict.reason, status, answer, verdict.parts)
