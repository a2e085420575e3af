"""The policy gradient of the whole actor against central finite differences, in float64."""

import pytest
import tiny
import torch

from megatron_brorl.algo.policy_loss import PolicyLossSettings, PolicyTokens
from megatron_brorl.checkpoints import hugging_face
from megatron_brorl.families.shape import read_shape
from megatron_brorl.models.gpt import build_actor
from megatron_brorl.ops.backend import backend
from megatron_brorl.parallel import cpu_bridge
from megatron_brorl.parallel.packing import pack


@pytest.mark.parametrize("share", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("family", "tied", "ops"), [(f, f != "qwen3", ("reference" if f == "qwen3" else "fused")) for f in tiny.FAMILIES]
)
def test_policy_gradient_equals_finite_differences(processes, tmp_path, family, tied, ops, share):
    tiny.make_model(tmp_path, family, tied)
    shape = read_shape(tmp_path)
    actor = build_actor(shape, processes, torch.float64, backend(ops, cpu_bridge.default_device()))
    hugging_face.load(actor, shape, tmp_path)
    rng = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, tiny.VOCAB, (n,), generator=rng) for n in (4, 7)]
    prompts.insert(0, prompts[0])  # Two rows have the same prompt.
    responses = [torch.randint(3, tiny.VOCAB, (n,), generator=rng) for n in (5, 2, 6)]
    (batch,) = pack(prompts, responses, max_tokens=1000, share=share)
    assert any(group.prefix for group in batch.groups) == share
    advantages = torch.randn(3, dtype=torch.float64, generator=rng)

    def head():
        with cpu_bridge.bridge():
            return actor.head(actor.forward_packed(batch), batch, temperature=0.8)

    with torch.no_grad():
        current, _ = head().log_probs()
    # Ratios on both sides of the clip range, none near its edges, where the loss has a kink.
    old = current + torch.tensor([-0.5, -0.05, 0.1, 0.6], dtype=torch.float64)[torch.arange(len(current)) % 4]

    def loss():
        weights = torch.full_like(old, 1 / (5 + 2 + 6))  # the mean over all response tokens
        tokens = PolicyTokens(old - 0.1, batch.repeat(advantages), weights, old_log_probs=old)
        return head().policy_loss(tokens, PolicyLossSettings(is_cap=2.0, entropy_coef=0.1)).loss

    loss().backward()
    parameters = list(actor.parameters())
    assert len(parameters) > 20

    # Along g / |g|^2 of one parameter the slope of the loss is 1. Along all of them it is the number of parameters.
    def loss_after(step):
        with torch.no_grad():
            for parameter in parameters:
                parameter.add_(step * parameter.grad / parameter.grad.square().sum())
        return loss().item()

    h = 1e-7
    slope = (loss_after(h) - loss_after(-2 * h)) / (2 * h)  # The second step leads from +h to -h.
    assert slope == pytest.approx(len(parameters), rel=1e-7)
