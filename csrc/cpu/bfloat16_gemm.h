// Matrix products of bfloat16 operands with float32 results on a CPU, with oneDNN's micro-kernel. (ATen rounds to
// bfloat16, which is too coarse for logits.)
#pragma once

#include <cstdint>

#include "common/matrix.h"

namespace brorl {

// Return whether this processor multiplies bfloat16 and this torch has oneDNN's kernel for it.
bool has_bfloat16_kernel();

// out [m, n] (row stride ld) = a [m, k] b [k, n], or out += a b with `accumulate`. a and b hold the bits of bfloat16.
// m, n, k > 0.
void bfloat16_gemm(
    float* out, int64_t ld, Matrix<uint16_t> a, Matrix<uint16_t> b, int64_t m, int64_t n, int64_t k, bool accumulate);

}  // namespace brorl
