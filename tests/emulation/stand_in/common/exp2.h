// Replaces csrc/common/exp2.h: the largest error that CUDA allows, of either sign, and no subnormal results. 2^0 is 1.
#pragma once

#include <cfloat>
#include <cmath>

namespace brorl {

inline float fast_exp2(float x) {
  if (x == 0) return 1;
  const float y = std::exp2(x);
  const float error = __float_as_uint(x) & 1 ? 0x1p-22f : -0x1p-22f;
  return y < FLT_MIN ? 0 : y + y * error;
}

inline double fast_exp2(double x) { return std::exp2(x); }

}  // namespace brorl
