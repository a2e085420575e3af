// Products of bfloat16 matrices with float32 results on a CPU, which ATen does not offer: its own round to bfloat16, too
// coarse for logits, and MKL's is slow on processors that are not Intel's.
#pragma once

#include <cstdint>

namespace brorl {

struct BFloat16Matrix {
  const uint16_t* data;
  int64_t row, column;  // strides in elements, one of which is 1
};

// Whether this processor multiplies bfloat16 and this torch has oneDNN's kernel for it.
bool has_bfloat16_kernel();

// out [m, n] (row stride ld) = a [m, k] b [k, n], added to what is there with `accumulate`. k > 0.
void bfloat16_gemm(
    float* out, int64_t ld, BFloat16Matrix a, BFloat16Matrix b, int64_t m, int64_t n, int64_t k, bool accumulate);

}  // namespace brorl
