// Reductions inside one block of CUDA threads, in an order that depends on nothing but the block's size: no atomics.
// For .cu files only.
#pragma once

#include <cstdint>

#include <cuda_runtime.h>

namespace brorl {

constexpr int kThreads = 256, kWarp = 32;
constexpr unsigned kWholeWarp = 0xffffffffu;

// Replace each x[j] by its sum over the block, in every thread. All threads of the block must call it.
template <int N>
__device__ __forceinline__ void block_sum(double (&x)[N]) {
  __shared__ double of_warp[N][kThreads / kWarp];
#pragma unroll
  for (int j = 0; j < N; ++j) {
    for (int step = kWarp / 2; step; step /= 2) x[j] += __shfl_xor_sync(kWholeWarp, x[j], step);
    if (threadIdx.x % kWarp == 0) of_warp[j][threadIdx.x / kWarp] = x[j];
  }
  __syncthreads();
#pragma unroll
  for (int j = 0; j < N; ++j) {
    x[j] = 0;
    for (int warp = 0; warp < kThreads / kWarp; ++warp) x[j] += of_warp[j][warp];
  }
  __syncthreads();  // so that the next call may write
}

// Launched as one block: merge(T, T) over parts[0..count), T made of doubles; T{} where there are none.
template <typename T>
__global__ void merge_parts(const T* parts, int64_t count, T* result) {
  __shared__ T of_thread[kThreads];
  T own{};
  for (int64_t i = threadIdx.x; i < count; i += kThreads) own = merge(own, parts[i]);
  of_thread[threadIdx.x] = own;
  __syncthreads();
  for (int step = kThreads / 2; step; step /= 2) {
    if (threadIdx.x < step) of_thread[threadIdx.x] = merge(of_thread[threadIdx.x], of_thread[threadIdx.x + step]);
    __syncthreads();
  }
  if (threadIdx.x == 0) *result = of_thread[0];
}

}  // namespace brorl
