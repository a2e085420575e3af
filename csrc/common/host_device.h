// For the *_math.h headers, which CPU ops and CUDA kernels share, so that CPU tests cover the formulas of the kernels.
#pragma once

#if defined(__CUDACC__)
#define BRORL_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define BRORL_HOST_DEVICE inline
#endif

namespace brorl {

// The comparisons are false for NaN, so NaN stays NaN.
template <typename S>
BRORL_HOST_DEVICE S clamp(S x, S low, S high) {
  return x < low ? low : (x > high ? high : x);
}

}  // namespace brorl
