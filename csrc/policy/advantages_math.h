// Generalised advantages of one segment, and whitening. The CPU ops and the CUDA kernels compile the same functions.
#pragma once

#include <cstdint>

#include "common/host_device.h"

namespace brorl {

// delta_t = r_t + gamma V_{t+1} - V_t and A_t = delta_t + gamma lambda A_{t+1} (Schulman et al. 2016, eq. 10 and 16)
// over the n tokens of a segment. Sums are in double, because a return has thousands of terms.
template <typename S>
BRORL_HOST_DEVICE void gae_segment(
    const S* rewards, const S* values, int64_t n, double gamma, double lambda, S* advantages, S* returns) {
  double next_value = 0, advantage = 0;
  for (int64_t t = n - 1; t >= 0; --t) {
    const double value = double(values[t]);
    const double delta = double(rewards[t]) + gamma * next_value - value;
    advantage = delta + gamma * lambda * advantage;
    next_value = value;
    advantages[t] = S(advantage);
    returns[t] = S(advantage + value);
  }
}

// One element of a whitened tensor. inverse_std is 0 if the batch has no spread; the result is then 0 for any value.
template <typename S>
BRORL_HOST_DEVICE S whitened(S value, double mean, double inverse_std) {
  return S(inverse_std == 0 ? 0 : (double(value) - mean) * inverse_std);
}

}  // namespace brorl
