// The critic's loss. megatron_brorl/ops/reference/value.py defines it.
#pragma once

#include <tuple>

#include <ATen/core/Tensor.h>

namespace brorl {

// All inputs [R] in float32 or float64, on the CPU or on CUDA. Returns loss [], sums [8] float64 (the fields of
// ValueSums in value_loss_math.h) and the gradient of the loss with respect to values [R].
std::tuple<at::Tensor, at::Tensor, at::Tensor> value_loss(
    const at::Tensor& values, const at::Tensor& old_values, const at::Tensor& returns, const at::Tensor& weights,
    double clip);

}  // namespace brorl
