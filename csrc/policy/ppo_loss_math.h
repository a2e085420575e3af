// The policy losses of one token and their derivatives. No other file of csrc/ contains these formulas.
#pragma once

#include <cmath>

#include "common/dual.h"
#include "common/host_device.h"

namespace brorl {

// Every policy loss: its name in algo.policy_loss.POLICY_LOSSES and the number of constants of its function below.
#define BRORL_POLICY_LOSSES(ENTRY) \
  ENTRY(clip, 3)                    \
  ENTRY(cispo, 2)                   \
  ENTRY(sapo, 2)

#define BRORL_POLICY_LOSS_NAME(name, count) name,
enum class PolicyLoss : int { BRORL_POLICY_LOSSES(BRORL_POLICY_LOSS_NAME) };
#undef BRORL_POLICY_LOSS_NAME

constexpr int kMostConstants = 4;  // per policy loss

enum class KlEstimator : int { k1 = 1, k2 = 2, k3 = 3 };  // Schulman 2020, "Approximating KL divergence"

// Settings shared by all tokens, as in algo.policy_loss.PolicyLossSettings.
template <typename S>
struct PpoSettings {
  PolicyLoss loss;
  S constants[kMostConstants];  // of that loss
  S is_cap;   // largest importance weight against the rollout policy; 0: every weight is 1
  S kl_coef;  // 0: no reference policy is read
  S entropy_coef;
  KlEstimator kl_estimator;
};

// Inputs of one token, apart from its log-probability, and its results.
template <typename S>
struct PpoInputs {
  S old, rollout, reference;  // log-probabilities, nats
  S advantage;
  S weight;  // mask and divisor of the loss in one; 0 masks the token
};

template <typename S>
struct PpoToken {
  S loss;                           // to be minimised, times weight
  S log_prob_gradient;              // d loss / d log pi
  S entropy_gradient;               // d loss / d H
  S ratio;                          // r = pi / pi_old
  S approx_kl;                      // r - 1 - log r: the k3 estimate of KL(pi_old || pi)
  S reference_kl;                   // the chosen estimate of KL(pi || pi_ref); 0 without reference
  S rollout_gap;                    // |log pi - log pi_rollout|, nats
  S clipped_low, clipped_high, clipped_dual;  // 1 where that bound changes the objective, else 0
};

// An estimate of KL(pi || pi_ref) from delta = log pi - log pi_ref, and its derivative in log pi.
template <typename S>
BRORL_HOST_DEVICE void kl_estimate(S raw, KlEstimator estimator, S bound, S& value, S& derivative) {
  const S delta = clamp(raw, -bound, bound);
  if (estimator == KlEstimator::k1) {
    value = delta;
    derivative = 1;
  } else if (estimator == KlEstimator::k2) {
    value = delta * delta / 2;
    derivative = delta;
  } else {
    const S inverse = std::exp(-delta);
    value = inverse - 1 + delta;
    derivative = 1 - inverse;
  }
  if (raw < -bound || raw > bound) derivative = 0;
}

// The objective of one token, to be maximised, with its derivative in log pi, and the bounds that are active.
template <typename S>
struct Objective {
  Dual<S> value;
  bool clipped_low, clipped_high, clipped_dual;
};

// min(r A, clip(r) A) (BroRL, section 3.1; DAPO, eq. 8: clip-higher) with the dual clip of Ye et al. 2020 (eq. 5).
// Constants: 1 - eps_low, 1 + eps_high, and the bound on the ratio if the advantage is negative (0: none).
template <typename S>
BRORL_HOST_DEVICE Objective<S> clip_objective(const Dual<S>& ratio, S advantage, const S* constants) {
  const S below = constants[0], above = constants[1], bound = constants[2];
  const bool low = ratio.value < below && advantage < 0;
  const bool high = ratio.value > above && advantage > 0;
  const bool dual = bound != 0 && advantage < 0 && ratio.value > bound;
  const Dual<S> clipped = low ? constant(below) : high ? constant(above) : dual ? constant(bound) : ratio;
  return {clipped * advantage, low, high, dual};
}

// The importance weight clip(r), without gradient, times A log r (MiniMax-M1, Chen et al. 2025, eq. 4 and 5).
// Constants: 1 - eps_low, 1 + eps_high. Without an advantage a bound changes nothing.
template <typename S>
BRORL_HOST_DEVICE Objective<S> cispo_objective(const Dual<S>& ratio, S advantage, const S* constants) {
  const S below = constants[0], above = constants[1];
  const S weight = clamp(ratio.value, below, above);
  const bool low = ratio.value < below && advantage != 0;
  const bool high = ratio.value > above && advantage != 0;
  return {log(ratio) * (weight * advantage), low, high, false};
}

// 4 / tau sigmoid(tau (r - 1)) A: a soft gate instead of bounds (SAPO, Gao et al. 2025).
// Constants: tau for advantages above 0, tau for all others.
template <typename S>
BRORL_HOST_DEVICE Objective<S> sapo_objective(const Dual<S>& ratio, S advantage, const S* constants) {
  const S tau = advantage > 0 ? constants[0] : constants[1];
  return {sigmoid((ratio - S(1)) * tau) * (4 / tau * advantage), false, false, false};
}

template <typename S>
BRORL_HOST_DEVICE Objective<S> objective_of(const Dual<S>& ratio, S advantage, const PpoSettings<S>& settings) {
#define BRORL_POLICY_LOSS_CASE(name, count) \
  case PolicyLoss::name:                    \
    return name##_objective(ratio, advantage, settings.constants);
  switch (settings.loss) { BRORL_POLICY_LOSSES(BRORL_POLICY_LOSS_CASE) }
#undef BRORL_POLICY_LOSS_CASE
  return {};
}

// -w (u f(r, A) - kl_coef KL + entropy_coef H) with f the chosen policy loss and u the truncated importance weight of
// Yao et al. 2025.
//
// old = log_prob if the actor is its own old policy. Derivatives treat old, rollout, reference and u as constants. The
// derivative of the ratio is zero if its logarithm is beyond +-20: exp(20) is far outside any clip range and well
// within float32. The inputs of a masked token are not read and may be anything.
template <typename S>
BRORL_HOST_DEVICE PpoToken<S> ppo_token(S log_prob, S entropy, PpoInputs<S> in, const PpoSettings<S>& settings) {
  PpoToken<S> token{};
  if (in.weight == 0) return token;
  const S bound = 20;

  const S raw = log_prob - in.old;
  const S log_ratio = clamp(raw, -bound, bound);
  const S ratio = std::exp(log_ratio);
  const Dual<S> ratio_with_slope{ratio, raw < -bound || raw > bound ? S(0) : ratio};  // d r / d log pi = r
  const Objective<S> surrogate = objective_of(ratio_with_slope, in.advantage, settings);
  S objective = surrogate.value.value, slope = surrogate.value.slope;
  if (settings.is_cap != 0) {
    // Compare first: both may be -inf, whose difference is NaN.
    S importance = in.old == in.rollout ? S(1) : std::exp(clamp(in.old - in.rollout, -bound, bound));
    importance = importance > settings.is_cap ? settings.is_cap : importance;
    objective *= importance;
    slope *= importance;
  }

  S kl = 0, kl_slope = 0;
  if (settings.kl_coef != 0) kl_estimate(log_prob - in.reference, settings.kl_estimator, bound, kl, kl_slope);
  token.loss = in.weight * (settings.kl_coef * kl - settings.entropy_coef * entropy - objective);
  token.log_prob_gradient = in.weight * (settings.kl_coef * kl_slope - slope);
  token.entropy_gradient = -in.weight * settings.entropy_coef;
  token.ratio = ratio;
  token.approx_kl = ratio - 1 - log_ratio;
  token.reference_kl = kl;
  token.rollout_gap = std::fabs(log_prob - in.rollout);
  token.clipped_low = surrogate.clipped_low;
  token.clipped_high = surrogate.clipped_high;
  token.clipped_dual = surrogate.clipped_dual;
  return token;
}

}  // namespace brorl
