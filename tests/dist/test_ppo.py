"""Two steps of two epochs, with and without a critic and an environment, against a plain loop in float64."""

from __future__ import annotations

import copy
from collections import defaultdict
from functools import cache

import pytest
import tiny
import torch
from dist.jobs import PROMPT_OF_ROW
from dist.ppo_jobs import ALGO, CLIP, CRITIC_OPTIM, OPTIM, SEQUENCES, STEPS, TEMPERATURE, batch, turns
from dist.world import CP, PP, SEQUENCE, TP

pytestmark = pytest.mark.slow


class Critic(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = copy.deepcopy(model.model)
        self.value_head = torch.nn.Parameter(torch.zeros(1, model.config.hidden_size, dtype=torch.float64))


def optimizer(module, config):
    """Norm weights and biases are not decayed."""
    matrices, vectors = ([p for p in module.parameters() if (p.dim() > 1) == matrix] for matrix in (True, False))
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps)


def descend(module, adam, loss, config):
    adam.zero_grad()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(module.parameters(), config.clip_grad)
    adam.step()
    return norm.item()


def distribution(actor, prompt, response, tokens=slice(None)):
    """Return the log-probabilities [tokens, V] at the given tokens of the response. tokens: a slice or a mask."""
    logits = actor(torch.cat((prompt, response))[None]).logits[0, len(prompt) - 1 : -1][tokens]
    return (logits / TEMPERATURE).log_softmax(-1)


def log_probs(actor, prompt, response, tokens=slice(None)):
    return distribution(actor, prompt, response, tokens).gather(-1, response[tokens][:, None])[:, 0]


def values(critic, prompt, response, tokens=slice(None)):
    hidden = critic.model(torch.cat((prompt, response))[None]).last_hidden_state[0, len(prompt) - 1 : -1][tokens]
    return (hidden @ critic.value_head.T)[:, 0]


def generalised(rewards, v, algo):
    """A_t = sum_l (gamma lam)^l delta_{t+l} (Schulman et al. 2016, eq. 16), summed directly."""
    n = len(v)
    deltas = (rewards + algo.gamma * torch.cat((v[1:], torch.zeros(1).double()))[:n] - v).tolist()
    sums = [sum((algo.gamma * algo.lam) ** (k - t) * deltas[k] for k in range(t, n)) for t in range(n)]
    return torch.tensor(sums, dtype=torch.float64)


# The model's family, whether its head is tied, the algorithm, and whether rollouts have tokens of an environment.
CASES = {
    "critic": ("qwen2", True, ALGO, False),
    "critic and turns": ("qwen3", False, ALGO, True),
    "sequences and turns": ("qwen2", True, SEQUENCES, True),
}
REFERENCE = {"ops": "reference", "share_prompt": False}
RUNS = [
    (1, {}, {}, "critic and turns"),
    (1, {}, REFERENCE | {"tokens": 100_000}, "sequences and turns"),
    (2, SEQUENCE, {"recompute": True}, "critic and turns"),
    (2, TP, {}, "critic and turns"),
    (2, PP, {}, "critic"),
    (2, {}, {}, "sequences and turns"),
    (4, TP, {}, "critic and turns"),
    (4, TP | PP, REFERENCE, "critic and turns"),
    (4, CP, {"share_prompt": False}, "critic"),  # sequences cannot be used with context parallelism
    (4, PP, {}, "sequences and turns"),
]


def loop(directory, case):
    """Run the plain loop, in which only sampled tokens have rows; return its metrics, weights and model directory."""
    *model, algo, environment = CASES[case]
    actor = tiny.make_model(directory, *model).double()
    reference = copy.deepcopy(actor)  # also the teacher
    critic = Critic(actor)
    adam = optimizer(actor, OPTIM)
    critic_adam = optimizer(critic, CRITIC_OPTIM)
    metrics = []
    for step in range(STEPS):
        prompts, responses, engine, rewards = batch(step)
        sampled = turns(responses) if environment else [torch.ones_like(r, dtype=torch.bool) for r in responses]
        engine = [row[mask].double() for row, mask in zip(engine, sampled, strict=True)]
        rows = list(zip(prompts, responses, sampled, strict=True))
        with torch.no_grad():
            old = [log_probs(actor, *row) for row in rows]
            base = [log_probs(reference, *row) for row in rows]
            old_values = [values(critic, *row) * (algo.advantage == "gae") for row in rows]
        kl = [o - b for o, b in zip(old, base, strict=True)]
        raw = []  # advantages before whitening
        for reward, row_values, row_kl in zip(rewards, old_values, kl, strict=True):
            token_rewards = -algo.kl_coef * row_kl if algo.kl_in == "reward" else torch.zeros_like(row_values)
            token_rewards[-1:] += reward
            raw.append(generalised(token_rewards, row_values, algo))
        returns = [a + x for a, x in zip(raw, old_values, strict=True)]
        flat = torch.cat(raw)
        mean, std = (flat.mean(), flat.std(correction=0)) if algo.advantage == "gae" else (0.0, 1.0)
        advantages = [(a - mean) / std - algo.distill_coef * row_kl for a, row_kl in zip(raw, kl, strict=True)]
        gaps = [o - e for o, e in zip(old, engine, strict=True)]
        low, high = torch.tensor((0.5, 5.0)).double().log()
        mismatch = [g.mean().expand(len(g)) if algo.mismatch_mask == "sequence" else g for g in gaps]
        accepted = [(m >= low) & (m <= high) for m in mismatch]  # tokens with a policy loss
        # The values of each metric, by token or by optimizer step.
        parts = defaultdict(list, masked_share=[~mask for mask in accepted])
        if algo.kl_in == "reward":
            parts |= {"reference_kl": kl, "teacher_kl": kl}
        if algo.advantage == "gae":
            parts |= {"value_mean": old_values, "return_mean": returns}
            parts["explained_variance"] = [1 - flat.var() / torch.cat(returns).var()]
        siblings = [i - PROMPT_OF_ROW.index(prompt) for i, prompt in enumerate(PROMPT_OF_ROW)]
        mini_batches = [[i for i, sibling in enumerate(siblings) if sibling % 2 == k] for k in (0, 1)]
        for members in 2 * mini_batches:
            tokens = sum(int(sampled[i].sum()) for i in members)
            loss = torch.zeros(()).double()
            for i in members if algo.advantage == "gae" else ():
                new = values(critic, *rows[i])
                clipped_values = torch.clamp(new, old_values[i] - CLIP, old_values[i] + CLIP)
                errors = torch.stack(((new - returns[i]) ** 2, (clipped_values - returns[i]) ** 2))
                parts["value_clipped"].append(errors[1] > errors[0])
                loss = loss + errors.max(dim=0).values.sum() / 2 / tokens
            if algo.advantage == "gae":
                parts["value_loss"].append(loss)
                parts["critic_grad_norm"].append(descend(critic, critic_adam, loss, CRITIC_OPTIM))
            loss = torch.zeros(()).double()
            for i in members:
                mask = accepted[i]
                table = distribution(actor, *rows[i])[mask]
                current = table.gather(-1, responses[i][sampled[i]][mask][:, None])[:, 0]
                ratio = current - old[i][mask]
                ratio = (ratio.mean().expand(len(ratio)) if algo.ratio == "sequence" else ratio).exp()
                clipped = ratio.clamp(1 - algo.eps_low, 1 + algo.eps_high)
                advantage = advantages[i][mask]
                weight = gaps[i][mask].exp().clamp(max=algo.is_cap)
                terms = -weight * torch.minimum(ratio * advantage, clipped * advantage)
                if algo.kl_in == "loss":
                    k2 = (current - base[i][mask]) ** 2 / 2
                    terms = terms + algo.kl_coef * k2
                    parts["reference_kl"].append(k2)
                entropy = -(table.exp() * table).sum(-1)
                parts["entropy"].append(entropy)
                if not parts["loss"]:
                    parts["logprob_gap_mean"].append((current - engine[i][mask]).abs())
                terms = terms - algo.entropy_coef * entropy
                loss = loss + terms.sum() / (tokens if algo.aggregation == "token_mean" else len(members) * len(old[i]))
            parts["loss"].append(loss)
            parts["grad_norm"].append(descend(actor, adam, loss, OPTIM))
        values_of = {name: torch.cat([torch.as_tensor(x).double().flatten() for x in xs]) for name, xs in parts.items()}
        places = [row.nonzero().flatten()[mask] for row, mask in zip(sampled, accepted, strict=True)]
        names = [f"{prompt}/{sibling}" for prompt, sibling in zip(PROMPT_OF_ROW, siblings, strict=True)]
        trained = {name: tuple(x.tolist()) for name, x in zip(names, places, strict=True)}
        metrics.append(({name: x.mean().item() for name, x in values_of.items()}, trained))
    return str(directory), metrics, dict(actor.state_dict()), dict(critic.state_dict())


@pytest.fixture(scope="module")
def loops(tmp_path_factory):
    """Run `loop` once per case, because it takes seconds."""
    return cache(lambda case: loop(tmp_path_factory.mktemp("model"), case))


@pytest.mark.parametrize(("size", "parallel", "options", "case"), RUNS)
def test_steps_equal_a_plain_loop(worlds, loops, size, parallel, options, case):
    """Positions of trained tokens, metrics and weights are equal."""
    directory, metrics, actor, critic = loops(case)
    algo, environment = CASES[case][2:]
    assert all(0 < step["masked_share"] < 1 and step.get("value_clipped", 1) > 0 for step, _ in metrics)
    # With values of zero the residuals are the returns, and no variance is explained.
    assert metrics[0][0].get("explained_variance", 0.0) == 0.0
    results = worlds(size).run("ppo_jobs:ppo", directory, parallel, options, algo, environment)
    for steps, actor_weights, critic_weights in results:
        for own_metrics, (expected, places) in zip(steps, metrics, strict=True):
            assert own_metrics["trained"].items() <= places.items()
            assert (own_metrics["updates"], own_metrics["trained_tokens"]) == (4, 2 * sum(map(len, places.values())))
            assert {name: own_metrics[name] for name in expected} == pytest.approx(expected, rel=1e-4, abs=1e-6)
        for name, tensor in actor_weights.items():
            assert (tensor - actor[name]).norm() <= 1e-5 * actor[name].norm(), name
        for name, tensor in critic_weights.items():
            assert (tensor - critic[name]).norm() <= 1e-5 * critic[name].norm(), name
        if algo.advantage == "gae":
            assert critic.keys() - critic_weights.keys() <= {"value_head"}  # which only the last stage returns
