"""bfloat16 products on a GPU: csrc/common/gemm.cu with a fake of cuBLAS on the CPU (double/cublas_v2.h)."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
CSRC = HERE.parents[1] / "csrc"
SHIM = """
#include "common/gemm_cuda.h"
#include <cublas_v2.h>

extern "C" const char* product(
    float* out, int64_t ld, const uint16_t* a, int64_t a_row, int64_t a_column, const uint16_t* b, int64_t b_row,
    int64_t b_column, int64_t m, int64_t n, int64_t k, int accumulate, int device, CUstream_st* stream) {
  return brorl::bfloat16_gemm_launch(
      out, ld, {a, a_row, a_column}, {b, b_row, b_column}, m, n, k, accumulate, device, stream);
}
extern "C" int handles() { return cublas_handles; }
extern "C" CUstream_st* stream() { return cublas_stream; }
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    root = tmp_path_factory.mktemp("cublas")
    (root / "shim.cpp").write_text(SHIM)
    command = ["c++", "-std=c++17", "-O1", "-Wall", "-Werror", "-shared", "-fPIC", f"-I{HERE / 'double'}", f"-I{CSRC}"]
    sources = ["-x", "c++", str(CSRC / "common" / "gemm.cu"), str(root / "shim.cpp")]
    subprocess.run([*command, *sources, "-o", str(root / "gemm.so")], check=True)
    loaded = ctypes.CDLL(str(root / "gemm.so"))
    loaded.product.restype = ctypes.c_char_p
    loaded.stream.restype = ctypes.c_void_p
    return loaded


def product(library, out, a, b, accumulate, device=0, stream=0) -> str | None:
    """Call the launcher as gemm_ does, with a stride of 1 for a dimension of size 1."""

    def strides(x):
        return [ctypes.c_int64(1 if n == 1 else s) for n, s in zip(x.shape, x.stride(), strict=True)]

    sizes = [ctypes.c_int64(n) for n in (*out.shape, a.shape[1])]
    pointers = [ctypes.c_void_p(x.data_ptr()) for x in (out, a, b)]
    ld = ctypes.c_int64(out.stride(0))  # the leading dimension
    error = library.product(
        *(pointers[0], ld, pointers[1], *strides(a), pointers[2], *strides(b), *sizes),
        *(int(accumulate), device, ctypes.c_void_p(stream)),
    )
    return error.decode() if error else None


def random_matrix(rows, columns, by_columns, gap, seed):
    """Return [rows, columns] bfloat16 with `gap` unused elements between rows (or columns)."""
    g = torch.Generator().manual_seed(seed)
    long, short = (columns, rows) if by_columns else (rows, columns)
    x = torch.randn(long, short + gap, generator=g).bfloat16()[:, :short]
    return x.t() if by_columns else x


@pytest.mark.parametrize("sizes", [(5, 7, 3), (1, 7, 3), (5, 1, 3), (5, 7, 1), (1, 1, 1), (1, 4, 1), (16, 16, 16)])
@pytest.mark.parametrize("a_by_columns", [False, True])
@pytest.mark.parametrize("b_by_columns", [False, True])
@pytest.mark.parametrize("gap", [0, 5])
def test_every_layout_agrees_with_float64(library, sizes, a_by_columns, b_by_columns, gap):
    m, n, k = sizes
    a = random_matrix(m, k, a_by_columns, gap, seed=1)
    b = random_matrix(k, n, b_by_columns, gap, seed=2)
    memory = torch.full((m, n + gap), 0.5)
    out = memory[:, :n]
    expected = a.double() @ b.double()
    for times, accumulate in [(1, False), (2, True), (3, True), (1, False)]:
        assert product(library, out, a, b, accumulate) is None
        torch.testing.assert_close(out.double(), times * expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(memory[:, n:], torch.full((m, gap), 0.5))


def test_uninitialised_output_is_not_read(library):
    out = torch.full((2, 3), torch.nan)
    assert product(library, out, torch.ones(2, 4).bfloat16(), torch.ones(4, 3).bfloat16(), accumulate=False) is None
    assert torch.equal(out, torch.full((2, 3), 4.0))


def test_one_handle_per_device_and_the_given_stream(library):
    out = torch.zeros(2, 2)
    a = torch.ones(2, 2).bfloat16()
    product(library, out, a, a, accumulate=False)
    before = library.handles()
    for device, stream, new_handles in [(0, 0x10, 0), (5, 0x20, 1), (5, 0x30, 1), (0, 0x40, 1)]:
        assert product(library, out, a, a, accumulate=False, device=device, stream=stream) is None
        assert library.stream() == stream
        assert library.handles() == before + new_handles


def test_errors_have_a_text(library):
    out = torch.zeros(3, 2)
    a = torch.ones(2, 2).bfloat16()
    overlapping = torch.ones(1, 2).bfloat16().expand(3, 2)
    assert product(library, out, overlapping, a, accumulate=False) == "CUBLAS_STATUS_INVALID_VALUE"
    huge = torch.empty_strided((2, 2), (2**31, 1), dtype=torch.bfloat16, device="meta")
    assert product(library, out[:2], huge, a, accumulate=False) == "a dimension of more than 2^31 - 1"
