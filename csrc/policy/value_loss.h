// The critic's loss. megatron_brorl/ops/reference/advantages.py defines it.
#pragma once

#include <tuple>

#include <ATen/core/Tensor.h>

namespace brorl {

// All inputs [R] in float32 or float64, on the CPU or on CUDA. Returns the gradient [R] of the loss with respect to
// values, and sums [7] in float64 over the tokens of a weight other than 0: their count, mean and sum of squared
// deviations of the returns, the same two of returns - values, the loss, and the number of tokens whose gradient the
// clipping removed.
std::tuple<at::Tensor, at::Tensor> value_loss(
    const at::Tensor& values, const at::Tensor& old_values, const at::Tensor& returns, const at::Tensor& weights,
    double clip);

}  // namespace brorl
