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
  S *loss, *gradient, *clipped;
};

// 0.5 w max((v - R)^2, (clip(v) - R)^2): PPO's value loss (Schulman et al. 2017, as in OpenAI baselines ppo2) with v
// clipped to old +- clip; an infinite clip ignores old. If both branches are equal, the gradient is that of the
// unclipped one. A token of weight 0 gives 0 for any other inputs, even NaN; otherwise a NaN makes the loss NaN.
template <typename S>
BRORL_HOST_DEVICE void value_loss_at(int64_t i, const ValuePointers<S>& p, S clip) {
  const S weight = p.weights[i], value = p.values[i], target = p.returns[i], old = p.old_values[i];
  const S low = old - clip, high = old + clip;
  const S held = std::isinf(clip) ? value : (value < low ? low : (value <= high ? value : high));
  const S gap = value - target, held_gap = held - target;
  const S plain = gap * gap, bounded = held_gap * held_gap;
  const bool counts = weight != 0, flat = bounded > plain || bounded != bounded;
  p.loss[i] = counts ? S(0.5) * weight * (flat ? bounded : plain) : S(0);
  p.gradient[i] = counts && !flat ? weight * gap : S(0);
  p.clipped[i] = counts && flat ? S(1) : S(0);
}

// Returns nullptr, or CUDA's error text.
template <typename S>
const char* value_loss_launch(ValuePointers<S> pointers, S clip, int64_t rows, CUstream_st* stream);

}  // namespace brorl
