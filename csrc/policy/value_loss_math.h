// The clipped value loss of one token, for the CPU op and the CUDA kernel, and the kernel's launcher.
#pragma once

#include <cmath>
#include <cstdint>

#include "common/host_device.h"

struct CUstream_st;

namespace brorl {

template <typename S>
struct ValuePointers {
  const S *values, *old_values, *returns, *weights;
};

template <typename S>
struct ValueToken {
  S loss, gradient;
  bool clipped;  // whether clipping made the gradient 0
};

// 0.5 w max((v - R)^2, (clip(v) - R)^2): PPO's value loss (Schulman et al. 2017, as in OpenAI baselines ppo2) with v
// clipped to old +- clip; an infinite clip ignores old. If both branches are equal, the gradient is that of the
// unclipped one. A token of weight 0 gives 0 for any other inputs, even NaN; otherwise a NaN makes the loss NaN.
template <typename S>
BRORL_HOST_DEVICE ValueToken<S> value_loss_of(S value, S old, S target, S weight, S clip) {
  const S low = old - clip, high = old + clip;
  const S limited = std::isinf(clip) ? value : (value < low ? low : (value <= high ? value : high));
  const S gap = value - target, limited_gap = limited - target;
  const S plain = gap * gap, bounded = limited_gap * limited_gap;
  const bool counts = weight != 0, flat = bounded > plain || bounded != bounded;
  return {
      counts ? S(0.5) * weight * (flat ? bounded : plain) : S(0), counts && !flat ? weight * gap : S(0),
      counts && flat};
}

constexpr int kValueSums = 7;  // see value_loss.h

// gradient [rows]. table [1 + token_blocks(rows), kValueSums]: its first row gets the sums. Returns nullptr, or CUDA's
// error text.
template <typename S>
const char* value_loss_launch(
    ValuePointers<S> pointers, S clip, int64_t rows, S* gradient, double* table, CUstream_st* stream);

}  // namespace brorl
