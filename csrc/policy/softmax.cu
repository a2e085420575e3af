// One block of threads per row of logits.
#include "policy/softmax_cuda.h"

#include <cuda_bf16.h>

#include "common/launch.h"
#include "policy/softmax_math.h"

namespace brorl {
namespace {

constexpr int kThreads = 512, kWarp = 32;
constexpr int kPerThread = 8;  // logits per thread between reading and writing a tile

template <typename S>
__device__ SoftmaxPart<S> shuffled(SoftmaxPart<S> part, int offset) {
  constexpr unsigned all = 0xffffffffu;
  return {
      __shfl_down_sync(all, part.largest, offset), __shfl_down_sync(all, part.sum, offset),
      __shfl_down_sync(all, part.weighted, offset)};
}

// Reduce in a fixed order, so that results are reproducible. Only thread 0 gets the result.
__device__ SoftmaxPart<double> merge_block(SoftmaxPart<double> part, double inverse_temperature) {
  __shared__ SoftmaxPart<double> of_warps[kThreads / kWarp];
  for (int offset = kWarp / 2; offset > 0; offset /= 2) part = merge(part, shuffled(part, offset), inverse_temperature);
  if (threadIdx.x % kWarp == 0) of_warps[threadIdx.x / kWarp] = part;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int warp = 1; warp < kThreads / kWarp; ++warp) part = merge(part, of_warps[warp], inverse_temperature);
  }
  return part;
}

template <typename S>
__global__ void __launch_bounds__(kThreads) statistics_kernel(
    const S* logits, const int64_t* ids, double* statistics, int64_t vocab, int64_t start, double inverse_temperature) {
  constexpr S infinity = S(INFINITY);
  const S* const row = logits + int64_t(blockIdx.x) * vocab;
  const S inverse = S(inverse_temperature);
  SoftmaxPart<S> part{-infinity, 0, 0};
  for (int64_t tile = 0; tile < vocab; tile += kThreads * kPerThread) {
    S z[kPerThread], largest = -infinity;
#pragma unroll
    for (int k = 0; k < kPerThread; ++k) {
      const int64_t j = tile + k * kThreads + threadIdx.x;
      z[k] = j < vocab ? row[j] : -infinity;
      largest = z[k] > largest ? z[k] : largest;
    }
    const S base = largest == -infinity ? S(0) : largest;
    SoftmaxPart<S> own{largest, 0, 0};
#pragma unroll
    for (int k = 0; k < kPerThread; ++k) {
      const S x = (z[k] - base) * inverse, e = exp(x);
      own.sum += e;
      own.weighted += e == 0 ? S(0) : e * x;  // 0 * -inf would be NaN
    }
    part = merge(part, own, inverse);
  }
  const auto total = merge_block({double(part.largest), double(part.sum), double(part.weighted)}, inverse_temperature);
  if (threadIdx.x == 0) {
    const int64_t target = ids[blockIdx.x] - start;
    double* const out = statistics + 4 * int64_t(blockIdx.x);
    out[0] = total.largest;
    out[1] = total.sum;
    out[2] = total.weighted;
    out[3] = target >= 0 && target < vocab ? double(row[target]) : 0.0;
  }
}

template <typename S, bool narrow>
__global__ void __launch_bounds__(kThreads) gradient_kernel(
    S* logits, const int64_t* ids, const double* statistics, const S* log_prob_gradient, const S* entropy_gradient,
    int64_t vocab, int64_t start, double inverse_temperature) {
  const int64_t i = blockIdx.x;
  S* const row = logits + i * vocab;
  const double* const s = statistics + 4 * i;
  const int64_t target = ids[i] - start;
  const S largest = S(s[0]), inverse = S(inverse_temperature);
  const auto gradient = softmax_gradient<S>(
      {s[0], s[1], s[2]}, (s[3] - s[0]) * inverse_temperature, log_prob_gradient[i],
      entropy_gradient ? entropy_gradient[i] : S(0), inverse_temperature);
  const bool zero = gradient.constant == 0 && gradient.slope == 0;
  for (int64_t tile = 0; tile < vocab; tile += kThreads * kPerThread) {
    S d[kPerThread];
#pragma unroll
    for (int k = 0; k < kPerThread; ++k) {
      const int64_t j = tile + k * kThreads + threadIdx.x;
      d[k] = 0;
      if (j >= vocab) continue;
      if (!zero) {
        const S x = (row[j] - largest) * inverse, e = exp(x);
        d[k] = e == 0 ? S(0) : e * (gradient.constant + gradient.slope * x);
      }
      if (j == target) d[k] = gradient.at_target;
    }
    // A tile of bfloat16 overwrites only logits that were already read, this tile's included.
    if (narrow) __syncthreads();
#pragma unroll
    for (int k = 0; k < kPerThread; ++k) {
      const int64_t j = tile + k * kThreads + threadIdx.x;
      if (j >= vocab) continue;
      if constexpr (narrow) {
        reinterpret_cast<__nv_bfloat16*>(row)[j] = __float2bfloat16_rn(d[k]);
      } else {
        row[j] = d[k];
      }
    }
  }
}

}  // namespace

template <typename S>
const char* softmax_statistics_launch(
    const S* logits, const int64_t* ids, double* statistics, int64_t rows, int64_t vocab, int64_t start,
    double temperature, CUstream_st* stream) {
  if (rows == 0) return nullptr;
  return launch_kernel(
      statistics_kernel<S>, rows, kThreads, stream, logits, ids, statistics, vocab, start, 1 / temperature);
}

template <typename S>
const char* softmax_gradient_launch(
    S* logits, const int64_t* ids, const double* statistics, const S* log_prob_gradient, const S* entropy_gradient,
    int64_t rows, int64_t vocab, int64_t start, double temperature, bool narrow, CUstream_st* stream) {
  if (rows == 0) return nullptr;
  if constexpr (sizeof(S) == sizeof(float)) {
    if (narrow) {
      return launch_kernel(
          gradient_kernel<S, true>, rows, kThreads, stream, logits, ids, statistics, log_prob_gradient,
          entropy_gradient, vocab, start, 1 / temperature);
    }
  }
  return launch_kernel(
      gradient_kernel<S, false>, rows, kThreads, stream, logits, ids, statistics, log_prob_gradient, entropy_gradient,
      vocab, start, 1 / temperature);
}

#define BRORL_INSTANTIATE(S)                                                                                     \
  template const char* softmax_statistics_launch<S>(                                                             \
      const S*, const int64_t*, double*, int64_t, int64_t, int64_t, double, CUstream_st*);                       \
  template const char* softmax_gradient_launch<S>(                                                               \
      S*, const int64_t*, const double*, const S*, const S*, int64_t, int64_t, int64_t, double, bool, CUstream_st*);
BRORL_INSTANTIATE(float)
BRORL_INSTANTIATE(double)

}  // namespace brorl
