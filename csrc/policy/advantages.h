// Advantages of tokens (GAE), moments and whitening.
// megatron_brorl/ops/reference/advantages.py and algo/advantages.py define them. Tensors are float32 or float64, on the
// CPU or on CUDA. Results do not depend on the number of threads.
#pragma once

#include <optional>
#include <tuple>

#include <ATen/core/Tensor.h>

namespace brorl {

// rewards and values [T]; segment s is starts[s]..starts[s + 1], starts [S + 1] int64. Returns advantages and returns,
// both [T].
std::tuple<at::Tensor, at::Tensor> gae(
    const at::Tensor& rewards, const at::Tensor& values, const at::Tensor& starts, double gamma, double lam);

// values of any shape; weights: the same shape and dtype. Elements of weight 0 are left out, even NaN; other
// weights count once. Returns [3] float64: count, mean, sum of squared deviations from the mean.
at::Tensor moments(const at::Tensor& values, const std::optional<at::Tensor>& weights);

// In place: (values - mean) / std, and 0 everywhere if std is 0. values must be contiguous.
void whiten(const at::Tensor& values, double mean, double std);

}  // namespace brorl
