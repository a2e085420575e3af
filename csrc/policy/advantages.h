// Advantages of tokens (GAE) and of whole rollouts (group-relative), as megatron_brorl/ops/reference/advantages.py defines
// them.
#pragma once

#include <optional>

#include <ATen/core/Tensor.h>

namespace brorl {

// rewards and values [T] in float32 or float64, on the CPU or on CUDA; segment s is starts[s]..starts[s + 1], starts
// [S + 1] int64; mask [T] bool; bootstrap [S]. Writes advantages [T] and returns [T], which may be the memory of rewards
// and values.
void gae(
    const at::Tensor& rewards, const at::Tensor& values, const at::Tensor& starts,
    const std::optional<at::Tensor>& mask, const std::optional<at::Tensor>& bootstrap, double gamma, double lam,
    const at::Tensor& advantages, const at::Tensor& returns);

// rewards [B]; group g is starts[g]..starts[g + 1]; mask [B] bool. Returns [B]: rewards minus their group's mean, over
// the group's sample standard deviation where by_std.
at::Tensor group_advantages(
    const at::Tensor& rewards, const at::Tensor& starts, const std::optional<at::Tensor>& mask, bool by_std);

}  // namespace brorl
