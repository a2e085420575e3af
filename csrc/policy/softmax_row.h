// CPU passes over one row of logits: statistics, and the gradient that overwrites it.
//
// A pass works block by block, so that it reads a row from memory once. Sums are in the element type within a block and
// in double over the blocks. So the error does not grow with the vocabulary. The order never depends on the threads.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "common/fast_exp.h"
#include "policy/softmax_math.h"

namespace brorl {

constexpr int64_t kBlock = 1024;

template <typename S>
SoftmaxPart<double> softmax_row(const S* row, int64_t n, S inverse_temperature) {
  constexpr S infinity = std::numeric_limits<S>::infinity();
  SoftmaxPart<double> total{-double(infinity), 0, 0};
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    const S* const block = row + begin;
    const int64_t size = std::min(kBlock, n - begin);
    S largest = -infinity;
#pragma omp simd reduction(max : largest)
    for (int64_t j = 0; j < size; ++j) largest = block[j] > largest ? block[j] : largest;
    const S base = largest == -infinity ? S(0) : largest;
    S sum = 0, weighted = 0;
#pragma omp simd reduction(+ : sum, weighted)
    for (int64_t j = 0; j < size; ++j) {
      const S x = (block[j] - base) * inverse_temperature;
      const S e = fast_exp(x);
      sum += e;
      weighted += e * above_lowest(x);  // 0 * -inf would be NaN
    }
    total = merge(total, {double(largest), double(sum), double(weighted)}, double(inverse_temperature));
  }
  return total;
}

inline uint16_t round_to_bfloat16(float x) {  // to nearest, ties to even; branch-free, unlike c10's
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return uint16_t(x != x ? 0x7fc0u : rounded);
}

inline void store(char* row, int64_t begin, int64_t size, const double* values, bool) {
  std::copy(values, values + size, reinterpret_cast<double*>(row) + begin);
}

// A bfloat16 row is written to the first half of its own memory: element j moves from byte 4j to byte 2j, so ascending
// blocks never overwrite unread elements.
inline void store(char* row, int64_t begin, int64_t size, const float* values, bool narrow) {
  if (!narrow) {
    std::copy(values, values + size, reinterpret_cast<float*>(row) + begin);
    return;
  }
  uint16_t rounded[kBlock];
#pragma omp simd
  for (int64_t j = 0; j < size; ++j) rounded[j] = round_to_bfloat16(values[j]);
  std::memcpy(row + 2 * begin, rounded, 2 * size);
}

// Overwrite the logits by their gradient. target: index in this row, or negative if it is on another rank.
template <typename S>
void softmax_gradient_row(
    S* row, int64_t n, int64_t target, S largest, SoftmaxGradient<S> gradient, S inverse_temperature, bool narrow) {
  const S constant = gradient.constant, slope = gradient.slope;
  const bool zero = constant == 0 && slope == 0;  // a masked or clipped token
  S values[kBlock] = {};
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    const S* const block = row + begin;
    const int64_t size = std::min(kBlock, n - begin);
    if (!zero) {
#pragma omp simd
      for (int64_t j = 0; j < size; ++j) {
        const S x = (block[j] - largest) * inverse_temperature;
        values[j] = fast_exp(x) * (constant + slope * above_lowest(x));
      }
    }
    if (target >= begin && target < begin + size) values[target - begin] = gradient.at_target;
    store(reinterpret_cast<char*>(row), begin, size, values, narrow);
  }
}

}  // namespace brorl
