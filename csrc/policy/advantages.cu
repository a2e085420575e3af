// GAE has one thread per segment, and is kept simple: it is a small part of a training step.
#include "policy/advantages_cuda.h"

#include "common/launch.h"
#include "policy/advantages_math.h"
#include "policy/partial_moments.h"

namespace brorl {
namespace {

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

template <typename S>
__global__ void moments_kernel(const S* values, const S* weights, int64_t n, double* table) {
  S thread_values[kPerThread];
  unsigned included = 0;  // bit k: the k-th value exists and its weight is not 0
#pragma unroll
  for (int k = 0; k < kPerThread; ++k) {
    const int64_t i = token_index(k);
    thread_values[k] = i < n ? values[i] : S(0);
    included |= unsigned(i < n && (!weights || weights[i] != 0)) << k;
  }
  Partial<1, 0> partial{};  // moments of one column, and no other sums
  set_moments(partial, 0, thread_values, included);
  write_block(partial, table);
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
const char* moments_launch(const S* values, const S* weights, int64_t n, double* table, cudaStream_t stream) {
  return reduce_tokens<1, 0>(moments_kernel<S>, n, table, stream, values, weights, n);
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
