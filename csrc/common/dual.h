// Dual numbers: a value with its derivative, so that no derivative is written by hand.
#pragma once

#include <cmath>

#include "common/host_device.h"

namespace brorl {

template <typename S>
struct Dual {
  S value, slope;
};

// Lift a constant (derivative 0).
template <typename S>
BRORL_HOST_DEVICE Dual<S> constant(S x) {
  return {x, S(0)};
}

template <typename S>
BRORL_HOST_DEVICE Dual<S> operator*(const Dual<S>& x, S factor) {
  return {x.value * factor, x.slope * factor};
}

template <typename S>
BRORL_HOST_DEVICE Dual<S> operator-(const Dual<S>& x, S shift) {
  return {x.value - shift, x.slope};
}

template <typename S>
BRORL_HOST_DEVICE Dual<S> log(const Dual<S>& x) {
  return {std::log(x.value), x.slope / x.value};
}

template <typename S>
BRORL_HOST_DEVICE Dual<S> sigmoid(const Dual<S>& x) {
  const S p = 1 / (1 + std::exp(-x.value));
  return {p, p * (1 - p) * x.slope};
}

}  // namespace brorl
