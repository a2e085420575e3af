// The clipped value loss of one token and its derivative: the only place in csrc/ where the formula stands.
//
// Plain inline functions of numbers, so that the CPU op (value_loss.cpp) and the CUDA kernel (value_loss.cu) compile
// the same text.
#pragma once

#include <cmath>

#include "common/host_device.h"
#include "policy/moments_math.h"

namespace brorl {

template <typename S>
struct ValueToken {
  S objective;   // 0.5 max((v - R)^2, (clip(v) - R)^2)
  S derivative;  // d objective / d v
  bool clipped;  // the clipped branch is the larger, so the derivative is zero
};

// PPO's value loss (Schulman et al. 2017, as in OpenAI baselines ppo2) with v held within old +- clip; an infinite clip
// never looks at old. Where both branches are equally large, the derivative is that of the unclipped one. Comparisons
// are such that a NaN in any input that is looked at makes the objective NaN.
template <typename S>
BRORL_HOST_DEVICE ValueToken<S> value_token(S value, S old, S target, S clip) {
  const S low = old - clip, high = old + clip;
  const bool bounded = !std::isinf(clip);
  const S held = bounded ? (value < low ? low : (value <= high ? value : high)) : value;
  const S gap = value - target, held_gap = held - target;
  const S plain = gap * gap, clipped = held_gap * held_gap;
  const bool flat = clipped > plain || clipped != clipped;
  return {S(0.5) * (flat ? clipped : plain), flat ? S(0) : gap, flat};
}

// What is summed over unmasked tokens; eight doubles, as they lie in the op's second result.
struct ValueSums {
  double loss;     // sum of weight times objective
  double clipped;  // tokens
  Moments returns, residuals;  // residual: return - value
};

BRORL_HOST_DEVICE ValueSums merge(const ValueSums& a, const ValueSums& b) {
  return {a.loss + b.loss, a.clipped + b.clipped, merge(a.returns, b.returns), merge(a.residuals, b.residuals)};
}

}  // namespace brorl
