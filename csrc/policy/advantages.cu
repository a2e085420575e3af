// One thread per segment, and one block for the moments: these ops are a small part of a training step, so the
// kernels are kept simple.
#include "policy/advantages_cuda.h"

#include "common/launch.h"
#include "policy/advantages_math.h"

namespace brorl {
namespace {

constexpr int kThreads = 256;

int64_t blocks_of(int64_t n) { return (n + kThreads - 1) / kThreads; }

__device__ __forceinline__ int64_t thread_index() { return int64_t(blockIdx.x) * kThreads + threadIdx.x; }

template <typename S>
__global__ void gae_kernel(
    const S* rewards, const S* values, const int64_t* starts, int64_t segments, double gamma, double lambda,
    S* advantages, S* returns) {
  const int64_t s = thread_index();
  if (s >= segments) return;
  const int64_t begin = starts[s];
  gae_segment(
      rewards + begin, values + begin, starts[s + 1] - begin, gamma, lambda, advantages + begin, returns + begin);
}

// Return the sum of x over the block to every thread, in a fixed order. All threads must call it.
__device__ double block_sum(double x) {
  __shared__ double of_thread[kThreads];
  of_thread[threadIdx.x] = x;
  __syncthreads();
  for (int step = kThreads / 2; step; step /= 2) {
    if (threadIdx.x < step) of_thread[threadIdx.x] += of_thread[threadIdx.x + step];
    __syncthreads();
  }
  const double sum = of_thread[0];
  __syncthreads();  // The next call writes to the same memory.
  return sum;
}

// Two passes, because sums of squares of the values themselves lose the spread of values far from zero.
template <typename S>
__global__ void moments_kernel(const S* values, const S* weights, int64_t n, double* result) {
  double count = 0, sum = 0, m2 = 0;
  for (int64_t i = threadIdx.x; i < n; i += kThreads) {
    if (weights && weights[i] == 0) continue;
    count += 1;
    sum += double(values[i]);
  }
  count = block_sum(count);
  sum = block_sum(sum);
  const double mean = count ? sum / count : 0;
  for (int64_t i = threadIdx.x; i < n; i += kThreads) {
    const double deviation = weights && weights[i] == 0 ? 0 : double(values[i]) - mean;
    m2 += deviation * deviation;
  }
  m2 = block_sum(m2);
  if (threadIdx.x) return;
  result[0] = count;
  result[1] = mean;
  result[2] = m2;
}

template <typename S>
__global__ void whiten_kernel(S* values, int64_t n, double mean, double inverse_std) {
  const int64_t i = thread_index();
  if (i < n) values[i] = whitened(values[i], mean, inverse_std);
}

}  // namespace

template <typename S>
const char* gae_launch(
    const S* rewards, const S* values, const int64_t* starts, int64_t segments, double gamma, double lambda,
    S* advantages, S* returns, cudaStream_t stream) {
  if (!segments) return nullptr;
  return launch_kernel(
      gae_kernel<S>, blocks_of(segments), kThreads, stream, rewards, values, starts, segments, gamma, lambda,
      advantages, returns);
}

template <typename S>
const char* moments_launch(const S* values, const S* weights, int64_t n, double* result, cudaStream_t stream) {
  return launch_kernel(moments_kernel<S>, 1, kThreads, stream, values, weights, n, result);
}

template <typename S>
const char* whiten_launch(S* values, int64_t n, double mean, double inverse_std, cudaStream_t stream) {
  if (!n) return nullptr;
  return launch_kernel(whiten_kernel<S>, blocks_of(n), kThreads, stream, values, n, mean, inverse_std);
}

#define BRORL_INSTANTIATE(S)                                                                              \
  template const char* gae_launch<S>(                                                                     \
      const S*, const S*, const int64_t*, int64_t, double, double, S*, S*, cudaStream_t);                 \
  template const char* moments_launch<S>(const S*, const S*, int64_t, double*, cudaStream_t);             \
  template const char* whiten_launch<S>(S*, int64_t, double, double, cudaStream_t);
BRORL_INSTANTIATE(float)
BRORL_INSTANTIATE(double)

}  // namespace brorl
