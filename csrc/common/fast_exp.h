// exp for the softmax of a row: branch-free, so that the compiler turns a loop over it into vector code.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace brorl {

constexpr float kLowestExponent = -87.3f;  // below this, exp leaves the normal float32 range

template <typename S>
inline S above_lowest(S x) {  // NaN stays NaN
  return x < S(kLowestExponent) ? S(kLowestExponent) : x;
}

// exp(x) for x <= 0, within 1e-7 of the value; 0 below kLowestExponent. NaN gives NaN.
// exp(x) = 2^n exp(r) with n = round(x / ln 2), |r| <= ln 2 / 2, and Cephes' polynomial for exp(r) (Moshier, expf).
inline float fast_exp(float x) {
  const float shift = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, kept in the low bits
  const float inside = above_lowest(x);
  const float shifted = inside * 1.44269504088896341f + shift;
  const float n = shifted - shift;
  const float r = (inside - n * 0.693359375f) + n * 2.12194440e-4f;  // ln 2 in two parts, the first exact
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  uint32_t bits;
  std::memcpy(&bits, &shifted, sizeof bits);
  bits = (bits << 23) + (127u << 23);  // the integer n becomes the exponent; the shift drops the other bits
  float scale;
  std::memcpy(&scale, &bits, sizeof scale);
  return x < kLowestExponent ? 0.0f : p * scale;
}

inline double fast_exp(double x) { return std::exp(x); }

}  // namespace brorl
