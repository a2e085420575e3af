// Generalised and group-relative advantages of one segment or group. The CPU ops and the CUDA kernels compile the same
// functions.
#pragma once

#include <cmath>
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

// The n rewards of a group minus their mean, divided by 1 or by the sample standard deviation plus 1e-6 (GRPO; Shao et
// al. 2024, section 4.1.2). Equal rewards give exactly zero; without this case they would give rounding errors.
template <typename S>
BRORL_HOST_DEVICE void advantages_of_group(const S* rewards, int64_t n, bool by_std, S* advantages) {
  double sum = 0, m2 = 0;
  bool equal = true;
  for (int64_t i = 0; i < n; ++i) sum += double(rewards[i]);
  for (int64_t i = 1; i < n; ++i) equal = equal && rewards[i] == rewards[0];
  const double mean = sum / double(n);
  for (int64_t i = 0; i < n; ++i) m2 += (double(rewards[i]) - mean) * (double(rewards[i]) - mean);
  const double divisor = by_std ? std::sqrt(m2 / double(n - 1)) + 1e-6 : 1;
  for (int64_t i = 0; i < n; ++i) advantages[i] = equal ? S(0) : S((double(rewards[i]) - mean) / divisor);
}

// One element of a whitened tensor. inverse_std is 0 if the batch has no spread; the result is then 0 for any value.
template <typename S>
BRORL_HOST_DEVICE S whitened(S value, double mean, double inverse_std) {
  return S(inverse_std == 0 ? 0 : (double(value) - mean) * inverse_std);
}

}  // namespace brorl
