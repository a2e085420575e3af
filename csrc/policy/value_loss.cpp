// One pass over memory: each block of tokens is worked on while it is in cache, its mean first and then the squared
// deviations from it.
#include "policy/value_loss.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include "common/block_sums.h"
#include "common/tensor_checks.h"
#include "policy/value_loss_math.h"

#ifdef BRORL_CUDA
#include "common/cuda_launch.h"
#include "policy/value_loss_cuda.h"
#endif

namespace brorl {
namespace {

using at::Tensor;

constexpr int64_t kSums = sizeof(ValueSums) / sizeof(double);

// A weight of zero masks a token: its other entries may hold anything, so they are replaced, never multiplied by it. A
// replaced token has no gap, so it is neither clipped nor adds to the loss.
template <typename S>
ValueSums reduce(
    const S* values, const S* old_values, const S* returns, const S* weights, S clip, int64_t n, S* gradient) {
  S value[kSumBlock], old[kSumBlock], target[kSumBlock], objective[kSumBlock], clipped[kSumBlock], counts[kSumBlock];
  for (int64_t i = 0; i < n; ++i) {
    const bool unmasked = weights[i] != 0;
    value[i] = unmasked ? values[i] : S(0);
    old[i] = unmasked ? old_values[i] : S(0);
    target[i] = unmasked ? returns[i] : S(0);
    counts[i] = unmasked ? S(1) : S(0);
  }
  for (int64_t i = 0; i < n; ++i) {
    const ValueToken<S> token = value_token(value[i], old[i], target[i], clip);
    gradient[i] = weights[i] * token.derivative;
    objective[i] = weights[i] * token.objective;
    clipped[i] = token.clipped ? S(1) : S(0);
  }
  const double loss = lane_sum(n, [&](int64_t i) { return double(objective[i]); });
  const double at_clip = lane_sum(n, [&](int64_t i) { return double(clipped[i]); });
  const double tokens = lane_sum(n, [&](int64_t i) { return double(counts[i]); });
  const auto residual = [&](int64_t i) { return double(target[i]) - double(value[i]); };
  const double return_mean = mean_of(lane_sum(n, [&](int64_t i) { return double(target[i]); }), tokens);
  const double residual_mean = mean_of(lane_sum(n, residual), tokens);
  const double return_m2 = lane_sum(n, [&](int64_t i) {
    const double deviation = double(target[i]) - return_mean;
    return double(counts[i]) * deviation * deviation;
  });
  const double residual_m2 = lane_sum(n, [&](int64_t i) {
    const double deviation = residual(i) - residual_mean;
    return double(counts[i]) * deviation * deviation;
  });
  return {loss, at_clip, {tokens, return_mean, return_m2}, {tokens, residual_mean, residual_m2}};
}

template <typename S>
void compute(
    const Tensor& values, const Tensor& old_values, const Tensor& returns, const Tensor& weights, double clip,
    const Tensor& gradient, const Tensor& sums) {
  const auto *v = values.const_data_ptr<S>(), *old = old_values.const_data_ptr<S>();
  const auto *target = returns.const_data_ptr<S>(), *weight = weights.const_data_ptr<S>();
  const int64_t rows = values.numel();
  S* const out = gradient.mutable_data_ptr<S>();
  double* const found = sums.mutable_data_ptr<double>();
#ifdef BRORL_CUDA
  if (on_device(values)) {
    const c10::DeviceGuard guard(values.device());
    const int64_t blocks = (rows + kValueTokensPerBlock - 1) / kValueTokensPerBlock;
    const Tensor parts = at::empty({blocks, kSums}, sums.options());
    check_launch("value_loss", value_loss_launch(
        v, old, target, weight, clip, rows, out, parts.mutable_data_ptr<double>(), found, current_stream(values)));
    return;
  }
#endif
  *reinterpret_cast<ValueSums*>(found) = block_sums<ValueSums>(rows, [&](int64_t begin, int64_t n) {
    return reduce<S>(v + begin, old + begin, target + begin, weight + begin, S(clip), n, out + begin);
  });
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor> value_loss(
    const Tensor& values, const Tensor& old_values, const Tensor& returns, const Tensor& weights, double clip) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const Tensor v = floating_vector(values, "values", "[R]");
  const auto dtype = v.scalar_type();
  const Tensor old = matching(old_values, "old_values", v.sizes(), dtype, v);
  const Tensor target = matching(returns, "returns", v.sizes(), dtype, v);
  const Tensor weight = matching(weights, "weights", v.sizes(), dtype, v);
  TORCH_CHECK_VALUE(clip >= 0, "clip must be at least 0 (infinity: unclipped), got ", clip);
  const Tensor gradient = at::empty_like(v), sums = at::empty({kSums}, v.options().dtype(at::kDouble));
  const auto run = [&](auto zero) { compute<decltype(zero)>(v, old, target, weight, clip, gradient, sums); };
  dtype == at::kDouble ? run(0.0) : run(0.0f);
  // Copied, because outputs of an op may not share memory.
  return {sums[0].to(v.options(), false, true), sums, gradient};
}

}  // namespace brorl
