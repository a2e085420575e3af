"""Decode attention by torch's GPU kernels, with these kernels in float64 on a CPU, against float64 row by row."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from attention_kernels import kernels_on_cpu  # noqa: F401
from decode_cases import CASES, TOLERANCE, make

from megatron_brorl.ops.fused.decode import FlashDecode
from megatron_brorl.ops.interface import PAGE

LONG_PAGE = 1100  # tokens of a page


def one_page_each(case):
    """Return keys and values [pages, LONG_PAGE, K, d] of a case, a page for each table, and rows for these pages."""
    rows = case.rows
    tables = [*rows.tables, *rows.prompt_tables]
    lengths = [*rows.lengths - 1, *rows.prompt_lengths]
    shape = (2, len(tables), LONG_PAGE, case.keys.shape[1], case.dim)
    keys, values = torch.full(shape, float("nan"), dtype=case.keys.dtype)
    for i, (table, length) in enumerate(zip(tables, lengths, strict=True)):
        for t in range(int(length)):
            page, slot = int(table[t // PAGE]), t % PAGE
            keys[i, t], values[i, t] = case.keys[page, :, :, slot], case.values[page, :, slot, : case.dim]
    own_tables = torch.arange(len(rows.lengths), dtype=torch.int32).unsqueeze(1)
    used_prompts, row_prompts, counts = rows.prompts.unique_consecutive(return_inverse=True, return_counts=True)
    contiguous_rows = dataclasses.replace(
        rows,
        tables=own_tables,
        prompts=row_prompts,
        prompt_tables=(len(own_tables) + used_prompts).int().unsqueeze(1),
        prompt_lengths=rows.prompt_lengths[used_prompts],
        largest_group=int(counts.max()),
    )
    return keys, values, contiguous_rows


@pytest.mark.usefixtures("kernels_on_cpu")
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("with_norms", [False, True])
@pytest.mark.parametrize("number", range(len(CASES)))
def test_attention_agrees_with_float64(number, with_norms, dtype):
    case = make(number, dtype, with_norms)
    keys, values, rows = one_page_each(case)
    ops = FlashDecode()
    heads, kv_heads = CASES[number][:2]
    batch = ops.prepare(rows, page=LONG_PAGE, queries_per_key=heads // kv_heads)
    out = ops.attend(case.qkv, case.norms, keys, values, batch, case.dim**-0.5)
    assert (out.double() - case.expected).norm() <= TOLERANCE[dtype] * case.expected.norm()
    newest = keys[torch.arange(len(rows.lengths)), rows.lengths - 1].double()
    assert (newest - case.new_keys).norm() <= TOLERANCE[dtype] * case.new_keys.norm()
