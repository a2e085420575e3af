// Float32 matrix products on processors that MKL is not tuned for.
#pragma once

#include <cstdint>

#include "common/matrix.h"

namespace brorl {

// Return whether float_gemm is faster than MKL's product: on AMD processors with AVX-512.
bool prefers_float_gemm();

// out [m, n] (row stride ld) = a [m, k] b [k, n], or out += a b with `accumulate`. m, n, k > 0. The result does not
// depend on the number of threads.
void float_gemm(
    float* out, int64_t ld, Matrix<float> a, Matrix<float> b, int64_t m, int64_t n, int64_t k, bool accumulate);

}  // namespace brorl
