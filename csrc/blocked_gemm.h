// Matrix products on a CPU around oneDNN's micro-kernel, for two cases that torch's own products do not serve well:
// bfloat16 operands with float32 results (ATen rounds to bfloat16, too coarse for logits), and float32 on processors
// that MKL is not tuned for.
#pragma once

#include <cstdint>

namespace brorl {

template <typename T>
struct Matrix {
  const T* data;
  int64_t row, column;  // strides in elements, one of which is 1
};

// Whether this processor multiplies bfloat16 and this torch has oneDNN's kernel for it.
bool has_bfloat16_kernel();

// Whether the kernel is there and to be preferred to MKL's float32 product: on AMD's processors with AVX-512.
bool prefers_float_kernel();

// out [m, n] (row stride ld) = a [m, k] b [k, n], added to what is there with `accumulate`. T: uint16_t, which holds
// bfloat16, or float. m, n, k > 0.
template <typename T>
void blocked_gemm(float* out, int64_t ld, Matrix<T> a, Matrix<T> b, int64_t m, int64_t n, int64_t k, bool accumulate);

}  // namespace brorl
