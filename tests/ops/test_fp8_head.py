"""Log-probabilities and the policy loss with logits in FP8 against float64: values, gradients, padding, refusals."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from ops.e4m3 import through
from ops.linear_cases import EVERYTHING, SETTINGS, TEMPERATURE, TOLERANCE, Case, assert_agree, close, make
from torch.nn import functional

from megatron_brorl.algo.loss import PolicyLoss, policy_loss
from megatron_brorl.errors import UserError
from megatron_brorl.ops.backend import backend
from megatron_brorl.ops.fused import head_product
from megatron_brorl.ops.fused import linear as fused
from megatron_brorl.ops.reference import linear as reference

CPU = torch.device("cpu")
SHAPES = [(1, 5, 2), (33, 130, 129), (64, 256, 512), (517, 24, 1031)]
OPS = [fused, reference]


def logits_of(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """[R, V] in float64, of rounded matrices."""
    return through(hidden.double(), 1) @ through(weight.double(), 128).T


def by_hand(case: Case, settings, upstream: float = 1.0) -> tuple[PolicyLoss, torch.Tensor, torch.Tensor]:
    """The loss and its gradients in float64, with the rounding taken for the identity: dL W and dL^T h."""
    logits = logits_of(case.hidden, case.weight).requires_grad_()
    table = (logits / TEMPERATURE).log_softmax(-1)
    entropy = -(table.exp() * table).sum(-1)
    result = policy_loss(table.gather(-1, case.ids[:, None]).squeeze(-1), entropy, case.tokens, settings)
    (slope,) = torch.autograd.grad(upstream * result.loss, logits)
    return result, slope @ case.weight, slope.T @ case.hidden


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "width", "vocab"), SHAPES)
def test_agrees_with_float64(rows, width, vocab, dtype, op):
    case = make(rows, width, vocab, dtype, scale=2.0)
    got = case.call(op.linear_ppo_loss, dtype, EVERYTHING, upstream=-2.5, fp8=True)
    expected = by_hand(case, EVERYTHING, -2.5)
    assert_agree(got, expected, TOLERANCE[dtype])
    # Rounded values and their products are exact, so that bf16 log-probabilities are as good as fp32 ones ...
    assert close(got[0].log_probs, expected[0].log_probs, 1e-5)
    # ... and not those of the matrices themselves.
    plain = case.call(reference.linear_ppo_loss, settings=EVERYTHING)[0]
    assert width * vocab < 100 or not close(got[0].log_probs, plain.log_probs, 1e-4)


@pytest.mark.parametrize("op", OPS)
def test_a_loss_of_sequences_agrees(op):
    settings = dataclasses.replace(SETTINGS, ratio="sequence", entropy_coef=0.1)
    case = make(130, 61, 700)
    assert_agree(case.call(op.linear_ppo_loss, torch.float32, settings, fp8=True), by_hand(case, settings), 1e-5)


@pytest.mark.parametrize("op", OPS)
def test_blocks_of_zeros_and_values_beyond_the_format(op):
    case = make(40, 256, 300)
    case.hidden[:, :128] = 0
    case.weight[:128, 128:] = 0
    case.hidden[3, 200], case.weight[200, 130] = 3000.0, -500.0  # beyond 448, and the log-prob not beyond float32
    case = dataclasses.replace(case, tokens=dataclasses.replace(case.tokens, old_log_probs=None))
    got, expected = case.call(op.linear_ppo_loss, torch.float32, fp8=True), by_hand(case, SETTINGS)
    assert float(logits_of(case.hidden, case.weight).abs().max()) > 448
    assert close(got[0].log_probs, expected[0].log_probs, 1e-5)
    assert all(close(a, b, 1e-4) for a, b in zip(got[1:], expected[1:], strict=True))


@pytest.mark.parametrize("op", OPS)
def test_padding_takes_no_part_in_a_scale(op):
    case = make(50, 140, 200)
    padded = dataclasses.replace(case, weight=torch.cat((case.weight, torch.full((60, 140), 1e3).double())))
    got = padded.call(op.linear_ppo_loss, torch.float32, EVERYTHING, vocab=200, fp8=True)
    assert torch.count_nonzero(got[2][200:]) == 0
    assert_agree((*got[:2], got[2][:200]), by_hand(case, EVERYTHING), 1e-5)


def test_an_unmoved_policy_has_ratio_one_however_rows_are_cut(monkeypatch):
    case = make(300, 140, 300)
    log_probs, _ = fused.linear_log_probs(case.hidden.float(), case.weight.float(), case.ids, TEMPERATURE, fp8=True)
    monkeypatch.setitem(fused.CHUNK_ROWS, "cpu", 70)
    result, *_ = case.change(old_log_probs=log_probs.double()).call(fused.linear_ppo_loss, torch.float32, fp8=True)
    assert close(result.log_probs, log_probs, 1e-6)
    assert result.maxima["ratio_max"] == pytest.approx(1, abs=1e-5)
    monkeypatch.undo()
    result, *_ = case.change(old_log_probs=log_probs.double()).call(fused.linear_ppo_loss, torch.float32, fp8=True)
    assert torch.equal(result.log_probs, log_probs)
    assert result.maxima["ratio_max"] == 1


@pytest.mark.parametrize("name", ["fused", "reference"])
def test_the_key_reaches_all_three(name, monkeypatch):
    monkeypatch.setattr(head_product, "ROWS_ROUNDED", 256)  # several parts
    case = make(20, 130, 600)
    hidden, weight, ids = case.hidden.bfloat16(), case.weight.bfloat16(), case.ids
    ops, plain = backend(name, CPU, "blockwise"), backend(name, CPU)
    expected = logits_of(hidden, weight)
    assert close(ops.linear_logits(hidden, weight), expected, 1e-6)
    assert close(plain.linear_logits(hidden, weight), hidden.double() @ weight.double().T, 1e-6)
    wanted = (expected / TEMPERATURE).log_softmax(-1).gather(-1, ids[:, None]).squeeze(-1)
    assert close(ops.linear_log_probs(hidden, weight, ids, TEMPERATURE)[0], wanted, 1e-5)
    loss = ops.linear_ppo_loss(hidden, weight, ids, case.tokens_in(torch.bfloat16), SETTINGS, TEMPERATURE)
    assert close(loss.log_probs, wanted, 1e-5)


def multiplied(a, b, scale_a, recipe_a, scale_b, recipe_b, output_dtype):
    """What functional.scaled_mm does on a GPU, in float64, with the checks of torch's ScaledBlas.cpp."""
    (m, k), n = a.shape, b.shape[1]
    assert a.dtype == b.dtype == torch.float8_e4m3fn
    assert a.is_contiguous()
    assert b.t().is_contiguous()
    assert k % 16 == n % 16 == 0
    assert (recipe_a.name, recipe_b.name) == ("BlockWise1x128", "BlockWise128x128")
    padded = -(-k // 128 // 4) * 4
    for scale, shape in ((scale_a, (m, k // 128)), (scale_b, (padded, n // 128))):
        assert scale.shape == shape
        assert scale.stride(0) == 1
        assert scale.stride(1) in (1, shape[0])
    left = a.double() * scale_a.double().repeat_interleave(128, 1)
    of_b = scale_b[: k // 128].double().repeat_interleave(128, 0).repeat_interleave(128, 1)
    return (left @ (b.double() * of_b)).to(output_dtype)


@pytest.mark.skipif(not hasattr(functional, "ScalingType"), reason="this torch has no product with scales per block")
@pytest.mark.parametrize(("rows", "width", "vocab"), [(5, 130, 129), (33, 700, 300), (16, 128, 256)])
def test_what_a_gpu_is_handed(monkeypatch, rows, width, vocab):
    monkeypatch.setattr(functional, "scaled_mm", multiplied)
    monkeypatch.setattr(head_product, "ROWS_ROUNDED", 256)
    case = make(rows, width, vocab, torch.bfloat16)
    out = torch.full((rows, vocab), torch.nan)
    head_product._scaled_product(case.weight.bfloat16())(out, case.hidden.bfloat16())
    assert close(out, logits_of(case.hidden, case.weight), 1e-6)


@pytest.mark.parametrize(
    ("capability", "cuda", "has_product", "message"),
    [
        ((9, 0), "12.9", True, ""),
        ((9, 0), "13.0", True, ""),
        ((9, 0), "12.8", True, "needs CUDA 12.9 (torch's here: 12.8)"),
        ((9, 0), "13.0", False, "needs torch 2.10"),
        ((8, 9), "13.0", True, "needs compute capability 9.0 (this GPU: 8.9)"),
        ((10, 0), "13.0", True, "needs compute capability 9.0 (this GPU: 10.0)"),
    ],
)
def test_refusals(monkeypatch, capability, cuda, has_product, message):
    found = head_product.problem(capability, cuda, has_product)
    assert message in found
    assert bool(message) == bool(found)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    if not has_product:
        monkeypatch.delattr(functional, "scaled_mm", raising=False)
    if message:
        with pytest.raises(UserError, match=r'^fp8\.head = "blockwise": block scaling needs .*: set it to "none"$'):
            head_product.check_fp8(torch.device("cuda"))
    elif hasattr(functional, "scaled_mm"):
        head_product.check_fp8(torch.device("cuda"))
    head_product.check_fp8(CPU)
