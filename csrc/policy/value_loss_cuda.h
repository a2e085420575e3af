// Between value_loss.cpp and value_loss.cu; neither CUDA nor torch types.
#pragma once

#include <cstdint>

struct CUstream_st;

namespace brorl {

// Tokens that one block of threads reduces; `parts` below has room for 8 doubles for each such block.
constexpr int64_t kValueTokensPerBlock = 2048;

// All vectors [rows]; sums [8] double. Returns nullptr, or what CUDA says went wrong.
#define BRORL_VALUE_LOSS_LAUNCH(S) \
  const char* value_loss_launch( \
      const S* values, const S* old_values, const S* returns, const S* weights, double clip, int64_t rows, \
      S* gradient, double* parts, double* sums, CUstream_st* stream)
BRORL_VALUE_LOSS_LAUNCH(float);
BRORL_VALUE_LOSS_LAUNCH(double);

}  // namespace brorl
