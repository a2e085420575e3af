#include "policy/value_loss.h"

#include <ATen/ops/empty_like.h>

#include "common/cuda_launch.h"
#include "common/tensor_checks.h"
#include "policy/value_loss_math.h"

namespace brorl {

using at::Tensor;

std::tuple<Tensor, Tensor, Tensor> value_loss(
    const Tensor& values, const Tensor& old_values, const Tensor& returns, const Tensor& weights, double clip) {
  const Tensor v = floating_vector(values, "values", "[R]");
  const auto dtype = v.scalar_type();
  const Tensor old = matching(old_values, "old_values", v.sizes(), dtype, v);
  const Tensor target = matching(returns, "returns", v.sizes(), dtype, v);
  const Tensor weight = matching(weights, "weights", v.sizes(), dtype, v);
  TORCH_CHECK_VALUE(clip >= 0, "clip must be at least 0 (infinity: unclipped), got ", clip);
  const Tensor loss = at::empty_like(v), gradient = at::empty_like(v), clipped = at::empty_like(v);
  const int64_t rows = v.numel();
  with_type(v, [&](auto zero) {
    using S = decltype(zero);
    const ValuePointers<S> pointers{
        v.const_data_ptr<S>(), old.const_data_ptr<S>(), target.const_data_ptr<S>(), weight.const_data_ptr<S>(),
        loss.mutable_data_ptr<S>(), gradient.mutable_data_ptr<S>(), clipped.mutable_data_ptr<S>()};
#ifdef BRORL_CUDA
    if (on_device(v)) {
      const c10::DeviceGuard guard(v.device());
      check_launch("value_loss", value_loss_launch(pointers, S(clip), rows, current_stream(v)));
      return;
    }
#endif
#pragma omp simd
    for (int64_t i = 0; i < rows; ++i) value_loss_at(i, pointers, S(clip));
  });
  return {loss, gradient, clipped};
}

}  // namespace brorl
