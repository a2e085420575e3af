"""Rollouts over several steps: versions and log-probabilities of their tokens, and the loss."""

from __future__ import annotations

import fakes
import pytest
import tiny
import torch
from by_hand import responses
from dist.steps import configured, make_trainer

from megatron_brorl.train import collect, update

N, PROMPTS, STEP_TOKENS, TOKENS = 16, 2, 4, 12  # STEP_TOKENS: rollout.partial_tokens


@pytest.mark.parametrize("updates", [1, 2])
def test_stale_tokens_use_their_sampling_log_probs(processes, model, monkeypatch, updates):
    """Loss (one update) and old log-probs (two) of every step against transformers with the weights at its start."""
    rollout = {"n": N, "prompts": PROMPTS, "partial_tokens": STEP_TOKENS}
    config = configured({"rollout": rollout, "algo": {"mini_batches": updates}})
    trainer = make_trainer(model[0], processes, config, fakes.Engine())
    trainer.sync_weights()
    experiences = []
    update_policy = update.update_policy

    def record_and_update(worker, experience, *rest):
        experiences.append(experience)
        return update_policy(worker, experience, *rest)

    monkeypatch.setattr(update, "update_policy", record_and_update)
    first_steps = {}  # the step in which a rollout started, by prompt and response
    updates_before = [0]  # optimizer steps before each step
    stale = 0
    capped = 0
    for step in range(6):
        for prompt in fakes.prompts(PROMPTS, PROMPTS * step):
            rows = responses(config.run.seed, prompt, N, TOKENS, stream=step)
            first_steps |= {(prompt.token_ids, tuple(row)): step for row in rows}
        model[1].load_state_dict(dict(trainer.models.actor.hf_tensors()), strict=False)
        values, _ = trainer.train_step()
        experience = experiences.pop()
        assert values["updates"] == (updates if len(experience) else 0)
        updates_before.append(updates_before[-1] + int(values["updates"]))
        loss_sum = 0.0
        for i, (prompt, row) in enumerate(zip(experience.prompts, experience.responses, strict=True)):
            first_step = first_steps[tuple(prompt.tolist()), tuple(row.tolist())]
            versions = [updates_before[first_step + position // STEP_TOKENS] for position in range(len(row))]
            sampled = torch.tensor([fakes.log_prob(t, v) for t, v in zip(row.tolist(), versions, strict=True)])
            assert torch.equal(experience.rollout_log_probs[i], sampled)
            stale += versions[0] < updates_before[step]
            current = tiny.log_probs(model[1], prompt, row)
            if updates > 1:
                torch.testing.assert_close(experience.old_log_probs[i], current, atol=1e-4, rtol=0)
            weight = (current - sampled).exp()
            capped += int((weight > config.algo.is_cap).sum())
            loss_sum -= float((weight.clamp(max=config.algo.is_cap) * experience.advantages[i]).double().sum())
        if updates == 1 and len(experience):
            assert experience.old_log_probs is None  # the actor's current ones, without gradient
            tokens = sum(map(len, experience.responses))
            assert values["trained_tokens"] == tokens
            assert values["loss"] == pytest.approx(loss_sum / tokens, rel=1e-4, abs=1e-6)
    assert stale > 50
    assert capped > 50


def test_rollouts_cut_by_the_watchdog_continue(processes, model):
    """A rollout that makes no progress for two steps is requested again, and ends in the third step."""
    rollout = {"n": N, "prompts": PROMPTS, "partial_tokens": TOKENS, "timeout_s": 0.5}
    engine = fakes.Engine(stall={("p/1", 5)})
    trainer = make_trainer(model[0], processes, configured({"rollout": rollout}), engine)
    trainer.sync_weights()
    for step in range(3):
        if step == 2:
            engine.stall.clear()
        values, _ = trainer.train_step()
        assert values["lost_share"] == 0
        assert values["carried_rollouts"] == (1 if step < 2 else 0)
        assert values["rollouts"] == {0: N, 1: 2 * N, 2: 3 * N}[step]  # the prompt of step 0 closes in step 2
        requested = [(r.prompt.id, r.first, r.n, [b.index for b in r.begun]) for r in engine.calls[-1]]
        new = [(p.id, 0, N, []) for p in fakes.prompts(PROMPTS, PROMPTS * step)]
        assert requested == ([("p/1", 5, 1, [5])] if step else []) + new
    assert not trainer.state.carried.groups


def test_old_group_closes_without_unfinished_rollouts(processes, model, monkeypatch):
    monkeypatch.setattr(collect, "MAX_CARRIED_STEPS", 1)
    rollout = {"n": N, "prompts": PROMPTS, "partial_tokens": TOKENS, "timeout_s": 0.5}
    engine = fakes.Engine(stall={("p/1", 5)})
    trainer = make_trainer(model[0], processes, configured({"rollout": rollout}), engine)
    trainer.sync_weights()
    first, _ = trainer.train_step()
    assert (first["lost_share"], first["carried_rollouts"], first["rollouts"]) == (0, 1, N)
    second, _ = trainer.train_step()
    assert second["lost_share"] == 1 / (2 * N + 1)  # of two new prompts and the carried rollout
    assert (second["carried_rollouts"], second["rollouts"]) == (0, 3 * N - 1)
    assert not trainer.state.carried.groups
