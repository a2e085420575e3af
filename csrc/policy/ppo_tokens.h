// The policy loss token by token, given log-probabilities. megatron_brorl/algo/policy_loss.py defines it.
#pragma once

#include <optional>
#include <string_view>
#include <tuple>

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

namespace brorl {

// All tensors [R] float32 or float64. old: none if the actor is its own old policy; reference: none without KL.
// policy_loss: a name in BRORL_POLICY_LOSSES (ppo_loss_math.h), with its constants. Returns d loss / d log-prob [R], d
// loss / d entropy [R] and the columns [R, kTokenColumns], in the order of SUMS in megatron_brorl/algo/policy_loss.py.
std::tuple<at::Tensor, at::Tensor, at::Tensor> ppo_tokens(
    const at::Tensor& log_probs, const at::Tensor& entropy, const std::optional<at::Tensor>& old,
    const at::Tensor& rollout, const std::optional<at::Tensor>& reference, const at::Tensor& advantages,
    const at::Tensor& weights, std::string_view policy_loss, c10::ArrayRef<double> constants, double is_cap,
    double kl_coef, std::string_view kl_estimator, double entropy_coef);

}  // namespace brorl
