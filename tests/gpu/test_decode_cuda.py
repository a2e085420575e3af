"""The decoding step's attention on a GPU, on the cases of the CPU op."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from decode_cases import CASES, EPS, TOLERANCE, Case, check, make
from kernel_device import DEVICE, MARKS

from megatron_brorl.ops.decode import HeadNorms
from megatron_brorl.ops.fused.decode import KernelDecode

pytestmark = MARKS


def moved(case: Case) -> Case:
    """The case with its tensors on the device."""
    there = lambda x: x.to(DEVICE)  # noqa: E731
    rows = dataclasses.replace(case.rows, **{k: there(v) for k, v in vars(case.rows).items()})
    norms = case.norms and HeadNorms(there(case.norms.q), there(case.norms.k), case.norms.eps)
    tensors = {name: there(getattr(case, name)) for name in ("qkv", "keys", "values")}
    return dataclasses.replace(case, rows=rows, norms=norms, **tensors)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("with_norms", [False, True])
@pytest.mark.parametrize("number", range(len(CASES)))
def test_agrees_with_float64(number, with_norms, dtype):
    case = moved(make(number, dtype, with_norms))
    check(case, case.run(KernelDecode()))


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_repeats_bit_for_bit_whoever_is_beside_it(dtype):
    """Again, and each row alone: what a row attends to is cut in the same way wherever it stands."""
    case = moved(make(2, dtype))
    whole = case.run(KernelDecode())
    assert torch.equal(case.run(KernelDecode()), whole)
    of_row = ("cos", "sin", "tables", "lengths", "prompts")
    for b in range(len(case.qkv)):
        rows = dataclasses.replace(case.rows, **{k: getattr(case.rows, k)[b : b + 1] for k in of_row})
        alone = dataclasses.replace(case, qkv=case.qkv[b : b + 1], rows=rows)
        assert torch.equal(alone.run(KernelDecode())[0], whole[b])


def test_opcheck():
    case = moved(make(4, torch.float32, with_norms=True))
    case.keys.nan_to_num_(), case.values.nan_to_num_()  # opcheck compares what is left in memory
    r, n = case.rows, case.norms
    out = torch.zeros(len(case.qkv), case.heads * case.dim, device=DEVICE)
    places = (r.tables, r.lengths, r.prompt_tables, r.prompt_lengths, r.prompts)
    args = (case.qkv, n.q, n.k, EPS, r.cos, r.sin, case.keys, case.values, *places, 0.3, out)
    torch.library.opcheck(torch.ops.brorl.decode_attention_.default, args)


def test_mistakes_are_told():
    case = moved(make(0, torch.float32))
    case.rows = dataclasses.replace(case.rows, prompts=case.rows.prompts[:4])
    with pytest.raises(ValueError, match=r"prompts must be \[5\], got \[4\]"):
        case.run(KernelDecode())
