// A thread keeps its tokens in registers between the sums and the squared deviations, so memory is read once.
#include "policy/value_loss_cuda.h"

#include "common/block_reduce.h"
#include "common/launch.h"
#include "policy/value_loss_math.h"

namespace brorl {
namespace {

constexpr int kPerThread = int(kValueTokensPerBlock) / kThreads;

template <typename S>
__global__ void __launch_bounds__(kThreads) value_loss_kernel(
    const S* values, const S* old_values, const S* returns, const S* weights, S clip, int64_t rows, S* gradient,
    ValueSums* parts) {
  const int64_t begin = int64_t(blockIdx.x) * kValueTokensPerBlock + threadIdx.x;
  S value[kPerThread], target[kPerThread];
  unsigned counted = 0;    // one bit per token
  double sum[5] = {};  // loss, clipped, tokens, returns, residuals
#pragma unroll
  for (int j = 0; j < kPerThread; ++j) {
    const int64_t t = begin + j * kThreads;
    const S weight = t < rows ? weights[t] : S(0);
    const bool counts = weight != 0;
    value[j] = counts ? values[t] : S(0);
    target[j] = counts ? returns[t] : S(0);
    const ValueToken<S> token = value_token(value[j], counts ? old_values[t] : S(0), target[j], clip);
    if (t < rows) gradient[t] = counts ? weight * token.derivative : S(0);
    if (!counts) continue;
    counted |= 1u << j;
    sum[0] += double(weight) * double(token.objective);
    sum[1] += token.clipped;
    sum[2] += 1;
    sum[3] += double(target[j]);
    sum[4] += double(target[j]) - double(value[j]);
  }
  block_sum(sum);
  const double return_mean = mean_of(sum[3], sum[2]), residual_mean = mean_of(sum[4], sum[2]);
  double m2[2] = {};
#pragma unroll
  for (int j = 0; j < kPerThread; ++j) {
    const bool counts = counted >> j & 1u;
    const double a = counts ? double(target[j]) - return_mean : 0;
    const double b = counts ? double(target[j]) - double(value[j]) - residual_mean : 0;
    m2[0] += a * a;
    m2[1] += b * b;
  }
  block_sum(m2);
  if (threadIdx.x == 0) {
    parts[blockIdx.x] = {sum[0], sum[1], {sum[2], return_mean, m2[0]}, {sum[2], residual_mean, m2[1]}};
  }
}

template <typename S>
const char* launch(
    const S* values, const S* old_values, const S* returns, const S* weights, double clip, int64_t rows, S* gradient,
    double* parts, double* sums, cudaStream_t stream) {
  const int64_t blocks = (rows + kValueTokensPerBlock - 1) / kValueTokensPerBlock;
  auto* const found = reinterpret_cast<ValueSums*>(parts);
  if (blocks) {
    const char* const error = launch_kernel(
        value_loss_kernel<S>, blocks, kThreads, stream, values, old_values, returns, weights, S(clip), rows, gradient,
        found);
    if (error) return error;
  }
  return launch_kernel(
      merge_parts<ValueSums>, 1, kThreads, stream, found, blocks, reinterpret_cast<ValueSums*>(sums));
}

}  // namespace

BRORL_VALUE_LOSS_LAUNCH(float) {
  return launch(values, old_values, returns, weights, clip, rows, gradient, parts, sums, stream);
}

BRORL_VALUE_LOSS_LAUNCH(double) {
  return launch(values, old_values, returns, weights, clip, rows, gradient, parts, sums, stream);
}

}  // namespace brorl
