// For headers of maths that both the CPU ops and the CUDA kernels compile: what CPU tests check is what a GPU runs.
#pragma once

#if defined(__CUDACC__)
#define BRORL_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define BRORL_HOST_DEVICE inline
#endif

namespace brorl {

// Written with comparisons that are false for NaN, so that NaN comes out where NaN went in.
template <typename S>
BRORL_HOST_DEVICE S clamp(S x, S low, S high) {
  return x < low ? low : (x > high ? high : x);
}

}  // namespace brorl
