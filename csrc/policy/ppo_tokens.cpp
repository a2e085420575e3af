#include "policy/ppo_tokens.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include "common/cuda_launch.h"
#include "policy/ppo_tokens_cuda.h"

namespace brorl {
namespace {

using at::Tensor;

Tensor vector(const Tensor& x, const char* name, const Tensor& log_probs) {
  TORCH_CHECK_VALUE(
      x.dim() == 1 && x.size(0) == log_probs.size(0), name, " must be [", log_probs.size(0), "], got ", x.sizes());
  TORCH_CHECK_TYPE(
      x.scalar_type() == log_probs.scalar_type(), name, " must be ", log_probs.scalar_type(),
      " like the log-probabilities, got ", x.scalar_type());
  return x.contiguous();
}

PolicyLoss policy_loss_of(std::string_view name, size_t constants) {
#define BRORL_POLICY_LOSS_NAMED(loss, count)                                                                    \
  static_assert(count <= kMostConstants);                                                                       \
  if (name == #loss) {                                                                                          \
    TORCH_CHECK_VALUE(constants == count, "policy_loss " #loss " takes " #count " constants, got ", constants); \
    return PolicyLoss::loss;                                                                                    \
  }
  BRORL_POLICY_LOSSES(BRORL_POLICY_LOSS_NAMED)
#undef BRORL_POLICY_LOSS_NAMED
  TORCH_CHECK_VALUE(false, "csrc/policy/ppo_loss_math.h has no policy_loss ", name);
}

KlEstimator estimator(std::string_view name) {
  if (name == "k1") return KlEstimator::k1;
  if (name == "k2") return KlEstimator::k2;
  TORCH_CHECK_VALUE(name == "k3", "kl_estimator must be k1, k2 or k3, got ", name);
  return KlEstimator::k3;
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor> ppo_tokens(
    const Tensor& log_probs, const Tensor& entropy, const std::optional<Tensor>& old, const Tensor& rollout,
    const std::optional<Tensor>& reference, const Tensor& advantages, const Tensor& weights,
    std::string_view policy_loss, c10::ArrayRef<double> constants, double is_cap, double kl_coef,
    std::string_view kl_estimator, double entropy_coef) {
  TORCH_CHECK_TYPE(
      log_probs.scalar_type() == at::kFloat || log_probs.scalar_type() == at::kDouble,
      "log_probs must be float32 or float64, got ", log_probs.scalar_type());
  TORCH_CHECK_VALUE(log_probs.dim() == 1, "log_probs must be [R], got ", log_probs.sizes());
  TORCH_CHECK_VALUE(kl_coef == 0 || reference, "kl_coef = ", kl_coef, " needs reference_log_probs");
  const Tensor current = log_probs.contiguous(), entropies = vector(entropy, "entropy", log_probs);
  const Tensor old_log_probs = old ? vector(*old, "old_log_probs", log_probs) : Tensor();
  const Tensor rollout_log_probs = vector(rollout, "rollout_log_probs", log_probs);
  const Tensor reference_log_probs = reference ? vector(*reference, "reference_log_probs", log_probs) : Tensor();
  const Tensor advantage = vector(advantages, "advantages", log_probs), weight = vector(weights, "weights", log_probs);
  const int64_t rows = log_probs.size(0);
  const Tensor log_prob_gradient = at::empty_like(current), entropy_gradient = at::empty_like(current);
  const Tensor columns = at::empty({rows, kTokenColumns}, log_probs.options());
  const auto compute = [&](auto zero) {
    using S = decltype(zero);
    const auto data = [](const Tensor& x) { return x.defined() ? x.const_data_ptr<S>() : nullptr; };
    const PpoTokenPointers<S> pointers{
        data(current), data(entropies), data(old_log_probs), data(reference_log_probs), data(rollout_log_probs),
        data(advantage), data(weight),
        log_prob_gradient.mutable_data_ptr<S>(), entropy_gradient.mutable_data_ptr<S>(), columns.mutable_data_ptr<S>()};
    PpoSettings<S> settings{
        policy_loss_of(policy_loss, constants.size()), {}, S(is_cap), S(kl_coef), S(entropy_coef),
        estimator(kl_estimator)};
    for (size_t k = 0; k < constants.size(); ++k) settings.constants[k] = S(constants[k]);
#ifdef BRORL_CUDA
    if (on_device(log_probs)) {
      const c10::DeviceGuard guard(log_probs.device());
      check_launch("ppo_tokens", ppo_tokens_launch(pointers, settings, rows, current_stream(log_probs)));
      return;
    }
#endif
    for (int64_t i = 0; i < rows; ++i) ppo_token_at(i, pointers, settings);
  };
  log_probs.scalar_type() == at::kDouble ? compute(double()) : compute(float());
  return {log_prob_gradient, entropy_gradient, columns};
}

}  // namespace brorl
