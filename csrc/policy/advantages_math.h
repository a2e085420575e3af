// Generalised advantage estimation and group-relative advantages, element by element: the only place in csrc/ where the
// formulas stand.
//
// Plain inline functions, so that the CPU ops (advantages.cpp) and the CUDA kernels (advantages.cu) compile the same text.
// All in double, or in vectors of it (lanes.h): a return is a sum over thousands of tokens.
#pragma once

#include <cmath>

#include "common/host_device.h"

namespace brorl {

// delta_t = r_t + gamma V(s_{t+1}) - V(s_t) (Schulman et al. 2016, eq. 10).
template <typename X>
BRORL_HOST_DEVICE X td_error(X reward, X value, X next_value, double gamma) {
  return reward + gamma * next_value - value;
}

// The recursion A_t = delta_t + gamma lambda A_{t+1} (eq. 16) as a map from A_{t+1} to A_t. Maps compose, which lets a
// warp, or the lanes of a vector, work on many tokens at once.
template <typename X>
struct AffineMap {
  X offset, slope;

  BRORL_HOST_DEVICE X operator()(X x) const { return offset + slope * x; }
};
using Affine = AffineMap<double>;

// x -> outer(inner(x)).
template <typename X>
BRORL_HOST_DEVICE AffineMap<X> compose(const AffineMap<X>& outer, const AffineMap<X>& inner) {
  return {outer(inner.offset), outer.slope * inner.slope};
}

// The map of one token, and of a token that the recursion jumps over.
BRORL_HOST_DEVICE Affine gae_step(double delta, double gamma, double lambda) { return {delta, gamma * lambda}; }
BRORL_HOST_DEVICE Affine gae_skip() { return {0, 1}; }

// What a group's deviations from its mean are divided by: 1, or the sample standard deviation (n - 1, as torch.std)
// plus 1e-6 (GRPO; Shao et al. 2024, section 4.1.2).
BRORL_HOST_DEVICE double group_divisor(double m2, double count, bool by_std) {
  return by_std ? std::sqrt(m2 / (count - 1)) + 1e-6 : 1;
}

}  // namespace brorl
