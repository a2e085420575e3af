"""The fused loss on a GPU: the cases and the float64 reference of tests/ops."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from kernel_device import DEVICE, EMULATED, MARKS
from ops.linear_cases import EVERYTHING, SETTINGS, SHAPES, TOLERANCE, VARIANTS, assert_agree, make
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_brorl.ops.fused import linear as fused
from megatron_brorl.ops.reference import linear as reference

pytestmark = MARKS
# More rows than a chunk of logits. The emulation has smaller chunks, because it takes a second for 100 rows.
HERE = [x for x in SHAPES if x[0] <= 130] if EMULATED else [*SHAPES, (5000, 64, 9001)]
HERE += [(3, 5, vocab) for vocab in (4095, 4096, 4097, 4098)]  # around the logits that a block reads at a time
SOME, MORE = (70, 130) if EMULATED else (240, 700)


@pytest.mark.parametrize("settings", [SETTINGS, EVERYTHING])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("rows", "width", "vocab"), HERE)
def test_agrees_with_float64(rows, width, vocab, dtype, settings):
    case = make(rows, width, vocab, torch.bfloat16 if dtype == torch.bfloat16 else torch.float32)
    got = case.call(fused.linear_ppo_loss, dtype, settings, device=DEVICE)
    assert_agree(got, case.call(reference.linear_ppo_loss, settings=settings), TOLERANCE[dtype])


@pytest.mark.parametrize("settings", VARIANTS)
def test_every_term_agrees(settings):
    case = make(SOME, 20, 333)
    got = case.call(fused.linear_ppo_loss, torch.float32, settings, device=DEVICE)
    assert_agree(got, case.call(reference.linear_ppo_loss, settings=settings), 1e-5)


def test_results_are_reproducible_bit_for_bit():
    runs = [make(MORE, 31, 999).call(fused.linear_ppo_loss, torch.float32, EVERYTHING, device=DEVICE) for _ in range(3)]
    for result, *grads in runs[1:]:
        assert result.sums == runs[0][0].sums
        assert all(torch.equal(a, b) for a, b in zip(grads, runs[0][1:], strict=True))


@pytest.mark.parametrize("settings", [SETTINGS, EVERYTHING, VARIANTS[-1]], ids=["clip", "entropy", "sequence"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dead", [range(100), range(0, 130, 2), range(130)], ids=["first", "every other", "all"])
def test_masked_tokens_and_tokens_without_advantage(dead, dtype, settings):
    """They are sorted to the end. Masked tokens change nothing, even if they are NaN."""
    case = make(130, 24, 301, dtype)
    weights, advantages = case.tokens.weights.clone(), case.tokens.advantages.clone()
    weights[list(dead)[::2]] = 0
    advantages[list(dead)[1::2]] = 0
    case = case.change(weights=weights, advantages=advantages)
    expected = case.call(reference.linear_ppo_loss, settings=settings)
    live = weights != 0
    hidden = torch.where(live[:, None], case.hidden, torch.nan)
    got = dataclasses.replace(case, hidden=hidden).call(fused.linear_ppo_loss, dtype, settings, device=DEVICE)

    def unmasked(result, *grads):
        columns = {name: torch.where(live, getattr(result, name).cpu(), 0) for name in ("log_probs", "entropy")}
        return dataclasses.replace(result, **columns), *grads

    assert_agree(unmasked(*got), unmasked(*expected), TOLERANCE[dtype])


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
        case = make(130, 8, 20)
        with _Waits() as waits:
            case.call(fused.linear_ppo_loss, torch.float32, settings, device=DEVICE)
        counts.append(waits.count)
    assert counts[0] == counts[1] > 0
