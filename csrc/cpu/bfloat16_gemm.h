// Matrix products of bfloat16 operands with float32 results on a CPU, around oneDNN's micro-kernel. (ATen's round to
// bfloat16, too coarse for logits.)
#pragma once

#include <cstdint>

#include "common/matrix.h"

namespace brorl {

// Whether this processor multiplies bfloat16 and this torch has oneDNN's kernel for it.
bool has_bfloat16_kernel();

// out [m, n] (row stride ld) = a [m, k] b [k, n], added to what is there with `accumulate`; elements are the bits of
// bfloat16. m, n, k > 0.
void bfloat16_gemm(
    float* out, int64_t ld, Matrix<uint16_t> a, Matrix<uint16_t> b, int64_t m, int64_t n, int64_t k, bool accumulate);

}  // namespace brorl
