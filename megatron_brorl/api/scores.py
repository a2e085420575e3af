"""Rewards of given responses, by the verifiers of training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_brorl.api.engine import Sample
from megatron_brorl.config.schema import RewardConfig
from megatron_brorl.data.chat import prompt_text
from megatron_brorl.data.prompts import RowFormat, check_row
from megatron_brorl.errors import UserError
from megatron_brorl.rewards import custom
from megatron_brorl.rewards.custom import RewardFunction
from megatron_brorl.rewards.extract import Found, extract
from megatron_brorl.rewards.preflight import check_verifiers
from megatron_brorl.rewards.registry import entry
from megatron_brorl.rewards.scoring import final_reward, scores_cut_off
from megatron_brorl.rewards.worker_pool import RewardPool, ScoreRequest
from megatron_brorl.types import Prompt

_NO_PROMPT = "-"  # the prompt of a reference answer that is given without one
_CUT_OFF = Found(answer=None, no_answer_reason="cut off")


@dataclass(frozen=True)
class Reward:
    """The reward of one response."""

    reward: float  # as training would use it
    right: bool  # whether the response is correct (reward.correct_at)
    reason: str  # a short explanation, if the verifier gives one
    status: str  # "ok", or why there is no score: timeout, error, broken, invalid, crash, no_answer, length
    answer: str | None  # the part of the response that was scored
    parts: Mapping[str, float]  # the terms of the reward by name


def score(
    responses: Sequence[str | Sample | Sequence[str | Sample]],
    rows: Sequence[str | Mapping[str, Any] | None],
    verifier: str | RewardFunction = "math",
    *,
    config: RewardConfig | None = None,
) -> list[Any]:
    """Return a Reward for each response, in the form of `responses`: a list, or a list per row as from Engine.sample.

    rows: one per entry of responses: a reference answer, None, or a row as in data files, which may also have an object
    "columns" with the other columns of a file. verifier: a name of the registry (a row may name another),
    "file.py:function", or a function (response, row) -> reward, which runs in this process without limits. config:
    section [reward] of a run. The reward of a response that max_tokens cut off is multiplied by config.cut_off_factor
    (0 by default). Raises UserError for rows that the verifier rejects.
    """
    config = config or RewardConfig()
    function = None if isinstance(verifier, str) else verifier
    name = verifier if isinstance(verifier, str) else custom.IN_PROCESS
    if isinstance(responses, str) or isinstance(rows, str) or len(responses) != len(rows):
        raise UserError(
            f"score: {len(responses)} responses and {len(rows)} rows; give a list of responses, and a row for each"
        )
    if function is not None:
        custom.check_parameters(function, "reward")

    prompts = [_prompt(row, i, RowFormat(name, config)) for i, row in enumerate(rows)]
    groups = [[group] if isinstance(group, (str, Sample)) else group for group in responses]
    flat = [(prompt, response) for prompt, group in zip(prompts, groups, strict=True) for response in group]
    extracted = [_find_answer(prompt, response, config) for prompt, response in flat]

    # The same worker processes as in a run. They end with this call.
    requests = [ScoreRequest(pair[0], *(answer or _CUT_OFF)) for pair, answer in zip(flat, extracted, strict=True)]
    names = {prompt.verifier for prompt in prompts} - {custom.IN_PROCESS}
    impure = check_verifiers(names, config).impure
    with RewardPool(config.workers, config.timeout_s, impure=impure, function=function) as pool:
        results = pool.score(requests)

    scored = []
    for (_, response), extraction, result in zip(flat, extracted, results, strict=True):
        reward, right = final_reward(result, _is_cut_off(response), config)
        answer, status = (extraction.answer, result.status) if extraction else (None, "length")
        scored.append(Reward(reward, right, result.reason, status, answer, result.parts))
    rewards = iter(scored)
    return [next(rewards) if isinstance(item, (str, Sample)) else [next(rewards) for _ in item] for item in responses]


def _prompt(row: str | Mapping[str, Any] | None, i: int, row_format: RowFormat) -> Prompt:
    raw: dict[str, Any] = {"answer": row} if row is None or isinstance(row, str) else dict(row)
    columns = raw.pop("columns", {})
    where = f"rows[{i}]"  # also the id of a row without one
    checked = check_row({"prompt": _NO_PROMPT, **raw}, where, where, row_format)
    text, metadata = prompt_text(checked.prompt), checked.metadata
    return Prompt(checked.id, text, (), checked.answer, checked.verifier, metadata, columns=columns)  # (): no tokens


def _is_cut_off(response: str | Sample) -> bool:
    return isinstance(response, Sample) and response.finish == "length"


def _find_answer(prompt: Prompt, response: str | Sample, config: RewardConfig) -> Found | None:
    """Return the answer in a response; None if the response was cut off and is not scored."""
    verifier = entry(prompt.verifier, "verifier", config)
    if _is_cut_off(response) and not scores_cut_off(verifier, config):
        return None
    text = response.text if isinstance(response, Sample) else response
    return extract(text, verifier.find, verifier.max_chars)
