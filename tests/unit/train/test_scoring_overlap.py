"""Rollouts are scored while the engine still generates, with the same results."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace

import fakes
import numpy as np
import pytest
import torch
from by_hand import responses
from dist.steps import configured, make_trainer

from megatron_brorl.rewards import registry
from megatron_brorl.rewards.worker_pool import RewardPool

N, TOKENS = 32, 12


class _Deaf:
    """Callbacks that ignore rollouts and never cancel."""

    def finished(self, request, rollout):
        pass

    def cancelled(self):
        return False


class Pool(RewardPool):
    """Releases a semaphore for each score."""

    def __init__(self) -> None:
        super().__init__(workers=2, timeout_s=60.0, judge_factory="step_verifiers:make")
        self.scored = threading.Semaphore(0)

    def submit(self, request):
        score = super().submit(request)
        score.add_done_callback(lambda _: self.scored.release())
        return score


@dataclass
class ShortestFirst(fakes.Engine):
    """Delivers rollouts in the order of their lengths. The longest ones come when all others have been scored."""

    pool: Pool | None = None
    scored: int = 0  # rollouts that were scored before the call returned

    def generate(self, requests, sampling, callbacks=None, supply=None):
        groups = super().generate(requests, sampling, _Deaf())
        rollouts = [(request, rollout) for request, group in enumerate(groups) for rollout in group]
        rollouts.sort(key=lambda pair: len(pair[1].token_ids))
        early = [(request, rollout) for request, rollout in rollouts if len(rollout.token_ids) < TOKENS]
        for request, rollout in early:
            callbacks.finished(request, rollout)
        self.scored = len(early)
        assert all(self.pool.scored.acquire(timeout=60.0) for _ in range(self.scored))
        return groups


@pytest.fixture(autouse=True)
def register_verifier(monkeypatch):
    monkeypatch.setitem(registry.ENTRIES, "logged", registry.ENTRIES["exact"])


@pytest.fixture
def pool():
    with Pool() as pool:
        yield pool


def trainer_of(model, processes, pool, engine, log):
    config = configured({"rollout": {"n": N, "prompts": 2}})
    batch = [replace(p, verifier="logged", metadata={"log": str(log)}) for p in fakes.prompts(2)]
    trainer = make_trainer(model[0], processes, config, engine, pool=pool, batch=batch)
    trainer.sync_weights()
    return trainer


def test_early_rollouts_are_scored_before_generation_ends(processes, pool, model, tmp_path):
    log = tmp_path / "log"
    engine = ShortestFirst(pool=pool)
    trainer = trainer_of(model, processes, pool, engine, log)
    values, seconds = trainer.train_step()
    rows = {p.id: responses(trainer.config.run.seed, p, N, TOKENS) for p in fakes.prompts(2)}
    stopped = [(name, row[:-1]) for name, siblings in rows.items() for row in siblings if row[-1] == fakes.STOP]
    assert engine.scored > 10
    # Cut-off responses are not scored; equal answers to a prompt are scored once.
    lines = {f"{name}: {' '.join(map(str, row))}".strip() for name, row in stopped}
    assert sorted(line.strip() for line in log.read_text().splitlines()) == sorted(lines)
    assert values["score_cache_hit_share"] == (len(stopped) - len(lines)) / len(stopped)
    assert values["verifier_timeouts"] == values["reward_worker_restarts"] == 0
    assert values["reward"] == pytest.approx(sum(sum(row) % 2 == 0 for _, row in stopped) / (2 * N))
    assert seconds["score_latency_max"] > 0
    # The same step with an engine that delivers all rollouts at its end, scored one after another.
    again = trainer_of(model, processes, fakes.Pool(), fakes.Engine(), tmp_path / "other")
    expected, _ = again.train_step()
    np.testing.assert_equal(values | {"score_cache_hit_share": 0.0}, expected)  # bit for bit; nan where it is unknown
    for (name, a), (_, b) in zip(trainer.models.actor.hf_tensors(), again.models.actor.hf_tensors(), strict=True):
        assert torch.equal(a, b), name


def test_rounds_of_a_step_share_scores(processes, pool, model, tmp_path):
    """A second round of the same prompts uses the scores of the first one. The next step does not."""
    log = tmp_path / "log"
    trainer = trainer_of(model, processes, pool, fakes.Engine(), log)
    trainer.config = configured({"rollout": {"n": N, "prompts": 2, "refills": 1}, "algo": {"dynamic_sampling": True}})
    trainer.train_source.batch = [replace(p, verifier="logged") for p in trainer.train_source.batch[:1]]
    values, _ = trainer.train_step()
    answers = log.read_text().splitlines()
    assert values["prompts_sampled"] == 2  # After one group the step samples a second round.
    assert len(answers) == len(set(answers)) > 10
    trainer.train_step()
    assert len(log.read_text().splitlines()) > len(answers)
