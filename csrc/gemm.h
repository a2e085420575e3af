// One call for the three matrix products of the fused ops, each accumulated in at least float32.
#pragma once

#include <ATen/core/Tensor.h>

namespace brorl {

// out [M, N] = a [M, K] b [K, N], or out += a b with `accumulate`. out is row-major; a and b have unit stride in one of
// their two dimensions. Dtypes: all float32, all float64, or a and b bfloat16 with out float32 (needs bfloat16_gemm()).
void gemm(at::Tensor& out, const at::Tensor& a, const at::Tensor& b, bool accumulate);

// Whether this torch carries MKL's bfloat16 product with float32 result. ATen's own product of bfloat16 matrices rounds
// the result to bfloat16, which is too coarse for logits.
bool bfloat16_gemm();

}  // namespace brorl
