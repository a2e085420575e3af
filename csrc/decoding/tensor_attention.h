// A chunk's attention on tensor cores, for bfloat16 and heads of a multiple of 16. For .cu files only.
//
// Queries and softmax weights are rounded to bfloat16, all sums are float32. As warp matrices' layout is the compiler's
// own affair, what has been added up so far lies in shared memory, where it shrinks as larger scores turn up.
#pragma once

#include <mma.h>

#include "decoding/decode_pages.h"

namespace brorl {
namespace {

constexpr int kCube = kPage;  // of a warp's product: 16 x 16 x 16

template <int kQueries, int kWide>
struct TensorScratch {
  static constexpr int kTokens = 8 * kCube * kCube / kQueries;  // at once: a cube of scores for each of eight warps

  // Rows are a little longer, so that those below one another lie in different banks.
  alignas(32) uint16_t queries[kQueries][kWide + 8];
  alignas(32) float scores[kQueries][kTokens + 4];
  alignas(32) uint16_t weights[kQueries][kTokens + 8];
  alignas(32) float totals[kQueries][kWide + 4];
  alignas(32) uint16_t tail[kPage][kWide];  // values of a page that is not full, and zeros
};

__device__ __forceinline__ const __nv_bfloat16* halves(const uint16_t* bits) {
  return reinterpret_cast<const __nv_bfloat16*>(bits);
}

using Rows = nvcuda::wmma::fragment<
    nvcuda::wmma::matrix_a, kCube, kCube, kCube, __nv_bfloat16, nvcuda::wmma::row_major>;
using Columns = nvcuda::wmma::fragment<
    nvcuda::wmma::matrix_b, kCube, kCube, kCube, __nv_bfloat16, nvcuda::wmma::row_major>;
using Sums = nvcuda::wmma::fragment<nvcuda::wmma::accumulator, kCube, kCube, kCube, float>;

// kQueries_ at once, for heads of up to kWide.
template <int kQueries_, int kWide>
struct TensorCores {
  using Value = uint16_t;
  static constexpr int kQueries = kQueries_;
  static constexpr int kBlocks = kQueries == 16 ? 4 : 3;  // per multiprocessor: as many as go without spills
  using Scratch = TensorScratch<kQueries, kWide>;
  static constexpr int kTokens = Scratch::kTokens, kPages = kTokens / kPage;
  static constexpr int kLanes = kThreads / kQueries;  // threads of a query, in softmax
  static constexpr int kScores = kTokens / kLanes;    // of a thread

  // Warp by warp, a cube of the queries' products with a page of keys.
  static __device__ __forceinline__ void score(const Chunk<uint16_t>& chunk, int64_t token, int there, Scratch& own) {
    const int warp = threadIdx.x / kWarp, query = warp / kPages * kCube, first = warp % kPages * kPage;
    if (query >= chunk.count || first >= there) return;
    const uint16_t* const keys = chunk.keys(token + first);
    Sums sums;
    nvcuda::wmma::fill_fragment(sums, 0.0f);
    for (int i = 0; i < int(chunk.s.d); i += kCube) {
      Rows rows;
      Columns columns;
      nvcuda::wmma::load_matrix_sync(rows, halves(&own.queries[query][i]), kWide + 8);
      nvcuda::wmma::load_matrix_sync(columns, halves(keys + i * kPage), kPage);
      nvcuda::wmma::mma_sync(sums, rows, columns, sums);
    }
    nvcuda::wmma::store_matrix_sync(&own.scores[query][first], sums, kTokens + 4, nvcuda::wmma::mem_row_major);
  }

  // totals += weights x values: a warp adds up 16 columns for 16 queries.
  static __device__ __forceinline__ void add(const Chunk<uint16_t>& chunk, int64_t token, int there, Scratch& own) {
    const int d = int(chunk.s.d), across = d / kCube, down = (chunk.count + kCube - 1) / kCube;
    for (int cube = threadIdx.x / kWarp; cube < across * down; cube += kThreads / kWarp) {
      const int query = cube / across * kCube, column = cube % across * kCube;
      Sums sums;
      nvcuda::wmma::load_matrix_sync(sums, &own.totals[query][column], kWide + 4, nvcuda::wmma::mem_row_major);
      for (int first = 0; first < there; first += kPage) {
        const bool full = first + kPage <= there;
        const uint16_t* const values = full ? chunk.values(token + first) + column : &own.tail[0][column];
        Rows rows;
        Columns columns;
        nvcuda::wmma::load_matrix_sync(rows, halves(&own.weights[query][first]), kTokens + 8);
        nvcuda::wmma::load_matrix_sync(columns, halves(values), full ? unsigned(chunk.s.width) : kWide);
        nvcuda::wmma::mma_sync(sums, rows, columns, sums);
      }
      nvcuda::wmma::store_matrix_sync(&own.totals[query][column], sums, kWide + 4, nvcuda::wmma::mem_row_major);
    }
  }

  // All threads of the block must call it.
  static __device__ __forceinline__ void attend(const Chunk<uint16_t>& chunk) {
    __shared__ Scratch own;
    const DecodeStep<uint16_t>& s = chunk.s;
    const int query = threadIdx.x / kLanes, lane = threadIdx.x % kLanes, d = int(s.d);
    float largest = -INFINITY, sum = 0;

    // The call before has read its own before its last barrier.
    for (int i = threadIdx.x; i < kQueries * d; i += kThreads) {
      const int of = i / d, at = i % d;
      put(&own.queries[of][at], of < chunk.count ? s.queries[chunk.place(of) * d + at] : 0.0f);
    }
    __syncthreads();

    for (int64_t token = chunk.first; token < chunk.last; token += kTokens) {
      const int there = int(chunk.last - token < kTokens ? chunk.last - token : kTokens);
      score(chunk, token, there, own);
      __syncthreads();

      // Softmax; what lies behind the last token may be anything.
      float scores[kScores], top = largest, more = 0;
#pragma unroll
      for (int j = 0; j < kScores; ++j) {
        const int at = lane + j * kLanes;
        scores[j] = query < chunk.count && at < there ? own.scores[query][at] : -INFINITY;
        top = fmaxf(top, scores[j]);
      }
      top = largest_over<kLanes>(top);
      const bool active = query < chunk.count;
#pragma unroll
      for (int j = 0; j < kScores; ++j) {
        uint16_t* const weight = &own.weights[query][lane + j * kLanes];
        put(weight, active ? expf(scores[j] - top) : 0.0f);
        more += widened(*weight);
      }
      const float shrink = active ? expf(largest - top) : 0.0f;
      sum = sum * shrink + sum_over<kLanes>(more);
      largest = top;
      for (int i = lane; i < d; i += kLanes) {
        own.totals[query][i] = token == chunk.first ? 0.0f : own.totals[query][i] * shrink;
      }

      // The values of a page that is not full.
      const int rest = there % kPage;
      if (rest) {
        const uint16_t* const values = chunk.values(token + there - rest);
        for (int i = threadIdx.x; i < kPage * d; i += kThreads) {
          own.tail[i / d][i % d] = i / d < rest ? values[i / d * s.width + i % d] : uint16_t(0);
        }
      }
      __syncthreads();
      add(chunk, token, there, own);
    }

    __syncthreads();  // all is added up
    if (query >= chunk.count) return;
    const int64_t result = chunk.result(query);
    if (lane == 0) {
      s.sums[2 * result] = largest;  // of a chunk without tokens -inf
      s.sums[2 * result + 1] = sum;
    }
    if (chunk.first >= chunk.last) return;
    for (int i = lane; i < d; i += kLanes) s.totals[result * d + i] = own.totals[query][i];
  }
};

}  // namespace
}  // namespace brorl
