// Reductions on the CPU that give the same bits for any thread count: blocks of fixed size, merged pairwise.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include <ATen/Parallel.h>

namespace brorl {

// Elements per block: small enough that further passes over a block, and a few buffers of its size, stay in cache.
constexpr int64_t kSumBlock = 2048;

// reduce(begin, count) gives the T of elements [begin, begin + count); merge(T, T) joins two neighbours. T() is empty.
template <typename T, typename Reduce>
T block_sums(int64_t n, const Reduce& reduce) {
  int64_t count = (n + kSumBlock - 1) / kSumBlock;
  if (!count) return T();
  std::vector<T> parts(count);
#pragma omp parallel for schedule(static) num_threads(at::get_num_threads()) if (count > 4)
  for (int64_t i = 0; i < count; ++i) parts[i] = reduce(i * kSumBlock, std::min(kSumBlock, n - i * kSumBlock));
  while (count > 1) {
    const int64_t pairs = count / 2;
    for (int64_t i = 0; i < pairs; ++i) parts[i] = merge(parts[2 * i], parts[2 * i + 1]);
    if (count % 2) parts[pairs] = parts[count - 1];
    count = pairs + count % 2;
  }
  return parts[0];
}

// Additions in flight at once: a sum of its own per lane, so that one addition need not wait for the one before.
constexpr int64_t kLanes = 16;

// sum of term(i) over i < n, lane by lane and then over the lanes. It vectorises where term does not choose by a
// condition: choose in a loop of its own, into a buffer of kSumBlock. Not "omp simd reduction": with five sums of the
// form `sum += condition ? x : 0`, g++ 12 was seen to make masked loads from past its own stack memory, and to crash.
template <typename Term>
double lane_sum(int64_t n, const Term& term) {
  double lanes[kLanes] = {}, sum = 0;
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (int64_t j = 0; j < kLanes; ++j) lanes[j] += term(i + j);
  }
  for (; i < n; ++i) sum += term(i);
  for (int64_t j = 0; j < kLanes; ++j) sum += lanes[j];
  return sum;
}

}  // namespace brorl
