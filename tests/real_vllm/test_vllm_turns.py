"""Rollouts of several turns by the real vLLM."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby

import torch
from dist.jobs import make_worker
from unit.rollout.test_turns import facts, text_of, tokens_of
from vllm_engines import PROMPT, SAMPLING

from megatron_brorl.config.environment import EnvironmentConfig
from megatron_brorl.environments.pool import EnvironmentPool
from megatron_brorl.rollout.engine import Request
from megatron_brorl.rollout.turns import TurnEngine

STOPS = tuple(range(2, 12))
TURNS = replace(SAMPLING, max_tokens=48, stop_ids=STOPS)


class Sums:
    """Answer a turn with the sum of its tokens, and end after a multiple of four."""

    def reset(self, row):
        return "31 32"

    def step(self, text):
        self.sum = sum(map(int, text.split()))
        return f"{self.sum % 100} 50", self.sum % 4 == 0

    def reward(self):
        return self.sum % 100


def test_turns_are_those_of_the_trainer(model, start, processes):
    """Tokens do not depend on the batch, and log-probabilities are those that the trainer computes for the prefix."""
    inner = start(model, options={"stop_ids": STOPS})
    inner.update_weights(model.stream(), 0)
    ask = Request(replace(PROMPT, verifier="environment"), 11, 32)
    with EnvironmentPool(Sums, 1, 60.0, "tags") as pool:
        engine = TurnEngine(inner, pool, EnvironmentConfig(factory="Sums", max_turns=4), text_of, tokens_of)
        (found,) = engine.generate([ask], TURNS)
        second, first = engine.generate([replace(ask, n=20, first=12), replace(ask, n=12)], TURNS)
        (greedy,) = engine.generate([replace(ask, n=1)], replace(TURNS, temperature=0.0))
    assert [facts(r) for r in first + second] == [facts(r) for r in found]
    sampled = greedy[0].episode.sampled
    assert torch.equal(model.logits(greedy[0]).argmax(-1)[sampled], greedy[0].token_ids[sampled])

    prompt = torch.tensor(PROMPT.token_ids)
    scored = make_worker(str(model.directory), {}).log_probs([prompt] * 32, [r.token_ids for r in found], 1.0)
    for rollout, expected in zip(found, scored, strict=True):
        pairs = zip(rollout.token_ids.tolist(), rollout.episode.sampled.tolist(), strict=True)
        parts = [[token for token, _ in part] for _, part in groupby(pairs, lambda pair: pair[1])]
        sums = [sum(part) - (part[-1] in STOPS and part[-1]) for part in parts[1::2]]
        assert parts[::2] == [[31, 32], *([total % 100, 50] for total in sums[:-1])]
        if rollout.episode.score.status == "ok":
            assert (rollout.episode.score.reward, rollout.episode.turns) == (sums[-1] % 100, len(sums))
        torch.testing.assert_close(rollout.log_probs, expected * rollout.episode.sampled, atol=1e-4, rtol=0)
    assert {r.episode.turns for r in found} >= {1, 2, 3}
