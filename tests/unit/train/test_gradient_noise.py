"""The noise of a step's gradient against gradients of transformers, prompt by prompt, in float64."""

from __future__ import annotations

from itertools import combinations

import fakes
import numpy as np
import pytest
import torch
from dist.steps import configured, make_trainer

from megatron_brorl.ops.philox import stream_key

N, TOKENS, PROMPTS, TEMPERATURE = 9, 12, 4, 0.8
CHANGES = {
    "rollout": {"n": N, "prompts": PROMPTS, "temperature": TEMPERATURE},
    "theory": {"prompts": 3, "positions": 0, "noise_every": 1},
    "train": {"tokens_per_micro_batch": 60},  # several micro-batches add up
}
LOST = {("p/1", 2)}
NAMES = ("own_effect", "other_effect", "between", "within")


def step(processes, model, changes=CHANGES, **faults):
    trainer = make_trainer(model[0], processes, configured(changes), fakes.Engine(lose=LOST, **faults))
    trainer.refit()
    return trainer.train_step()


def siblings(prompt):
    """Responses with their stop token and verdicts, without lost ones."""
    rows = fakes.draws(stream_key(3, 0, prompt.id), range(N), TOKENS)
    found = []
    for i, row in enumerate(rows):
        stopped = fakes.STOP in row
        response = row[: row.index(fakes.STOP) + 1] if stopped else row
        if (prompt.id, i) not in LOST:
            found.append((response, float(stopped and sum(response[:-1]) % 2 == 0)))
    return found


def gradient(model, prompt, rows):
    """REINFORCE with leave-one-out baselines, over all weights [W] in float64."""
    rights = np.array([right for _, right in rows])
    model.zero_grad()
    for i, (response, right) in enumerate(rows):
        logits = model(torch.tensor([[*prompt.token_ids, *response]])).logits[0, len(prompt.token_ids) - 1 : -1]
        log_probs = (logits / TEMPERATURE).log_softmax(-1)[range(len(response)), response]
        advantage = right - np.delete(rights, i).mean()
        (log_probs.sum() * advantage / len(rows)).backward()
    return torch.cat([p.grad.reshape(-1).clone() for p in model.parameters()]).numpy()


def halves(model, prompt):
    rows = siblings(prompt)
    return gradient(model, prompt, rows[::2]), gradient(model, prompt, rows[1::2])


@pytest.fixture(scope="module")
def exact(model):
    """Own effect, effect on others and noise within, over every choice of prompts, from gradients one by one."""
    wide = model[1].double()
    prompts = [p for p in fakes.prompts(PROMPTS) if len({right for _, right in siblings(p)}) > 1]
    found = [(halves(wide, p), [len(siblings(p)[half::2]) for half in (0, 1)]) for p in prompts]
    model[1].float()
    return found


def figures(chosen, kept):
    """Of chosen prompts out of `kept`, among all that were drawn."""
    share = kept / PROMPTS
    pairs = share * (kept - 1) / (PROMPTS - 1)
    own = share * np.mean([a @ b for (a, b), _ in chosen])
    both = [(a + b) / 2 for (a, b), _ in chosen]
    other = pairs * np.mean([x @ y for x, y in combinations(both, 2)])
    within = share * np.mean([((a - b) ** 2).sum() / sum(1 / (k - 1) for k in sizes) for (a, b), sizes in chosen])
    return own, other, own - other, within


def test_figures_are_those_of_gradients_one_by_one(processes, model, exact):
    """All prompts that have a signal."""
    got, seconds = step(processes, model, CHANGES | {"theory": {**CHANGES["theory"], "prompts": PROMPTS}})
    assert got["theory_estimate/noise_prompts"] == len(exact) >= 3
    wanted = figures(exact, len(exact))
    for name, value in zip(NAMES, wanted, strict=True):
        assert got[f"theory_estimate/{name}"] == pytest.approx(value, rel=1e-4, abs=1e-5 * wanted[0]), name
    assert abs(wanted[1]) > 1e-3 * wanted[0]
    assert seconds["noise"] > 0


def test_some_prompts_chosen_at_random(processes, model, exact):
    """Two of them: one of the pairs."""
    got, _ = step(processes, model, CHANGES | {"theory": {**CHANGES["theory"], "prompts": 2}})
    found = [got[f"theory_estimate/{name}"] for name in NAMES]
    choices = [figures(pair, len(exact)) for pair in combinations(exact, 2)]
    assert sum(np.allclose(found, choice, rtol=1e-4, atol=1e-5 * choice[0]) for choice in choices) == 1


def test_training_does_not_notice(processes, model):
    """The same figures, bit for bit, of the step beside it and of the next one."""
    steps = []
    for every in (0, 1):
        changes = CHANGES | {"theory": {**CHANGES["theory"], "noise_every": every}}
        trainer = make_trainer(model[0], processes, configured(changes), fakes.Engine())
        trainer.refit()
        steps.append([trainer.train_step()[0] for _ in range(2)])
    plain, measured = steps
    for a, b in zip(plain, measured, strict=True):
        assert {k for k in b if k not in a} == {f"theory_estimate/{k}" for k in (*NAMES, "noise_prompts")}
        for key in a:
            assert "seconds" in key or repr(b[key]) == repr(a[key]), key  # nan is nan
