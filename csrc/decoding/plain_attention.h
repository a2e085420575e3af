// A chunk's attention in float32, for any type and size of heads. For .cu files only.
#pragma once

#include "decoding/decode_pages.h"

namespace brorl {
namespace {

// `count` values, a multiple of 4, to shared memory.
template <typename T>
__device__ __forceinline__ void load_page(const T* from, int count, float* to) {
  struct alignas(4 * sizeof(T)) Four {
    T x[4];
  };
  for (int i = 4 * threadIdx.x; i < count; i += 4 * kThreads) {
    const Four four = *reinterpret_cast<const Four*>(from + i);
#pragma unroll
    for (int j = 0; j < 4; ++j) to[i + j] = widened(four.x[j]);
  }
}

// Page by page: sixteen threads have a score each for every query, and add up the values for it.
template <typename T, int kWide>
struct Plain {
  using Value = T;
  static constexpr int kQueries = 16;  // at once
  static constexpr int kBlocks = 2;    // per multiprocessor; left to itself, the compiler aims for more and spills
  static_assert(kQueries * kPage == kThreads);

  // All threads of the block must call it.
  static __device__ __forceinline__ void attend(const Chunk<T>& chunk) {
    __shared__ float queries[kQueries * kWide], page[kPage * kWide], weights[kQueries * kPage];
    const DecodeStep<T>& s = chunk.s;
    const int query = threadIdx.x / kPage, lane = threadIdx.x % kPage, d = int(s.d), width = int(s.width);
    const bool active = query < chunk.count;

    // The call before has read its own before its last barrier.
    for (int i = threadIdx.x; i < chunk.count * d; i += kThreads) {
      queries[i] = s.queries[chunk.place(i / d) * d + i % d];
    }

    float largest = -INFINITY, sum = 0, total[kWide / kPage] = {};
    for (int64_t token = chunk.first; token < chunk.last; token += kPage) {
      const int there = int(chunk.last - token < kPage ? chunk.last - token : kPage);  // tokens of this page

      // A score per thread; what lies behind the last token may be anything.
      __syncthreads();  // values of the page before are read
      load_page(chunk.keys(token), d * kPage, page);
      __syncthreads();
      float score = 0;
      if (active) {
        for (int i = 0; i < d; ++i) score += queries[query * d + i] * page[i * kPage + lane];
      }
      const bool counts = active && lane < there;
      const float top = fmaxf(largest, largest_over<kPage>(counts ? score : -INFINITY));
      const float weight = counts ? expf(score - top) : 0.0f, shrink = active ? expf(largest - top) : 0.0f;
      sum = sum * shrink + sum_over<kPage>(weight);
      largest = top;
      weights[threadIdx.x] = weight;

      // Sixteen threads add up the values for a query, each some columns of them.
      __syncthreads();  // keys are read, weights written
      load_page(chunk.values(token), kPage * width, page);
      __syncthreads();
#pragma unroll
      for (int j = 0; j < kWide / kPage; ++j) {
        if (!active || j * kPage >= width) continue;
        total[j] *= shrink;
        for (int key = 0; key < there; ++key) {
          total[j] += weights[query * kPage + key] * page[key * width + j * kPage + lane];
        }
      }
    }

    if (!active) return;
    const int64_t result = chunk.result(query);
    if (lane == 0) {
      s.sums[2 * result] = largest;  // of a chunk without tokens -inf
      s.sums[2 * result + 1] = sum;
    }
    if (chunk.first >= chunk.last) return;
#pragma unroll
    for (int j = 0; j < kWide / kPage; ++j) {
      if (j * kPage + lane < d) s.totals[result * d + j * kPage + lane] = total[j];
    }
  }
};

}  // namespace
}  // namespace brorl
