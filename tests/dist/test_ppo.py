"""PPO with a critic: two steps of two epochs against a plain loop in float64, in every layout."""

from __future__ import annotations

import copy
from functools import cache

import pytest
import tiny
import torch
from dist.ppo_jobs import ALGO, CLIP, CRITIC_OPTIM, OF_PROMPT, OPTIM, TEMPERATURE, batch
from dist.world import pairs

pytestmark = pytest.mark.slow
STEPS = 2
LAYOUTS = [
    (1, {}, {}),
    (1, {}, {"ops": "reference", "share_prompt": False, "tokens_per_micro_batch": 100_000}),
    (2, {"tensor": 2}, {}),
    (2, {"tensor": 2, "sequence": True}, {"recompute": True}),
    (2, {"pipeline": 2}, {}),
    (2, {}, {}),
    (4, {"tensor": 2, "pipeline": 2}, {}),
    (4, {"tensor": 2, "pipeline": 2}, {"ops": "reference", "share_prompt": False}),
    (4, {"tensor": 2}, {}),
    (4, {"pipeline": 2}, {}),
    (4, {"context": 2}, {"share_prompt": False}),
]


class Critic(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = copy.deepcopy(model.model)
        self.value_head = torch.nn.Parameter(torch.zeros(1, model.config.hidden_size, dtype=torch.float64))


def optimizer(module, config):
    """Norm weights and biases are not decayed."""
    kinds = {kind: [p for p in module.parameters() if (p.dim() > 1) == kind] for kind in (True, False)}
    groups = [
        {"params": kinds[True], "weight_decay": config.weight_decay},
        {"params": kinds[False], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps)


def descend(module, adam, loss, config):
    adam.zero_grad()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(module.parameters(), config.clip_grad)
    adam.step()
    return norm.item()


def distribution(actor, prompt, response):
    logits = actor(torch.cat((prompt, response))[None]).logits[0, len(prompt) - 1 : -1]
    return (logits / TEMPERATURE).log_softmax(-1)


def log_probs(actor, prompt, response):
    return distribution(actor, prompt, response).gather(-1, response[:, None])[:, 0]


def values(critic, prompt, response):
    hidden = critic.model(torch.cat((prompt, response))[None]).last_hidden_state[0, len(prompt) - 1 : -1]
    return (hidden @ critic.value_head.T)[:, 0]


def generalised(reward, v):
    """A_t = sum_l (gamma lam)^l delta_{t+l} (Schulman et al. 2016, eq. 16), summed directly."""
    n = len(v)
    after = torch.cat((v[1:], torch.zeros(1).double()))
    deltas = torch.tensor([reward if t == n - 1 else 0.0 for t in range(n)]).double() + ALGO.gamma * after - v
    return torch.stack([sum((ALGO.gamma * ALGO.lam) ** (k - t) * deltas[k] for k in range(t, n)) for t in range(n)])


CASES = [("qwen2", True), ("qwen3", False)]


def loop(directory, case):
    """Run the plain loop; return its metrics and weights, and the model directory."""
    actor = tiny.make_model(directory, *case).double()
    reference = copy.deepcopy(actor)
    critic = Critic(actor)
    adam = optimizer(actor, OPTIM)
    critic_adam = optimizer(critic, CRITIC_OPTIM)
    metrics = []
    for step in range(STEPS):
        prompts, responses, sampled, rewards = batch(step)
        pairs = list(zip(prompts, responses, strict=True))
        with torch.no_grad():
            old = [log_probs(actor, p, r) for p, r in pairs]
            fixed = [log_probs(reference, p, r) for p, r in pairs]
            v = [values(critic, p, r) for p, r in pairs]
        raw = [generalised(reward, x) for reward, x in zip(rewards, v, strict=True)]
        returns = [a + x for a, x in zip(raw, v, strict=True)]
        flat = torch.cat(raw)
        goal = torch.cat(returns)
        advantages = [
            (a - flat.mean()) / flat.std(correction=0) + ALGO.correct_boost * (reward >= 0.99)
            for a, reward in zip(raw, rewards, strict=True)
        ]
        gaps = [(o - s).exp() for o, s in zip(old, sampled, strict=True)]
        trusted = [(g >= ALGO.mismatch_bounds[0]) & (g <= ALGO.mismatch_bounds[1]) for g in gaps]
        found = {
            "explained_variance": 1 - (flat.var() / goal.var()).item(),
            "value_loss": 0.0,
            "loss": 0.0,
            "clipped": 0,
            "masked": 0,
        }
        for _ in range(ALGO.epochs):
            for part in range(2):
                members = [i for i, g in enumerate(OF_PROMPT) if (i - OF_PROMPT.index(g)) % 2 == part]
                tokens = sum(len(responses[i]) for i in members)
                loss = torch.zeros(()).double()
                for i in members:
                    new = values(critic, *pairs[i])
                    near = torch.clamp(new, v[i] - CLIP, v[i] + CLIP)
                    errors = torch.stack(((new - returns[i]) ** 2, (near - returns[i]) ** 2))
                    found["clipped"] += int((errors[1] > errors[0]).sum())
                    loss = loss + errors.max(dim=0).values.sum() / 2 / tokens
                found["value_loss"] += loss.item() / 4
                found["critic_norm"] = descend(critic, critic_adam, loss, CRITIC_OPTIM)
                loss = torch.zeros(()).double()
                for i in members:
                    every = distribution(actor, *pairs[i])
                    current = every.gather(-1, responses[i][:, None])[:, 0]
                    ratio = (current - old[i]).exp()
                    clipped = ratio.clamp(1 - ALGO.eps_low, 1 + ALGO.eps_high)
                    weight = gaps[i].clamp(max=ALGO.is_cap)
                    gain = weight * torch.minimum(ratio * advantages[i], clipped * advantages[i])
                    kl = (current - fixed[i]) ** 2 / 2
                    entropy = -(every.exp() * every).sum(-1)
                    terms = ALGO.kl_coef * kl - gain - ALGO.entropy_coef * entropy
                    loss = loss + (terms * trusted[i]).sum() / tokens
                found["loss"] += loss.item() / 4
                found["norm"] = descend(actor, adam, loss, OPTIM)
        found["masked"] = 1 - sum(int(t.sum()) for t in trusted) / sum(map(len, trusted))
        metrics.append(found)
    return str(directory), metrics, dict(actor.state_dict()), dict(critic.state_dict())


@pytest.fixture(scope="module")
def loops(tmp_path_factory):
    """Run `loop` once per case, because it takes seconds."""
    return cache(lambda case: loop(tmp_path_factory.mktemp("model"), case))


@pytest.mark.parametrize(("size", "parallel", "options", "case"), pairs(LAYOUTS, CASES))
def test_ppo_equals_a_plain_loop(worlds, loops, size, parallel, options, case):
    directory, metrics, actor, critic = loops(case)
    assert sum(f["clipped"] for f in metrics) > 0  # value clipping is active
    for got, actor_weights, critic_weights in worlds(size).run("ppo_jobs:ppo", directory, parallel, STEPS, options):
        for mine, wanted in zip(got, metrics, strict=True):
            # With values of zero the residuals are the returns, and no variance is explained.
            assert mine["explained_variance"] == pytest.approx(wanted["explained_variance"], rel=1e-4, abs=1e-6)
            assert mine["value_loss"] == pytest.approx(wanted["value_loss"], rel=1e-5)
            assert mine["loss"] == pytest.approx(wanted["loss"], rel=1e-4, abs=1e-6)
            assert mine["masked_share"] == pytest.approx(wanted["masked"], abs=1e-12)
            assert 0 < mine["masked_share"] < 1
            assert mine["critic_updates"] == mine["updates"] == 4
        for name, tensor in actor_weights.items():
            assert (tensor - actor[name]).norm() <= 1e-5 * actor[name].norm(), name
        for name, tensor in critic_weights.items():
            assert (tensor - critic[name]).norm() <= 1e-5 * critic[name].norm(), name
        assert critic.keys() - critic_weights.keys() <= {"value_head"}


@pytest.mark.parametrize("case", CASES)
def test_a_new_critic_explains_no_variance(loops, case):
    metrics = loops(case)[1]
    assert metrics[0]["explained_variance"] == 0.0
    assert metrics[-1]["explained_variance"] != 0.0
