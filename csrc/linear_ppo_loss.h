// Ops fused from the hidden states on, without the [R, V] logits. megatron_brorl/ops/reference.py defines them.
#pragma once

#include <optional>
#include <tuple>

#include <ATen/core/Tensor.h>

namespace brorl {

// hidden [R, H] and weight [V, H] in float32, float64 or bfloat16; ids [R] int64; the other vectors [R] in the compute
// dtype (float64 for float64, else float32). Returns loss [], log-probs [R], entropy [R], counters [9] float64 and the
// gradients of the loss with respect to hidden and weight (empty where not asked for).
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> linear_ppo_loss_cpu(
    const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& ids,
    const std::optional<at::Tensor>& old_log_probs, const at::Tensor& rollout_log_probs, const at::Tensor& advantages,
    double divisor, double eps_low, double eps_high, double is_cap, double temperature, bool hidden_gradient,
    bool weight_gradient);

// Log-probs [R] and entropy [R] alone, with the same rounding as above.
std::tuple<at::Tensor, at::Tensor> linear_log_probs_cpu(
    const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& ids, double temperature);

}  // namespace brorl
