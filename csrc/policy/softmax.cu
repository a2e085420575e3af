// One block of threads per row of logits. A thread reads and writes four elements at a time. Exponentials are computed
// as powers of 2, for which a GPU has an instruction.
#include "policy/softmax_cuda.h"

#include <cuda_bf16.h>

#include "common/exp2.h"
#include "common/launch.h"
#include "policy/softmax_math.h"

namespace brorl {
namespace {

constexpr int kThreads = 512, kWarp = 32, kWarps = kThreads / kWarp;
constexpr int kWide = 4, kVectors = 2;  // logits per access, and accesses per thread between reading and writing a tile
constexpr int kTile = kThreads * kVectors * kWide;
constexpr double kLog2E = 1.4426950408889634, kLn2 = 0.6931471805599453;
constexpr unsigned kAllLanes = 0xffffffffu;

template <typename T>
struct alignas(kWide * sizeof(T)) Four {
  T x[kWide];
};

// Index of the first logit of this thread's k-th vector of a tile.
__device__ __forceinline__ int index_of(int tile, int k) { return tile + (k * kThreads + int(threadIdx.x)) * kWide; }

// Return logits j to j + 3, with -inf after the end of the row.
template <typename S>
__device__ Four<S> read(const S* row, int j, int vocab) {
  if (j + kWide <= vocab) return *reinterpret_cast<const Four<S>*>(row + j);
  Four<S> z;
#pragma unroll
  for (int c = 0; c < kWide; ++c) z.x[c] = j + c < vocab ? row[j + c] : -S(INFINITY);
  return z;
}

template <typename T>
__device__ void write(T* row, int j, int vocab, const Four<T>& values) {
  if (j + kWide <= vocab) {
    *reinterpret_cast<Four<T>*>(row + j) = values;
    return;
  }
#pragma unroll
  for (int c = 0; c < kWide; ++c) {
    if (j + c < vocab) row[j + c] = values.x[c];
  }
}

// (z - base) factor, but at least a number whose power of 2 is 0, because 0 * -inf would be NaN. NaN stays NaN.
template <typename S>
__device__ __forceinline__ S exponent(S z, S base, S factor) {
  constexpr S lowest = sizeof(S) == sizeof(float) ? -200 : -1100;
  const S y = (z - base) * factor;
  return y < lowest ? lowest : y;
}

// Return the maximum over the block to all threads.
template <typename S>
__device__ S block_max(S x) {
  __shared__ S warp_maxima[kWarps];
  for (int offset = kWarp / 2; offset > 0; offset /= 2) x = fmax(x, __shfl_down_sync(kAllLanes, x, offset));
  if (threadIdx.x % kWarp == 0) warp_maxima[threadIdx.x / kWarp] = x;
  __syncthreads();
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) x = fmax(x, warp_maxima[warp]);
  return x;
}

struct Sums {
  double x, y;
};

// Return the sums of x and y over the block to thread 0. The order is fixed, so that results are reproducible.
__device__ Sums block_sums(double x, double y) {
  __shared__ Sums warp_sums[kWarps];
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    x += __shfl_down_sync(kAllLanes, x, offset);
    y += __shfl_down_sync(kAllLanes, y, offset);
  }
  if (threadIdx.x % kWarp == 0) warp_sums[threadIdx.x / kWarp] = {x, y};
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int warp = 1; warp < kWarps; ++warp) x += warp_sums[warp].x, y += warp_sums[warp].y;
  }
  return {x, y};
}

template <typename S>
__global__ void __launch_bounds__(kThreads) statistics_kernel(
    const S* logits, int64_t stride, const int64_t* ids, double* statistics, int vocab, int64_t start,
    double inverse_temperature) {
  constexpr S infinity = S(INFINITY);
  const S* const row = logits + int64_t(blockIdx.x) * stride;
  const S factor = S(inverse_temperature * kLog2E);
  // Statistics of this thread's logits, as in SoftmaxPart, but with powers of 2.
  S largest = -infinity, sum = 0, weighted = 0;
  for (int tile = 0; tile < vocab; tile += kTile) {
    Four<S> z[kVectors];
    S new_largest = largest;
#pragma unroll
    for (int k = 0; k < kVectors; ++k) z[k] = read(row, index_of(tile, k), vocab);
#pragma unroll
    for (int k = 0; k < kVectors * kWide; ++k) new_largest = fmax(new_largest, z[k / kWide].x[k % kWide]);
    const S base = new_largest == -infinity ? S(0) : new_largest;
    S tile_sum = 0, tile_weighted = 0;
#pragma unroll
    for (int k = 0; k < kVectors * kWide; ++k) {
      const S y = exponent(z[k / kWide].x[k % kWide], base, factor), e = fast_exp2(y);
      tile_sum += e;
      tile_weighted += e * y;
    }
    const S shift = exponent(largest, base, factor), scale = fast_exp2(shift);
    weighted = scale * (weighted + shift * sum) + tile_weighted;
    sum = scale * sum + tile_sum;
    largest = new_largest;
  }

  const S row_largest = block_max(largest);
  const S shift = exponent(largest, row_largest == -infinity ? S(0) : row_largest, factor), scale = fast_exp2(shift);
  const Sums total = block_sums(scale * sum, scale * (weighted + shift * sum));
  if (threadIdx.x == 0) {
    const int64_t target = ids[blockIdx.x] - start;
    double* const out = statistics + 4 * int64_t(blockIdx.x);
    out[0] = row_largest;
    out[1] = total.x;
    out[2] = total.y * kLn2;
    out[3] = target >= 0 && target < vocab ? double(row[target]) : 0.0;
  }
}

template <typename S, bool narrow>
__global__ void __launch_bounds__(kThreads) gradient_kernel(
    S* logits, int64_t stride, const int64_t* ids, const double* statistics, const S* log_prob_gradient,
    const S* entropy_gradient, int vocab, int64_t start, double inverse_temperature) {
  const int64_t i = blockIdx.x;
  S* const row = logits + i * stride;
  const double* const s = statistics + 4 * i;
  __shared__ SoftmaxGradient<S> gradient;
  if (threadIdx.x == 0) {
    gradient = softmax_gradient<S>(
        {s[0], s[1], s[2]}, (s[3] - s[0]) * inverse_temperature, log_prob_gradient[i],
        entropy_gradient ? entropy_gradient[i] : S(0), inverse_temperature);
  }
  __syncthreads();
  const S largest = S(s[0]), factor = S(inverse_temperature * kLog2E);
  const S constant = gradient.constant, slope = gradient.slope * S(kLn2);
  const bool zero = constant == 0 && slope == 0;  // a masked or clipped token
  const int64_t local_id = ids[i] - start;
  // If another rank has the target, -kWide matches no vector.
  const int target = local_id >= 0 && local_id < vocab ? int(local_id) : -kWide;
  for (int tile = 0; tile < vocab; tile += kTile) {
    Four<S> d[kVectors] = {};
    if (!zero) {
#pragma unroll
      for (int k = 0; k < kVectors; ++k) d[k] = read(row, index_of(tile, k), vocab);
#pragma unroll
      for (int k = 0; k < kVectors * kWide; ++k) {
        S& x = d[k / kWide].x[k % kWide];
        const S y = exponent(x, largest, factor);
        x = fast_exp2(y) * (constant + slope * y);
      }
    }
    // A tile of bfloat16 overwrites only logits that were already read, this tile's included.
    if (narrow) __syncthreads();
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      const int j = index_of(tile, k);
      if (target >= j && target < j + kWide) {
#pragma unroll
        for (int c = 0; c < kWide; ++c) d[k].x[c] = target == j + c ? gradient.at_target : d[k].x[c];
      }
      if constexpr (narrow) {
        Four<__nv_bfloat16> rounded;
#pragma unroll
        for (int c = 0; c < kWide; ++c) rounded.x[c] = __float2bfloat16_rn(d[k].x[c]);
        write(reinterpret_cast<__nv_bfloat16*>(row), j, vocab, rounded);
      } else {
        write(row, j, vocab, d[k]);
      }
    }
  }
}

}  // namespace

template <typename S>
const char* softmax_statistics_launch(
    const S* logits, int64_t stride, const int64_t* ids, double* statistics, int64_t rows, int64_t vocab, int64_t start,
    double temperature, CUstream_st* stream) {
  if (rows == 0) return nullptr;
  return launch_kernel(
      statistics_kernel<S>, rows, kThreads, stream, logits, stride, ids, statistics, int(vocab), start,
      1 / temperature);
}

template <typename S>
const char* softmax_gradient_launch(
    S* logits, int64_t stride, const int64_t* ids, const double* statistics, const S* log_prob_gradient,
    const S* entropy_gradient, int64_t rows, int64_t vocab, int64_t start, double temperature, bool narrow,
    CUstream_st* stream) {
  if (rows == 0) return nullptr;
  auto kernel = gradient_kernel<S, false>;
  if constexpr (sizeof(S) == sizeof(float)) kernel = narrow ? gradient_kernel<S, true> : kernel;
  return launch_kernel(
      kernel, rows, kThreads, stream, logits, stride, ids, statistics, log_prob_gradient, entropy_gradient, int(vocab),
      start, 1 / temperature);
}

#define BRORL_INSTANTIATE(S)                                                                               \
  template const char* softmax_statistics_launch<S>(                                                       \
      const S*, int64_t, const int64_t*, double*, int64_t, int64_t, int64_t, double, CUstream_st*);        \
  template const char* softmax_gradient_launch<S>(                                                         \
      S*, int64_t, const int64_t*, const double*, const S*, const S*, int64_t, int64_t, int64_t, double, bool, \
      CUstream_st*);
BRORL_INSTANTIATE(float)
BRORL_INSTANTIATE(double)

}  // namespace brorl
