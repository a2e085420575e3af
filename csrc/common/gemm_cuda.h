// Launcher of gemm.cu; null, or what cuBLAS says went wrong. Pointers are device memory.
#pragma once

#include <cstdint>

#include "common/matrix.h"

struct CUstream_st;

namespace brorl {

// out [m, n] (row stride ld) = a [m, k] b [k, n], added to what is there with `accumulate`; elements are the bits of
// bfloat16. m, n, k > 0. device: the current one, by number, of which `stream` is.
const char* bfloat16_gemm_launch(
    float* out, int64_t ld, Matrix<uint16_t> a, Matrix<uint16_t> b, int64_t m, int64_t n, int64_t k, bool accumulate,
    int device, CUstream_st* stream);

}  // namespace brorl
