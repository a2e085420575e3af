// Softmax statistics of parts of a row, their merge over blocks, threads and ranks, and the derivative.
#pragma once

#include <cmath>

#include "common/host_device.h"

namespace brorl {

// Statistics of some of a row's logits z at inverse temperature b, relative to their largest.
template <typename S>
struct SoftmaxPart {
  S largest;   // largest z; -inf without logits
  S sum;       // sum of exp(b (z - largest))
  S weighted;  // sum of exp(x) x with x = b (z - largest), which the entropy needs
};

// Merge two parts (online softmax, Milakov & Gimelshein 2018, extended by the entropy's sum).
template <typename S>
BRORL_HOST_DEVICE SoftmaxPart<S> merge(SoftmaxPart<S> a, SoftmaxPart<S> b, S inverse_temperature) {
  if (b.sum == 0) return a;  // also avoids -inf - -inf
  if (a.sum == 0) return b;
  const S largest = a.largest > b.largest ? a.largest : b.largest;
  const S shift_a = (a.largest - largest) * inverse_temperature, shift_b = (b.largest - largest) * inverse_temperature;
  const S factor_a = std::exp(shift_a), factor_b = std::exp(shift_b);
  return {
      largest, factor_a * a.sum + factor_b * b.sum,
      factor_a * (a.weighted + shift_a * a.sum) + factor_b * (b.weighted + shift_b * b.sum)};
}

// The gradient of one row's logits, for upstream gradients u of the target's log-probability and c of the entropy H:
//   d log p_t / d z_j = b ([j = t] - p_j),   d H / d z_j = -b p_j (log p_j + H),   log p_j = x_j - log(sum),
// with x as in SoftmaxPart. So the gradient is exp(x_j) (constant + slope x_j), plus b u at the target t.
template <typename S>
struct SoftmaxGradient {
  S constant, slope;
  S at_target;  // whole gradient, in double: its two terms almost cancel if the target is almost certain
};

// x_target: x of the target, which may be on another rank.
template <typename S>
BRORL_HOST_DEVICE SoftmaxGradient<S> softmax_gradient(
    SoftmaxPart<double> row, double x_target, double upstream, double upstream_entropy, double inverse_temperature) {
  const double scale = inverse_temperature / row.sum;
  const double constant = scale * (upstream_entropy * row.weighted / row.sum - upstream);
  const double slope = -scale * upstream_entropy;
  const double at_target = inverse_temperature * upstream + std::exp(x_target) * (constant + slope * x_target);
  return {S(constant), S(slope), S(at_target)};
}

}  // namespace brorl
