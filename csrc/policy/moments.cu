// A thread keeps its elements in registers between the sums and the squared deviations, so memory is read once.
#include "policy/moments_cuda.h"

#include "common/block_reduce.h"
#include "common/launch.h"
#include "policy/moments_math.h"

namespace brorl {
namespace {

constexpr int kPerThread = int(kMomentsPerBlock) / kThreads;

template <typename S, typename W>
__global__ void __launch_bounds__(kThreads) moments_kernel(
    const S* values, const W* weights, int64_t n, Moments* parts) {
  const int64_t begin = int64_t(blockIdx.x) * kMomentsPerBlock + threadIdx.x;
  S value[kPerThread];
  W weight[kPerThread];
  double sum[2] = {};  // weights, weighted values
#pragma unroll
  for (int j = 0; j < kPerThread; ++j) {
    const int64_t i = begin + j * kThreads;
    weight[j] = i < n ? (weights ? weights[i] : W(1)) : W(0);
    value[j] = weight[j] != W(0) ? values[i] : S(0);
    sum[0] += double(weight[j]);
    sum[1] += double(weight[j]) * double(value[j]);
  }
  block_sum(sum);
  const double mean = mean_of(sum[1], sum[0]);
  double m2[1] = {};
#pragma unroll
  for (int j = 0; j < kPerThread; ++j) {
    const double deviation = double(value[j]) - mean;
    m2[0] += weight[j] != W(0) ? double(weight[j]) * deviation * deviation : 0;
  }
  block_sum(m2);
  if (threadIdx.x == 0) parts[blockIdx.x] = {sum[0], mean, m2[0]};
}

template <typename S>
__global__ void __launch_bounds__(kThreads) whiten_kernel(
    S* values, double mean, double inverse_std, const bool* mask, int64_t n) {
  const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (i < n) values[i] = !mask || mask[i] ? whitened(values[i], mean, inverse_std) : S(0);
}

template <typename S, typename W>
const char* launch_moments(
    const S* values, const W* weights, int64_t n, double* parts, double* result, cudaStream_t stream) {
  const int64_t blocks = (n + kMomentsPerBlock - 1) / kMomentsPerBlock;
  auto* const found = reinterpret_cast<Moments*>(parts);
  if (blocks) {
    const char* const error =
        launch_kernel(moments_kernel<S, W>, blocks, kThreads, stream, values, weights, n, found);
    if (error) return error;
  }
  return launch_kernel(merge_parts<Moments>, 1, kThreads, stream, found, blocks, reinterpret_cast<Moments*>(result));
}

template <typename S>
const char* launch_whiten(
    S* values, double mean, double inverse_std, const bool* mask, int64_t n, cudaStream_t stream) {
  if (!n) return nullptr;
  const int64_t blocks = (n + kThreads - 1) / kThreads;
  return launch_kernel(whiten_kernel<S>, blocks, kThreads, stream, values, mean, inverse_std, mask, n);
}

}  // namespace

BRORL_MOMENTS_LAUNCH(float, float) { return launch_moments(values, weights, n, parts, result, stream); }
BRORL_MOMENTS_LAUNCH(float, bool) { return launch_moments(values, weights, n, parts, result, stream); }
BRORL_MOMENTS_LAUNCH(double, double) { return launch_moments(values, weights, n, parts, result, stream); }
BRORL_MOMENTS_LAUNCH(double, bool) { return launch_moments(values, weights, n, parts, result, stream); }
BRORL_WHITEN_LAUNCH(float) { return launch_whiten(values, mean, inverse_std, mask, n, stream); }
BRORL_WHITEN_LAUNCH(double) { return launch_whiten(values, mean, inverse_std, mask, n, stream); }

}  // namespace brorl
