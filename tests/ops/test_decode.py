"""One decoding step's attention over pages, and the small ops around it, against float64 row by row."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_brorl.ops.decode import PAGE, HeadNorms, Rows
from megatron_brorl.ops.fused.decode import FusedDecode
from megatron_brorl.ops.reference.decode import ReferenceDecode

IMPLEMENTATIONS = [FusedDecode(), ReferenceDecode()]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2}
EPS, THETA = 1e-5, 100.0
# (heads, kv heads, head size, own tokens of each row, its prompt, prompt tokens)
CASES: list[tuple[int, int, int, list[int], list[int], list[int]]] = [
    (4, 2, 64, [1, 16, 17, 40, 200], [0, 0, 0, 0, 0], [64]),
    (4, 4, 16, [3, 300, 1], [0, 1, 1], [1, 700]),
    (14, 2, 32, [5, 31, 32, 33], [1, 1, 0, 2], [128, 129, 15]),
    (6, 1, 8, [1, 2], [0, 0], [3]),
    (16, 1, 80, [9] * 11, [0] * 4 + [1] * 7, [16, 17]),
    (2, 2, 256, [130], [0], [130]),
]


@dataclasses.dataclass
class Case:
    qkv: Tensor
    norms: HeadNorms | None
    keys: Tensor
    values: Tensor
    rows: Rows
    heads: int
    dim: int
    expected: Tensor  # [B, heads d] float64
    new_keys: Tensor  # [B, K, d] float64

    def run(self, ops: Any) -> Tensor:
        return ops.attend(self.qkv, self.norms, self.keys, self.values, self.rows, self.dim**-0.5, self.heads)


def rotate(x: Tensor, position: int) -> Tensor:
    """x [heads, d] by complex numbers: pair (i, i + d/2) turns by position THETA^(-2 i / d)."""
    half = x.shape[-1] // 2
    angle = position * THETA ** (-torch.arange(half).double() / half)
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones(half).double(), angle)
    return torch.cat((turned.real, turned.imag), dim=-1)


def make(number: int, dtype: torch.dtype, with_norms: bool = False) -> Case:
    heads, kv, dim, own, prompts, prompt_lengths = CASES[number]
    g = torch.Generator().manual_seed(number)

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g).to(dtype).double()

    pages_of = [-(-n // PAGE) for n in (*own, *prompt_lengths)]
    order = torch.randperm(sum(pages_of) + 3, generator=g).int().split([*pages_of, 3])[:-1]
    width = -(-dim // PAGE) * PAGE
    # Memory that nobody wrote holds anything.
    keys = torch.full((sum(pages_of) + 3, kv, dim, PAGE), float("nan"), dtype=dtype)
    values = torch.full((len(keys), kv, PAGE, width), float("nan"), dtype=dtype)

    def fill(pages: Tensor, count: int) -> tuple[Tensor, Tensor]:
        k, v = rand(count, kv, dim), rand(count, kv, dim)
        for t in range(count):
            keys[int(pages[t // PAGE]), :, :, t % PAGE] = k[t].to(dtype)
            values[int(pages[t // PAGE]), :, t % PAGE, :dim] = v[t].to(dtype)
        return k, v

    cached = [fill(p, n - 1) for p, n in zip(order, own, strict=False)]
    shared = [fill(p, n) for p, n in zip(order[len(own) :], prompt_lengths, strict=True)]
    qkv = rand(len(own), (heads + 2 * kv) * dim)
    weights = (rand(dim).float(), rand(dim).float())
    expected, new_keys = [], []
    for b, row in enumerate(qkv):
        q, k, v = row.view(-1, dim).split([heads, kv, kv])
        if with_norms:
            q, k = (
                x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * w for x, w in zip((q, k), weights, strict=True)
            )
        position = prompt_lengths[prompts[b]] + own[b] - 1
        q, k = rotate(q, position), rotate(k, position)
        new_keys.append(k)
        all_k = torch.cat((shared[prompts[b]][0], cached[b][0], k.to(dtype).double()[None]))
        all_v = torch.cat((shared[prompts[b]][1], cached[b][1], v[None]))
        for h in range(heads):
            scores = all_k[:, h // (heads // kv)] @ q[h] * dim**-0.5
            expected.append(scores.softmax(0) @ all_v[:, h // (heads // kv)])
    positions = torch.tensor([prompt_lengths[p] + n - 1 for p, n in zip(prompts, own, strict=True)])
    angle = positions.double()[:, None] * THETA ** (-torch.arange(dim // 2).double() / (dim // 2))
    pad = torch.nn.utils.rnn.pad_sequence
    rows = Rows(
        cos=angle.cos().float(),
        sin=angle.sin().float(),
        tables=pad(list(order[: len(own)]), batch_first=True, padding_value=-7),
        lengths=torch.tensor(own),
        prompts=torch.tensor(prompts),
        prompt_tables=pad(list(order[len(own) :]), batch_first=True, padding_value=-7),
        prompt_lengths=torch.tensor(prompt_lengths),
    )
    norms = HeadNorms(*weights, EPS) if with_norms else None
    out = torch.stack(expected).view(len(own), -1)
    return Case(qkv.to(dtype), norms, keys, values, rows, heads, dim, out, torch.stack(new_keys))


@pytest.mark.parametrize("ops", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("with_norms", [False, True])
@pytest.mark.parametrize("number", range(len(CASES)))
def test_attention_agrees_with_float64(number, with_norms, dtype, ops):
    case = make(number, dtype, with_norms)
    got = case.run(ops)
    assert got.dtype == dtype
    assert (got.double() - case.expected).norm() <= TOLERANCE[dtype] * case.expected.norm()
    for b, n in enumerate(case.rows.lengths.tolist()):
        page, slot = int(case.rows.tables[b, (n - 1) // PAGE]), (n - 1) % PAGE
        stored = case.keys[page, :, :, slot].double()
        assert (stored - case.new_keys[b]).norm() <= TOLERANCE[dtype] * case.new_keys[b].norm()


def test_the_same_bits_for_any_number_of_threads():
    before, found = torch.get_num_threads(), []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        found.append(make(2, torch.float32).run(FusedDecode()))
    torch.set_num_threads(before)
    assert all(torch.equal(found[0], x) for x in found[1:])


@pytest.mark.parametrize("ops", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("width", [1, 40, 256])
def test_add_norm_and_silu_mul(width, dtype, ops):
    g = torch.Generator().manual_seed(width)
    x, delta = (100 * torch.randn(5, width, generator=g).to(dtype) for _ in range(2))
    weight = torch.randn(width, generator=g).to(dtype)
    total = (x.double() + delta.double()).to(dtype)
    got = ops.add_norm(x, delta, weight, EPS)
    assert torch.equal(x, total)
    expected = total.double() / (total.double().square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()
    assert torch.allclose(got.double(), expected, rtol=TOLERANCE[dtype], atol=1e-6)
    alone = ops.add_norm(x, None, weight, EPS)
    assert torch.equal(alone, got)
    gate_up = torch.cat((50 * x[:, :1].sign() * x.abs() / x.abs().max(), delta), dim=1)
    gate, up = gate_up.double().chunk(2, dim=1)
    expected = gate / (1 + (-gate).exp()) * up
    assert torch.allclose(ops.silu_mul(gate_up).double(), expected, rtol=2 * TOLERANCE[dtype], atol=1e-5)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_opcheck(dtype):
    case = make(4, dtype, with_norms=True)
    case.keys.nan_to_num_(), case.values.nan_to_num_()  # opcheck compares what is left in memory
    r, n = case.rows, case.norms
    assert n is not None
    out = torch.zeros(len(case.qkv), case.heads * case.dim, dtype=dtype)
    places = (r.tables, r.lengths, r.prompt_tables, r.prompt_lengths, r.prompts)
    args = (case.qkv, n.q, n.k, EPS, r.cos, r.sin, case.keys, case.values, *places, 0.3, out)
    torch.library.opcheck(torch.ops.brorl.decode_attention_.default, args)
    x = torch.randn(3, 20).to(dtype)
    torch.library.opcheck(torch.ops.brorl.add_rms_norm_.default, (x, x.clone(), x[0].clone(), EPS, torch.zeros_like(x)))


MISTAKES: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"tables": torch.full((5, 13), 99, dtype=torch.int32)}, IndexError, r"tables\[0, 0\] is 99 of "),
    ({"lengths": torch.tensor([1, 2, 3, 4, 0])}, ValueError, r"lengths\[4\] is 0"),
    ({"lengths": torch.tensor([1, 2, 3, 4, 999])}, ValueError, "tables of row 4 has no room for 999 tokens"),
    ({"prompts": torch.tensor([0, 0, 0, 0, 1])}, IndexError, r"prompts\[4\] is 1 of 1"),
    ({"prompts": torch.zeros(4, dtype=torch.int64)}, ValueError, r"prompts must be \[5\], got \[4\]"),
    ({"cos": torch.zeros(5, 31)}, ValueError, r"cos must be \[5, 32\], got \[5, 31\]"),
    ({"tables": torch.zeros(5, 13, dtype=torch.int64)}, TypeError, "tables must be Int, got Long"),
]


@pytest.mark.parametrize(("wrong", "error", "message"), MISTAKES)
def test_mistakes_raise_one_clear_error(wrong, error, message):
    case = make(0, torch.float32)
    case.rows = dataclasses.replace(case.rows, **wrong)
    with pytest.raises(error, match=message):
        case.run(FusedDecode())
