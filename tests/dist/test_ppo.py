"""Two steps of two epochs, with and without a critic and an environment, against a plain loop in float64."""

from __future__ import annotations

import copy
from collections import defaultdict
from functools import cache

import pytest
import tiny
import torch
from dist.ppo_jobs import ALGO, CLIP, CRITIC_OPTIM, OF_PROMPT, OPTIM, SEQUENCES, STEPS, TEMPERATURE, batch, turns
from dist.world import CP, PP, SEQUENCE, TP

pytestmark = pytest.mark.slow


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


def distribution(actor, prompt, response, own=slice(None)):
    """Return the log-probabilities [tokens, V] of the tokens `own` of the response."""
    logits = actor(torch.cat((prompt, response))[None]).logits[0, len(prompt) - 1 : -1][own]
    return (logits / TEMPERATURE).log_softmax(-1)


def log_probs(actor, prompt, response, own=slice(None)):
    return distribution(actor, prompt, response, own).gather(-1, response[own][:, None])[:, 0]


def values(critic, prompt, response, own=slice(None)):
    hidden = critic.model(torch.cat((prompt, response))[None]).last_hidden_state[0, len(prompt) - 1 : -1][own]
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
        own = turns(responses) if environment else [torch.ones_like(r, dtype=torch.bool) for r in responses]
        engine = [x[s].double() for x, s in zip(engine, own, strict=True)]
        rows = list(zip(prompts, responses, own, strict=True))
        with torch.no_grad():
            old = [log_probs(actor, *row) for row in rows]
            fixed = [log_probs(reference, *row) for row in rows]
            v = [values(critic, *row) * (algo.advantage == "gae") for row in rows]
        raw = []
        for reward, x, o, f in zip(rewards, v, old, fixed, strict=True):
            earned = -algo.kl_coef * (o - f) if algo.kl_in == "reward" else torch.zeros_like(x)
            earned[-1:] += reward
            raw.append(generalised(earned, x, algo))
        returns = [a + x for a, x in zip(raw, v, strict=True)]
        flat = torch.cat(raw)
        mean, std = (flat.mean(), flat.std(correction=0)) if algo.advantage == "gae" else (0.0, 1.0)
        advantages = [(a - mean) / std - algo.distill_coef * (o - f) for a, o, f in zip(raw, old, fixed, strict=True)]
        gaps = [o - s for o, s in zip(old, engine, strict=True)]
        low, high = torch.tensor((0.5, 5.0)).double().log()
        mismatch = [g.mean().expand(len(g)) if algo.mismatch_mask == "sequence" else g for g in gaps]
        live = [(m >= low) & (m <= high) for m in mismatch]
        # The values of each metric, by token or by optimizer step.
        parts = defaultdict(list, masked_share=[~t for t in live])
        if algo.kl_in == "reward":
            parts["reference_kl"] = parts["teacher_kl"] = [o - f for o, f in zip(old, fixed, strict=True)]
        if algo.advantage == "gae":
            parts |= {"value_mean": v, "return_mean": returns}
            parts["explained_variance"] = [1 - flat.var() / torch.cat(returns).var()]
        for members in 2 * [[i for i, g in enumerate(OF_PROMPT) if (i - OF_PROMPT.index(g)) % 2 == k] for k in (0, 1)]:
            tokens = sum(int(own[i].sum()) for i in members)
            loss = torch.zeros(()).double()
            for i in members if algo.advantage == "gae" else ():
                new = values(critic, *rows[i])
                near = torch.clamp(new, v[i] - CLIP, v[i] + CLIP)
                errors = torch.stack(((new - returns[i]) ** 2, (near - returns[i]) ** 2))
                parts["value_clipped"].append(errors[1] > errors[0])
                loss = loss + errors.max(dim=0).values.sum() / 2 / tokens
            if algo.advantage == "gae":
                parts["value_loss"].append(loss)
                parts["critic_grad_norm"].append(descend(critic, critic_adam, loss, CRITIC_OPTIM))
            loss = torch.zeros(()).double()
            for i in members:
                every = distribution(actor, *rows[i])[live[i]]
                current = every.gather(-1, responses[i][own[i]][live[i]][:, None])[:, 0]
                ratio = current - old[i][live[i]]
                ratio = (ratio.mean().expand(len(ratio)) if algo.ratio == "sequence" else ratio).exp()
                clipped = ratio.clamp(1 - algo.eps_low, 1 + algo.eps_high)
                a = advantages[i][live[i]]
                weight = gaps[i][live[i]].exp().clamp(max=algo.is_cap)
                terms = -weight * torch.minimum(ratio * a, clipped * a)
                if algo.kl_in == "loss":
                    kl = (current - fixed[i][live[i]]) ** 2 / 2
                    terms = terms + algo.kl_coef * kl
                    parts["reference_kl"].append(kl)
                entropy = -(every.exp() * every).sum(-1)
                parts["entropy"].append(entropy)
                if not parts["loss"]:
                    parts["logprob_gap_mean"].append((current - engine[i][live[i]]).abs())
                terms = terms - algo.entropy_coef * entropy
                loss = loss + terms.sum() / (tokens if algo.aggregation == "token_mean" else len(members) * len(old[i]))
            parts["loss"].append(loss)
            parts["grad_norm"].append(descend(actor, adam, loss, OPTIM))
        values_of = {name: torch.cat([torch.as_tensor(x).double().flatten() for x in xs]) for name, xs in parts.items()}
        places = [s.nonzero().flatten()[t] for s, t in zip(own, live, strict=True)]
        names = [f"{g}/{i - OF_PROMPT.index(g)}" for i, g in enumerate(OF_PROMPT)]
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
        assert critic.keys() - critic_weights.keys() <= {"value_head"} or algo.advantage != "gae"
