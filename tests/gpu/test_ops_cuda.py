"""The CUDA kernels of the ops on the cases and references of tests/ops, on a GPU or on the emulated device."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from kernel_device import DEVICE, EMULATED, MARKS
from ops import value_cases
from ops.advantage_cases import GAE_CASES, MOMENT_CASES, check_gae, check_moments, sample
from ops.advantage_cases import TOLERANCE as ADVANTAGE_TOLERANCE
from ops.linear_cases import EVERYTHING, SETTINGS, SHAPES, TOLERANCE, VARIANTS, assert_agree, make
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_brorl.algo import advantages as algo
from megatron_brorl.algo.advantages import Moments
from megatron_brorl.ops import philox
from megatron_brorl.ops.fused import backend
from megatron_brorl.ops.fused import linear as fused
from megatron_brorl.ops.reference import linear as reference

pytestmark = MARKS


def test_uniforms_equal_the_reference_bit_for_bit():
    g = torch.Generator().manual_seed(0)
    keys = torch.randint(0, 2**63 - 1, (300,), generator=g)
    index, position = torch.randint(0, 2**32, (2, 300), generator=g)
    result = torch.ops.brorl.uniforms(*(x.to(DEVICE) for x in (keys, index, position)))
    assert torch.equal(result.cpu(), philox.uniforms(keys, index, position))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.float64, 1e-12)])
@pytest.mark.parametrize("name", value_cases.CASES)
def test_value_loss(name, dtype, tolerance):
    case = value_cases.CASES[name]
    result = case.call(backend.value_loss, dtype, DEVICE, upstream=-2.5)
    value_cases.assert_agree(result, case, upstream=-2.5, tolerance=tolerance)


@pytest.mark.parametrize("dtype", ADVANTAGE_TOLERANCE)
@pytest.mark.parametrize("name", GAE_CASES)
def test_gae(name, dtype):
    check_gae(backend.gae, name, dtype, DEVICE)


@pytest.mark.parametrize("name", MOMENT_CASES)
def test_moments(name):
    check_moments(backend.moments, name, DEVICE)


@pytest.mark.parametrize("weights", ["half", "one block", "none"])
def test_moments_of_weighted_elements(weights):
    index = torch.arange(30_000)
    counted = {"half": index % 2 == 0, "one block": index // 4096 == 3, "none": index < 0}[weights]
    check_moments(backend.moments, "far from zero", DEVICE, counted)


def test_moments_are_reproducible_bit_for_bit():
    values = sample(100_000, mean=3.0).float().to(DEVICE)
    assert len({backend.moments(values) for _ in range(3)}) == 1


@pytest.mark.parametrize("dtype", ADVANTAGE_TOLERANCE)
@pytest.mark.parametrize("n", [0, 5, 21_000])
def test_whiten(dtype, n):
    values = (1e3 + 2 * sample(n)).to(dtype)
    batch = Moments(count=10.0, mean=1e3, m2=40.0)
    whitened = backend.whiten(values.to(DEVICE), batch)
    torch.testing.assert_close(whitened.cpu(), algo.whiten(values, batch), rtol=ADVANTAGE_TOLERANCE[dtype], atol=0)


# The last shape has more rows than a chunk of logits. The emulation has smaller shapes: 100 rows take a second there.
DEVICE_SHAPES = [shape for shape in SHAPES if shape[0] <= 130] if EMULATED else [*SHAPES, (5000, 64, 9001)]
DEVICE_SHAPES += [(3, 5, vocab) for vocab in (4095, 4096, 4097, 4098)]  # around the logits that a block reads at a time
FEW_ROWS, MANY_ROWS = (70, 130) if EMULATED else (240, 700)


@pytest.mark.parametrize("settings", [SETTINGS, EVERYTHING])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("rows", "width", "vocab"), DEVICE_SHAPES)
def test_policy_loss_agrees_with_float64(rows, width, vocab, dtype, settings):
    case = make(rows, width, vocab, torch.bfloat16 if dtype == torch.bfloat16 else torch.float32)
    result = case.call(fused.linear_ppo_loss, dtype, settings, device=DEVICE)
    assert_agree(result, case.call(reference.linear_ppo_loss, settings=settings), TOLERANCE[dtype])


@pytest.mark.parametrize("settings", VARIANTS)
def test_every_term_of_the_policy_loss(settings):
    case = make(FEW_ROWS, width=20, vocab=333)
    result = case.call(fused.linear_ppo_loss, torch.float32, settings, device=DEVICE)
    assert_agree(result, case.call(reference.linear_ppo_loss, settings=settings), 1e-5)


def test_results_are_reproducible_bit_for_bit():
    case = make(MANY_ROWS, width=31, vocab=999)
    runs = [case.call(fused.linear_ppo_loss, torch.float32, EVERYTHING, device=DEVICE) for _ in range(3)]
    for result, *grads in runs[1:]:
        assert result.sums == runs[0][0].sums
        assert all(torch.equal(a, b) for a, b in zip(grads, runs[0][1:], strict=True))


@pytest.mark.parametrize("settings", [SETTINGS, EVERYTHING, VARIANTS[-1]], ids=["clip", "entropy", "sequence"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dead", [range(100), range(0, 130, 2), range(130)], ids=["first", "every other", "all"])
def test_masked_tokens_and_tokens_without_advantage(dead, dtype, settings):
    """Masked tokens change nothing, even if they are NaN. The op sorts them and those without advantage to the end."""
    case = make(rows=130, width=24, vocab=301, dtype=dtype)
    weights = case.tokens.weights.clone()
    advantages = case.tokens.advantages.clone()
    weights[list(dead)[::2]] = 0  # half of them are masked
    advantages[list(dead)[1::2]] = 0
    case = case.change(weights=weights, advantages=advantages)
    expected = case.call(reference.linear_ppo_loss, settings=settings)
    live = weights != 0
    hidden = torch.where(live[:, None], case.hidden, torch.nan)
    returned = dataclasses.replace(case, hidden=hidden).call(fused.linear_ppo_loss, dtype, settings, device=DEVICE)

    def unmasked(result, *grads):
        columns = {name: torch.where(live, getattr(result, name).cpu(), 0) for name in ("log_probs", "entropy")}
        return dataclasses.replace(result, **columns), *grads

    assert_agree(unmasked(*returned), unmasked(*expected), TOLERANCE[dtype])


class _Waits(TorchDispatchMode):
    """Counts the ops that wait for the device."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        to_cpu = name == "_to_copy" and str((kwargs or {}).get("device")) == "cpu"
        self.count += name in ("_local_scalar_dense", "nonzero", "is_nonzero", "equal") or to_cpu
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("settings", [SETTINGS, VARIANTS[-1]], ids=["token", "sequence"])
def test_chunks_do_not_wait_for_the_device(settings, monkeypatch):
    counts = []
    for chunk_rows in (40, 130):
        monkeypatch.setitem(fused.CHUNK_ROWS, DEVICE, chunk_rows)
        monkeypatch.setattr(fused, "FEWEST_ROWS", 1)
        case = make(rows=130, width=8, vocab=20)
        with _Waits() as waits:
            case.call(fused.linear_ppo_loss, torch.float32, settings, device=DEVICE)
        counts.append(waits.count)
    assert counts[0] == counts[1]
    assert counts[0] > 0
