"""Log-probabilities through the LM head against a float64 softmax, in value and gradient."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from megatron_brorl.ops.reference import linear


@pytest.fixture(scope="module")
def group(processes):
    return processes.groups.tp


def reference(hidden, weight, targets, temperature):
    log_probs = (hidden @ weight.T / temperature).log_softmax(-1)
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    return log_probs.gather(-1, targets[:, None]).squeeze(-1), entropy


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("rows", "hidden", "vocabulary", "scale"), [(7, 5, 11, 1), (130, 16, 33, 3), (1, 3, 2, 1e3)])
def test_value_and_gradient(group, monkeypatch, dtype, rows, hidden, vocabulary, scale):
    monkeypatch.setattr(linear, "CHUNK_BYTES", 4 * vocabulary * 50)  # 50 rows of float32 logits per chunk
    g = torch.Generator().manual_seed(rows)
    h = scale * torch.randn(rows, hidden, dtype=torch.float64, generator=g)
    w = torch.randn(vocabulary, hidden, dtype=torch.float64, generator=g)
    targets = torch.randint(0, vocabulary, (rows,), generator=g)
    upstream = torch.randn(rows, dtype=torch.float64, generator=g)
    expected_inputs = [x.clone().requires_grad_() for x in (h, w)]
    expected, expected_entropy = reference(*expected_inputs, targets, temperature=0.7)
    (expected @ upstream + expected_entropy @ upstream.cos()).backward()
    inputs = [x.to(dtype).requires_grad_() for x in (h, w)]
    log_probs, entropy = linear.linear_log_probs(*inputs, targets, temperature=0.7, group=group, vocab=vocabulary)
    (log_probs @ upstream.to(dtype) + entropy @ upstream.cos().to(dtype)).backward()
    tolerance = 1e-10 if dtype == torch.float64 else 1e-5
    assert log_probs.dtype == dtype
    gradients = [(x.grad, y.grad) for x, y in zip(inputs, expected_inputs, strict=True)]
    for a, b in [(log_probs, expected), (entropy, expected_entropy), *gradients]:
        assert (a.double() - b).norm() <= tolerance * max(b.norm(), 1.0)


def test_padding_has_no_probability_and_no_gradient(group):
    g = torch.Generator().manual_seed(0)
    h = torch.randn(6, 4, generator=g)
    w = torch.randn(10, 4, generator=g)
    w[8:] = 1e3  # would dominate every softmax
    padded = w.clone().requires_grad_()
    targets = torch.arange(6)
    log_probs, _ = linear.linear_log_probs(h, padded, targets, temperature=1.0, group=group, vocab=8)
    expected, _ = reference(h, w[:8], targets, temperature=1.0)
    torch.testing.assert_close(log_probs, expected)
    log_probs.sum().backward()
    assert torch.count_nonzero(padded.grad[8:]) == 0


def test_no_rows(group):
    h = torch.zeros(0, 3, requires_grad=True)
    w = torch.zeros(7, 3, requires_grad=True)
    no_ids = torch.zeros(0, dtype=torch.int64)
    log_probs, entropy = linear.linear_log_probs(h, w, no_ids, temperature=1.0, group=group, vocab=7)
    assert log_probs.shape == entropy.shape == (0,)
    log_probs.sum().backward()
    assert torch.count_nonzero(w.grad) == 0
    assert dist.is_initialized()


def test_rows_without_a_gradient_may_be_nan(group):
    """NaN and infinities in hidden states without a gradient do not change the gradients of the other rows."""
    g = torch.Generator().manual_seed(2)
    h, w = torch.randn(9, 4, generator=g), torch.randn(7, 4, generator=g)
    h[2] = float("nan")
    h[5, 1] = float("inf")
    finite = torch.tensor([i not in (2, 5) for i in range(9)])
    targets = torch.randint(0, 7, (9,), generator=g)
    expected_inputs = [h[finite].clone().requires_grad_(), w.clone().requires_grad_()]
    expected, expected_entropy = reference(*expected_inputs, targets[finite], temperature=0.7)
    (expected.sum() + expected_entropy.square().sum()).backward()
    inputs = [h.requires_grad_(), w.requires_grad_()]
    log_probs, entropy = linear.linear_log_probs(*inputs, targets, temperature=0.7, group=group, vocab=7)
    (log_probs[finite].sum() + entropy[finite].square().sum()).backward()
    torch.testing.assert_close(h.grad[finite], expected_inputs[0].grad)
    assert torch.count_nonzero(h.grad[~finite]) == 0
    torch.testing.assert_close(w.grad, expected_inputs[1].grad)
