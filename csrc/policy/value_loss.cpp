#include "policy/value_loss.h"

#include <algorithm>

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include "common/cuda_launch.h"
#include "common/tensor_checks.h"
#include "policy/advantages.h"
#include "policy/advantages_cuda.h"
#include "policy/value_loss_math.h"

namespace brorl {

using at::Tensor;

std::tuple<Tensor, Tensor> value_loss(
    const Tensor& values, const Tensor& old_values, const Tensor& returns, const Tensor& weights, double clip) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const Tensor v = floating_vector(values, "values", "[R]");
  const auto dtype = v.scalar_type();
  const Tensor old = matching(old_values, "old_values", v.sizes(), dtype, v);
  const Tensor target = matching(returns, "returns", v.sizes(), dtype, v);
  const Tensor weight = matching(weights, "weights", v.sizes(), dtype, v);
  TORCH_CHECK_VALUE(clip >= 0, "clip must be at least 0 (infinity: unclipped), got ", clip);
  const int64_t rows = v.numel(), blocks = on_device(v) ? token_blocks(rows) : 0;
  const Tensor gradient = at::empty_like(v);
  const Tensor table = at::empty({1 + blocks, kValueSums}, v.options().dtype(at::kDouble));
  double* const sums = table.mutable_data_ptr<double>();
  with_type(v, [&](auto zero) {
    using S = decltype(zero);
    const ValuePointers<S> p{
        v.const_data_ptr<S>(), old.const_data_ptr<S>(), target.const_data_ptr<S>(), weight.const_data_ptr<S>()};
    S* const slope = gradient.mutable_data_ptr<S>();
#ifdef BRORL_CUDA
    if (on_device(v)) {
      const c10::DeviceGuard guard(v.device());
      check_launch("value_loss", value_loss_launch(p, S(clip), rows, slope, sums, current_stream(v)));
      return;
    }
#endif
    const Tensor loss = at::empty_like(v), clipped = at::empty_like(v);
    S *const losses = loss.mutable_data_ptr<S>(), *const clipped_flags = clipped.mutable_data_ptr<S>();
#pragma omp simd
    for (int64_t i = 0; i < rows; ++i) {
      const auto token = value_loss_of(p.values[i], p.old_values[i], p.returns[i], p.weights[i], S(clip));
      losses[i] = token.loss;
      slope[i] = token.gradient;
      clipped_flags[i] = token.clipped;
    }
    const Tensor return_moments = moments(target, weight), residual_moments = moments(target.sub(v), weight);
    std::copy_n(return_moments.const_data_ptr<double>(), 3, sums);
    std::copy_n(residual_moments.const_data_ptr<double>() + 1, 2, sums + 3);
    sums[5] = loss.sum().item<double>();
    sums[6] = clipped.sum().item<double>();
  });
  return {gradient, table.select(0, 0)};
}

}  // namespace brorl
