// One call for the three matrix products of the fused ops, each accumulated in at least float32.
#pragma once

#include <ATen/core/Tensor.h>

namespace brorl {

// out [M, N] = a [M, K] b [K, N], or out += a b with `accumulate`. out is row-major; a and b have unit stride in
// one of their two dimensions. Dtypes: all float32, all float64, or a and b bfloat16 with out float32 (on a CPU
// only if has_bfloat16_kernel(); on a GPU by cuBLAS, see gemm.cu).
void gemm_(at::Tensor& out, const at::Tensor& a, const at::Tensor& b, bool accumulate);

}  // namespace brorl
