// 2^x in kernels.
#pragma once

#include <cuda_runtime.h>

namespace brorl {

// One instruction of the special function unit, with a relative error of at most 2^-22. Results below the smallest
// normal number are 0. NaN gives NaN.
__device__ __forceinline__ float fast_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ double fast_exp2(double x) { return exp2(x); }

}  // namespace brorl
