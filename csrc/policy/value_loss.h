// The critic's loss per token. megatron_brorl/ops/reference/advantages.py defines it.
#pragma once

#include <tuple>

#include <ATen/core/Tensor.h>

namespace brorl {

// All inputs [R] in float32 or float64, on the CPU or on CUDA. Returns three tensors [R]: the weighted loss of each
// token, its gradient with respect to values, and 1 if clipping made that gradient 0.
std::tuple<at::Tensor, at::Tensor, at::Tensor> value_loss(
    const at::Tensor& values, const at::Tensor& old_values, const at::Tensor& returns, const at::Tensor& weights,
    double clip);

}  // namespace brorl
