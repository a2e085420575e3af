// Moments of a weighted sample and their merging: the only place in csrc/ where the formula stands.
//
// Plain inline functions of numbers, so that the CPU ops and the CUDA kernels compile the same text.
#pragma once

#include "common/host_device.h"

namespace brorl {

// The triple that megatron_brorl.algo.advantage.Moments holds; three doubles, as they lie in a [3] tensor.
struct Moments {
  double count;  // sum of the weights
  double mean;
  double m2;  // weighted sum of squared deviations from the mean
};

// Moments of the union (Chan et al. 1983, eq. 2.1). An empty part changes nothing, not even a bit.
BRORL_HOST_DEVICE Moments merge(const Moments& a, const Moments& b) {
  if (a.count == 0) return b;
  if (b.count == 0) return a;
  const double count = a.count + b.count, share = b.count / count, delta = b.mean - a.mean;
  return {count, a.mean + delta * share, a.m2 + b.m2 + delta * delta * a.count * share};
}

// The mean of `sum` over `count`; 0 of nothing.
BRORL_HOST_DEVICE double mean_of(double sum, double count) { return count == 0 ? 0 : sum / count; }

// One token of a whitened tensor. inverse_std 0 says that the batch has no spread: zero, whatever the value.
template <typename S>
BRORL_HOST_DEVICE S whitened(S value, double mean, double inverse_std) {
  return S(inverse_std == 0 ? 0 : (double(value) - mean) * inverse_std);
}

}  // namespace brorl
