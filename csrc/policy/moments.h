// Moments of a tensor and whitening by them, in one pass over memory each.
#pragma once

#include <optional>

#include <ATen/core/Tensor.h>

namespace brorl {

// values: float32 or float64, any shape, on the CPU or on CUDA; weights: the same shape, dtype of values or bool; 0
// leaves an element out. Returns [3] float64: sum of weights, mean, weighted sum of squared deviations.
at::Tensor moments(const at::Tensor& values, const std::optional<at::Tensor>& weights);

// In place: (values - mean) / std where mask is true (everywhere without one), else 0; all 0 where std is 0. values
// must be contiguous; mask: bool, the same shape.
void whiten(const at::Tensor& values, double mean, double std, const std::optional<at::Tensor>& mask);

}  // namespace brorl
