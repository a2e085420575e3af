"""Cases of paged attention in one decoding step, computed row by row in float64."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from megatron_brorl.ops.interface import PAGE, DecodeBatch, HeadNorms

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2}  # norm of the error / norm of the exact result
EPS = 1e-5  # of the norms of heads
THETA = 100.0  # base of the rotary angles
# (heads, kv heads, head size, response tokens of each row, prompt index of each row, tokens of each prompt)
CASES: list[tuple[int, int, int, list[int], list[int], list[int]]] = [
    (4, 2, 64, [1, 16, 17, 40, 200], [0, 0, 0, 0, 0], [64]),
    (4, 4, 16, [3, 300, 1], [0, 1, 1], [1, 700]),
    (14, 2, 32, [5, 31, 32, 33], [1, 1, 0, 2], [128, 129, 15]),
    (6, 1, 8, [1, 2], [0, 0], [3]),
    (16, 1, 80, [9] * 11, [0] * 4 + [1] * 7, [16, 17]),
    (2, 2, 256, [130], [0], [130]),
    (6, 1, 16, [600, 512, 513, 1, 7], [0, 0, 0, 1, 1], [1025, 1]),  # several chunks per block of a GPU
]


@dataclasses.dataclass
class Case:
    qkv: Tensor
    norms: HeadNorms | None
    keys: Tensor
    values: Tensor
    rows: DecodeBatch
    dim: int
    expected: Tensor  # [B, heads d] float64
    new_keys: Tensor  # [B, K, d] float64

    def run(self, ops: Any) -> Tensor:
        return ops.attend(self.qkv, self.norms, self.keys, self.values, self.rows, self.dim**-0.5)


def rotate(x: Tensor, position: int) -> Tensor:
    """Rotate each pair (i, i + d/2) of x [heads, d], as a complex number, by the angle position THETA^(-2 i / d)."""
    half = x.shape[-1] // 2
    angle = position * THETA ** (-torch.arange(half).double() / half)
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones(half).double(), angle)
    return torch.cat((turned.real, turned.imag), dim=-1)


def make(number: int, dtype: torch.dtype, with_norms: bool = False) -> Case:
    heads, kv, dim, row_lengths, prompts, prompt_lengths = CASES[number]
    rng = torch.Generator().manual_seed(number)

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng).to(dtype).double()

    page_counts = [-(-n // PAGE) for n in (*row_lengths, *prompt_lengths)]
    tables = torch.randperm(sum(page_counts) + 3, generator=rng).int().split([*page_counts, 3])[:-1]  # 3 unused pages
    width = -(-dim // PAGE) * PAGE
    # Unwritten memory has arbitrary content.
    keys = torch.full((sum(page_counts) + 3, kv, dim, PAGE), float("nan"), dtype=dtype)
    values = torch.full((len(keys), kv, PAGE, width), float("nan"), dtype=dtype)

    def fill(pages: Tensor, count: int) -> tuple[Tensor, Tensor]:
        k, v = rand(count, kv, dim), rand(count, kv, dim)
        for t in range(count):
            keys[int(pages[t // PAGE]), :, :, t % PAGE] = k[t].to(dtype)
            values[int(pages[t // PAGE]), :, t % PAGE, :dim] = v[t].to(dtype)
        return k, v

    row_tables, prompt_tables = tables[: len(row_lengths)], tables[len(row_lengths) :]
    cached = [fill(p, n - 1) for p, n in zip(row_tables, row_lengths, strict=True)]  # The step adds the last token.
    shared = [fill(p, n) for p, n in zip(prompt_tables, prompt_lengths, strict=True)]
    qkv = rand(len(row_lengths), (heads + 2 * kv) * dim)
    weights = (rand(dim).float(), rand(dim).float())
    expected = []
    new_keys = []
    for b, row in enumerate(qkv):
        q, k, v = row.view(-1, dim).split([heads, kv, kv])
        if with_norms:
            q, k = (
                x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * w for x, w in zip((q, k), weights, strict=True)
            )
        position = prompt_lengths[prompts[b]] + row_lengths[b] - 1
        q, k = rotate(q, position), rotate(k, position)
        new_keys.append(k)
        all_k = torch.cat((shared[prompts[b]][0], cached[b][0], k.to(dtype).double()[None]))
        all_v = torch.cat((shared[prompts[b]][1], cached[b][1], v[None]))
        for h in range(heads):
            scores = all_k[:, h // (heads // kv)] @ q[h] * dim**-0.5
            expected.append(scores.softmax(0) @ all_v[:, h // (heads // kv)])
    positions = torch.tensor([prompt_lengths[p] + n - 1 for p, n in zip(prompts, row_lengths, strict=True)])
    angle = positions.double()[:, None] * THETA ** (-torch.arange(dim // 2).double() / (dim // 2))
    pad = torch.nn.utils.rnn.pad_sequence  # padding_value -7: a page that must not be read
    rows = DecodeBatch(
        cos=angle.cos().float(),
        sin=angle.sin().float(),
        tables=pad(list(row_tables), batch_first=True, padding_value=-7),
        lengths=torch.tensor(row_lengths),
        prompts=torch.tensor(prompts),
        prompt_tables=pad(list(prompt_tables), batch_first=True, padding_value=-7),
        prompt_lengths=torch.tensor(prompt_lengths),
    )
    norms = HeadNorms(*weights, EPS) if with_norms else None
    out = torch.stack(expected).view(len(row_lengths), -1)
    return Case(qkv.to(dtype), norms, keys, values, rows, dim, out, torch.stack(new_keys))


def check(case: Case, result: Tensor) -> None:
    """Check results [B, heads d], and that the new keys are in their slots."""
    assert result.dtype == case.qkv.dtype
    limit = TOLERANCE[result.dtype]
    assert (result.cpu().double() - case.expected).norm() <= limit * case.expected.norm()
    for b, n in enumerate(case.rows.lengths.tolist()):
        page = int(case.rows.tables[b, (n - 1) // PAGE])
        slot = (n - 1) % PAGE
        stored = case.keys[page, :, :, slot].cpu().double()
        assert (stored - case.new_keys[b]).norm() <= limit * case.new_keys[b].norm()
