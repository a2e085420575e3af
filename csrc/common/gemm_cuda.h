// Launcher of gemm.cu. It returns nullptr, or cuBLAS's error text. Pointers are device memory.
#pragma once

#include <cstdint>

#include "common/matrix.h"

struct CUstream_st;

namespace brorl {

// out [m, n] (row stride ld) = a [m, k] b [k, n], or out += a b with `accumulate`. a and b hold the bits of bfloat16.
// m, n, k > 0. device: number of the current device, which `stream` belongs to.
const char* bfloat16_gemm_launch(
    float* out, int64_t ld, Matrix<uint16_t> a, Matrix<uint16_t> b, int64_t m, int64_t n, int64_t k, bool accumulate,
    int device, CUstream_st* stream);

}  // namespace brorl
