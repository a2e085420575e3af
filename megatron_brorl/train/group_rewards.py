"""Rewards by reward.group_function, which replace those of verifiers in training.

Each complete group is scored once, without its lost rollouts, on a rank that receives all of its responses. Rollouts
keep their scores, so groups that wait for the next step are not scored again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from megatron_brorl.algo import functions
from megatron_brorl.errors import StepError, UserError
from megatron_brorl.parallel import collectives
from megatron_brorl.rewards.extract import extract
from megatron_brorl.rewards.group import KEY, MAJORITY, PREFIX, score_group
from megatron_brorl.rewards.registry import entry
from megatron_brorl.rewards.scoring import scores_cut_off, without_stop
from megatron_brorl.rewards.worker_pool import RewardPool, completed, score_result
from megatron_brorl.tracking.timeline import span
from megatron_brorl.train.groups import CUT, LENGTH, Outcomes
from megatron_brorl.train.redistribute import Transfers, send
from megatron_brorl.train.sample_and_score import MAX_UNSCORED, RolloutRunner
from megatron_brorl.types import Prompt, PromptGroup, ScoredRollout, ScoreResult


def call_group_function(pool: RewardPool, name: str, *arguments: Any) -> Future[ScoreResult]:
    """Return the future result of score_group(function, *arguments).

    name: a function, or "majority VERIFIER". It is called in a worker, or here if the program has passed it.
    """
    if name == functions.IN_PROCESS[KEY]:
        return completed(score_result(score_group(functions.find(KEY, name).function, *arguments)))
    return pool.call(f"{PREFIX}{name}", arguments)


def try_group_function(pool: RewardPool, name: str, prompts: Sequence[Prompt], n: int) -> list[str]:
    """Call a user's function for each prompt with n responses: the reference answer and the prompt's text in turn.

    The text has no extracted answer. Returns one warning if the function fails on some groups. Raises UserError if it
    fails on all, or returns scores that a run would refuse.
    """
    failed = []  # (prompt id, result) of each group on which the function fails
    for prompt in prompts:
        answers = [None if i % 2 else prompt.answer for i in range(n)]
        texts = [prompt.text if answer is None else answer for answer in answers]
        result = call_group_function(pool, name, prompt.row(), texts, answers, list(range(n))).result()
        if result.status != "ok":
            failed.append((prompt.id, result))
    if not failed:
        return []
    prompt_id, result = next((failure for failure in failed if failure[1].status == "invalid"), failed[0])
    where = f"{KEY} = {name}: {result.reason}"
    if result.status == "invalid":
        raise UserError(f"{where}; return a finite number for each response, or None")
    if len(failed) == len(prompts):
        raise UserError(f"{where}, for a group of row {prompt_id}; fix it")
    return [f"{where}, for a group of row {prompt_id}: such a group has no signal"]


@dataclass
class GroupRewards:
    """Scores the groups of one step."""

    runner: RolloutRunner
    stop_ids: Sequence[int]
    scored: set[int]  # indices of groups with scores, such as surplus groups of the previous step
    metrics: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))  # by name, a value per group

    def apply(
        self, step: str, groups: Sequence[PromptGroup], rollouts: Sequence[ScoredRollout], outcomes: Outcomes
    ) -> tuple[list[ScoredRollout], Outcomes]:
        """Score the complete groups that have no scores yet; return rollouts and outcomes with rewards. Collective.

        rollouts: of this rank. Raises StepError if a score is not finite or missing, or if most calls fail.
        """
        config = self.runner.reward
        # [groups, N]: the survivors of the groups that have neither a cut rollout nor scores.
        to_score = outcomes.ended & ~(outcomes.state == CUT).any(1, keepdim=True)
        to_score[list(self.scored)] = False
        chosen = to_score.any(1).nonzero()[:, 0].tolist()
        self.scored.update(chosen)
        scores = torch.zeros_like(outcomes.rewards, dtype=torch.float64)
        own_failures = []
        with span("score", allowance_s=config.timeout_s * max(len(chosen), 1)):
            for g, future in self._submit(groups, rollouts, outcomes, to_score).items():
                result = future.result()
                for index, score in result.parts.items():  # by rollout index, as text
                    scores[g, int(index)] = score
                if result.status != "ok":
                    own_failures.append((result.status, result.reason))
        # The scores of each group are on one rank and 0 on the others, so the sum is the table of all ranks.
        scores = collectives.all_reduce_tensor(scores)

        label = f"{step}: {KEY} = {config.group_function}"
        failures = [failure for of_rank in collectives.all_gather(own_failures) for failure in of_rank]
        if invalid := [reason for status, reason in failures if status == "invalid"]:
            raise StepError(f"{label}: {invalid[0]}; return a finite number for each response, or None")
        if len(failures) > MAX_UNSCORED * len(chosen):
            raise StepError(f"{label} failed on {len(failures)} of {len(chosen)} groups: {failures[0][1]}; fix it")
        text = f"{KEY} = {config.group_function} failed on a group, which has no signal (metric group_errors)"
        self.runner.report_errors({text: own_failures[0][1]} if own_failures else {})
        self.metrics["group_errors"] += [1.0] * len(failures) + [0.0] * (len(chosen) - len(failures))

        if config.group_function == MAJORITY:
            for g in chosen:
                share = float(scores[g].sum()) / int(to_score[g].sum())
                self.metrics["majority_share"].append(share)
                if share < config.majority_share:
                    scores[g] = 0
                elif share and groups[g].prompt.answer is not None and groups[g].prompt.verifier != "none":
                    # `any`, because a response that was cut off may count as wrong.
                    self.metrics["majority_right_share"].append(float((outcomes.right[g] & (scores[g] > 0)).any()))
        outcomes = replace(outcomes, rewards=torch.where(to_score, scores.float(), outcomes.rewards))
        slots = map(tuple, to_score.nonzero().tolist())
        new_rewards = dict(zip(slots, outcomes.rewards[to_score].tolist(), strict=True))
        rewarded = [replace(r, reward=new_rewards.get((r.group, r.rollout.index), r.reward)) for r in rollouts]
        return rewarded, outcomes

    def _submit(
        self, groups: Sequence[PromptGroup], rollouts: Sequence[ScoredRollout], outcomes: Outcomes, to_score: Tensor
    ) -> dict[int, Future[ScoreResult]]:
        """Send each group to one rank; return the results of this rank's. Collective. to_score: bool [groups, N]."""
        grid = self.runner.grid
        own_tokens = {(r.group, r.rollout.index): r.rollout.token_ids for r in rollouts}
        group, sibling = to_score.nonzero(as_tuple=True)
        replica = (to_score.any(1).cumsum(0) % grid.dp_size)[group]  # Groups go to the replicas in turn.
        transfers = Transfers(group, sibling, outcomes.holder[to_score], replica, outcomes.tokens[to_score])
        received, _ = send(transfers, own_tokens, torch.int64, grid)
        by_group: dict[int, dict[int, Tensor]] = defaultdict(dict)
        if grid.rank == grid.replicas[grid.dp_rank][0]:  # Only the first rank of a replica scores.
            for g, s in sorted(received):
                by_group[g][s] = received[g, s]
        return {g: self._call(groups[g].prompt, tokens, outcomes.state[g]) for g, tokens in by_group.items()}

    def _call(self, prompt: Prompt, tokens: Mapping[int, Tensor], state: Tensor) -> Future[ScoreResult]:
        """Return the result of score_group. tokens: of the responses by rollout index. state: [N]."""
        config = self.runner.reward
        verifier = entry(prompt.verifier, "verifier", config)
        texts = [self.runner.tokenizer.decode(without_stop(ids, self.stop_ids).tolist()) for ids in tokens.values()]
        answers = [extract(text, verifier.find, verifier.max_chars).answer for text in texts]
        if not scores_cut_off(verifier, config):
            answers = [None if state[i] == LENGTH else answer for i, answer in zip(tokens, answers, strict=True)]
        name = f"{MAJORITY} {prompt.verifier}" if config.group_function == MAJORITY else config.group_function
        return call_group_function(self.runner.pool, name, prompt.row(), texts, answers, list(tokens))
