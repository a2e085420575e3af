// Between moments.cpp and moments.cu; neither CUDA nor torch types.
#pragma once

#include <cstdint>

struct CUstream_st;

namespace brorl {

// Elements that one block of threads reduces; `parts` below has room for 3 doubles for each such block.
constexpr int64_t kMomentsPerBlock = 2048;

// weights: null (every weight is 1), dtype of values, or bool. result [3] double. Launchers return nullptr, or what
// CUDA says went wrong.
#define BRORL_MOMENTS_LAUNCH(S, W) \
  const char* moments_launch( \
      const S* values, const W* weights, int64_t n, double* parts, double* result, CUstream_st* stream)
BRORL_MOMENTS_LAUNCH(float, float);
BRORL_MOMENTS_LAUNCH(float, bool);
BRORL_MOMENTS_LAUNCH(double, double);
BRORL_MOMENTS_LAUNCH(double, bool);

// mask: null or [n].
#define BRORL_WHITEN_LAUNCH(S) \
  const char* whiten_launch( \
      S* values, double mean, double inverse_std, const bool* mask, int64_t n, CUstream_st* stream)
BRORL_WHITEN_LAUNCH(float);
BRORL_WHITEN_LAUNCH(double);

}  // namespace brorl
