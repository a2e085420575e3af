"""The engine's log-probabilities as old policy, and the probability mass that top-p and top-k leave."""

from __future__ import annotations

import pytest
import tiny
import torch
from dist.steps import configured, make_trainer
from sampling_cases import Case, weights

from megatron_brorl.families.shape import read_shape
from megatron_brorl.models.weights.names import hf_shapes
from megatron_brorl.ops.reference.sampling import sample_tokens
from megatron_brorl.rollout.native.torch_engine import TorchEngine

CUTS = [(0.8, 0), (1.0, 5), (0.9, 20)]  # (top_p, top_k)


class Engine(TorchEngine):
    """The built-in engine, which stores its results."""

    def generate(self, requests, *rest):
        groups = super().generate(requests, *rest)
        pairs = zip(requests, groups, strict=True)
        self.sampled = [(request.prompt, rollout) for request, rollouts in pairs for rollout in rollouts]
        return groups


def step(model, processes, temperature, top_p=1.0, top_k=0, **algo):
    """Return the metrics of one step with the built-in engine, and its results."""
    rollout = {"n": 16, "prompts": 3, "temperature": temperature, "top_p": top_p, "top_k": top_k}
    sections = {"reward": {"cut_off_factor": 1.0}, "theory": {"every": 0}, "optim": {"lr": 1e-7}}
    config = configured({"rollout": rollout, "algo": algo, **sections})
    shape = read_shape(model[0])
    engine = Engine(shape, hf_shapes(shape), torch.device("cpu"), torch.float32, max_rows=64, sample=sample_tokens)
    trainer = make_trainer(model[0], processes, config, engine)
    trainer.held_out = []
    trainer.sync_weights()
    metrics, _ = trainer.train_step()
    return metrics, engine.sampled


def by_transformers(model, sampled, temperature, top_p, top_k):
    """Return transformers' log-probabilities of all sampled tokens and the mass that the cut leaves at each."""
    cut = Case(torch.empty(0), temperature, top_p, top_k)
    uncut = Case(cut.logits, temperature)
    log_probs, masses = [], []
    for prompt, rollout in sampled:
        log_probs.append(tiny.log_probs(model, prompt.token_ids, rollout.token_ids, temperature))
        ids = torch.tensor([[*prompt.token_ids, *rollout.token_ids.tolist()]])
        with torch.no_grad():
            logits = model(ids).logits[0, len(prompt.token_ids) - 1 : -1].double().numpy()
        masses += [weights(row, cut, top_p).sum() / weights(row, uncut, top_p=1.0).sum() for row in logits]
    return torch.cat(log_probs), torch.tensor(masses, dtype=torch.float32)


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.5])
@pytest.mark.parametrize("old", ["actor", "rollout"])
def test_ratio_is_one_at_the_first_update(processes, model, temperature, old):
    metrics, sampled = step(model, processes, temperature, old_log_probs=old, mini_batches=1, is_cap=0.0)
    expected, mass = by_transformers(model[1], sampled, temperature, top_p=1.0, top_k=0)
    engine_log_probs = torch.cat([rollout.log_probs for _, rollout in sampled])
    torch.testing.assert_close(engine_log_probs, expected, rtol=0, atol=5e-5)
    torch.testing.assert_close(mass, torch.ones_like(mass), rtol=0, atol=1e-6)
    assert metrics["ratio_mean"] == pytest.approx(1, abs=5e-5)
    assert metrics["ratio_max"] == pytest.approx(1, abs=5e-5)
    assert metrics["clipped_low"] == metrics["clipped_high"] == 0
    assert metrics["logprob_gap_max"] < 5e-5


@pytest.mark.parametrize(("top_p", "top_k"), CUTS)
def test_cut_distribution_shifts_the_ratio(processes, model, top_p, top_k):
    """If engine and trainer agree, pi / pi_rollout is the probability mass that top-p and top-k leave."""
    metrics, sampled = step(model, processes, temperature=0.7, top_p=top_p, top_k=top_k, mini_batches=2)
    uncut_log_probs, mass = by_transformers(model[1], sampled, 0.7, top_p, top_k)
    engine_log_probs = torch.cat([rollout.log_probs for _, rollout in sampled])
    torch.testing.assert_close((uncut_log_probs - engine_log_probs).exp(), mass, rtol=0, atol=5e-5)
    assert 0 < float(mass.mean()) < 0.95
    # The trainer's own log-probabilities are the old policy, from which the first mini-batch has not moved.
    assert metrics["clipped_low"] == metrics["clipped_high"] == 0
    assert metrics["ratio_mean"] == pytest.approx(1, abs=5e-5)
    # The log-probabilities of the cut distribution do not show how well engine and trainer agree.
    assert "logprob_gap_mean" not in metrics
    assert "logprob_gap_max" not in metrics
