// Moments and sums over all tokens, by a kernel of many blocks and one that merges them. The order of all sums depends
// on the number of tokens only.
#pragma once

#include "common/launch.h"
#include "policy/advantages_cuda.h"

namespace brorl {

constexpr int kThreads = 256, kWarp = 32, kWarps = kThreads / kWarp;
constexpr int kPerThread = kTokensPerBlock / kThreads;

// Of some tokens: the count, mean and sum of squared deviations of each of M columns, then sums of N other columns.
// Sums of squares instead of deviations would lose the spread of values far from zero.
template <int M, int N>
struct Partial {
  static constexpr int kWidth = 1 + 2 * M + N;
  double x[kWidth];
};

// Merge b into a (Chan et al. 1983, eq. 2.1).
template <int M, int N>
__device__ void merge(Partial<M, N>& a, const Partial<M, N>& b) {
  if (b.x[0] == 0) return;
  const double count = a.x[0] + b.x[0], share = b.x[0] / count;
#pragma unroll
  for (int m = 0; m < M; ++m) {
    double &mean = a.x[1 + 2 * m], &m2 = a.x[2 + 2 * m];
    const double delta = b.x[1 + 2 * m] - mean;
    mean += delta * share;
    m2 += b.x[2 + 2 * m] + delta * delta * (a.x[0] * share);
  }
#pragma unroll
  for (int n = 1 + 2 * M; n < a.kWidth; ++n) a.x[n] += b.x[n];
  a.x[0] = count;
}

// Write the merged partials of all threads to row `blockIdx.x` of a table.
template <int M, int N>
__device__ void write_block(Partial<M, N>& partial, double* table) {
  __shared__ Partial<M, N> warp_partials[kWarps];
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    Partial<M, N> other;
#pragma unroll
    for (int n = 0; n < partial.kWidth; ++n) other.x[n] = __shfl_down_sync(0xffffffffu, partial.x[n], offset);
    merge(partial, other);
  }
  if (threadIdx.x % kWarp == 0) warp_partials[threadIdx.x / kWarp] = partial;
  __syncthreads();
  if (threadIdx.x) return;
  for (int warp = 1; warp < kWarps; ++warp) merge(partial, warp_partials[warp]);
#pragma unroll
  for (int n = 0; n < partial.kWidth; ++n) table[int64_t(blockIdx.x) * partial.kWidth + n] = partial.x[n];
}

// Index of this thread's k-th token.
__device__ __forceinline__ int64_t token_index(int k) {
  return int64_t(blockIdx.x) * kTokensPerBlock + k * kThreads + threadIdx.x;
}

// Set the count, and the moments of column m, from the values of this thread whose bit in `included` is set.
template <typename S, int M, int N>
__device__ void set_moments(Partial<M, N>& partial, int m, const S (&values)[kPerThread], unsigned included) {
  double count = 0, sum = 0, m2 = 0;
#pragma unroll
  for (int k = 0; k < kPerThread; ++k) {
    if (included >> k & 1) count += 1, sum += double(values[k]);
  }
  const double mean = count ? sum / count : 0;
#pragma unroll
  for (int k = 0; k < kPerThread; ++k) {
    const double deviation = double(values[k]) - mean;
    if (included >> k & 1) m2 += deviation * deviation;
  }
  partial.x[0] = count;
  partial.x[1 + 2 * m] = mean;
  partial.x[2 + 2 * m] = m2;
}

// Merge the rows of a table with one block.
template <int M, int N>
__global__ void merge_kernel(const double* table, int64_t rows, double* result) {
  Partial<M, N> partial{};
  for (int64_t row = threadIdx.x; row < rows; row += kThreads) {
    Partial<M, N> other;
#pragma unroll
    for (int n = 0; n < partial.kWidth; ++n) other.x[n] = table[row * partial.kWidth + n];
    merge(partial, other);
  }
  write_block(partial, result);
}

// Run a kernel that calls write_block for each block of tokens, and merge the rows that it writes.
// table [1 + token_blocks(tokens), kWidth]: its first row gets the result.
template <int M, int N, typename... Parameters, typename... Arguments>
const char* reduce_tokens(
    void (*kernel)(Parameters...), int64_t tokens, double* table, cudaStream_t stream, Arguments... arguments) {
  const int64_t blocks = token_blocks(tokens);
  double* const rows = table + Partial<M, N>::kWidth;
  const char* error = blocks ? launch_kernel(kernel, blocks, kThreads, stream, arguments..., rows) : nullptr;
  return error ? error : launch_kernel(merge_kernel<M, N>, 1, kThreads, stream, rows, blocks, table);
}

}  // namespace brorl
