// The passes over one row of V logits: softmax statistics, and the gradient of the target's log-probability.
//
// A row is read while it is in cache, and both passes work in place. Sums run in the element type over short blocks and
// in double over the blocks, so that the error does not grow with V; their order never depends on the thread count.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include <c10/util/BFloat16.h>

#include "fast_exp.h"

namespace brorl {

constexpr int64_t kBlock = 1024;

struct RowStatistics {
  double log_prob;  // of the target, nats
  double entropy;   // of the row, nats
  double sum;       // of exp(logit / temperature - largest), which is what the row now holds
};

// Replace row[0..n) of logits by exp((logit - largest) / temperature) and return the statistics of its softmax.
template <typename S>
RowStatistics exponentiate(S* row, int64_t n, int64_t target, S inverse_temperature) {
  S largest = -std::numeric_limits<S>::infinity();
#pragma omp simd reduction(max : largest)
  for (int64_t j = 0; j < n; ++j) largest = row[j] > largest ? row[j] : largest;
  const double target_logit = double(row[target] - largest) * inverse_temperature;
  double sum = 0, weighted = 0;
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    S* block = row + begin;
    const int64_t size = std::min(kBlock, n - begin);
    S s = 0, w = 0;
#pragma omp simd reduction(+ : s, w)
    for (int64_t j = 0; j < size; ++j) {
      const S x = (block[j] - largest) * inverse_temperature;
      const S e = fast_exp(x);
      block[j] = e;
      s += e;
      w += e * x;
    }
    sum += s;
    weighted += w;
  }
  const double log_sum = std::log(sum);
  return {target_logit - log_sum, log_sum - weighted / sum, sum};
}

// d log p(target) / d logit_j = (onehot_j - softmax_j) / temperature, times `upstream`, written over the exponentials.
template <typename S>
void gradient_row(S* row, int64_t n, int64_t target, double sum, double upstream, double inverse_temperature) {
  const double scale = upstream * inverse_temperature;
  const S factor = S(-scale / sum);
  const S at_target = S(scale * (1 - double(row[target]) / sum));
#pragma omp simd
  for (int64_t j = 0; j < n; ++j) row[j] *= factor;
  row[target] = at_target;
}

inline uint16_t round_to_bfloat16(float x) {  // to nearest, ties to even; branch-free, unlike c10's
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return uint16_t(x != x ? 0x7fc0u : rounded);
}

// The same, written as bfloat16 into the first half of the row's own memory: element j of the result starts at byte 2j
// and its source at byte 4j, so going upwards block by block never overwrites what is still to be read.
inline void gradient_row_bfloat16(
    float* row, int64_t n, int64_t target, double sum, double upstream, double inverse_temperature) {
  const double scale = upstream * inverse_temperature;
  const float factor = float(-scale / sum);
  const uint16_t at_target = round_to_bfloat16(float(scale * (1 - double(row[target]) / sum)));
  char* out = reinterpret_cast<char*>(row);
  uint16_t rounded[kBlock];
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    const float* block = row + begin;
    const int64_t size = std::min(kBlock, n - begin);
#pragma omp simd
    for (int64_t j = 0; j < size; ++j) rounded[j] = round_to_bfloat16(block[j] * factor);
    std::memcpy(out + 2 * begin, rounded, 2 * size);
  }
  std::memcpy(out + 2 * target, &at_target, sizeof at_target);
}

}  // namespace brorl
