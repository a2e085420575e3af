// The policy loss of one token and its derivative: the only place in csrc/ where the formula stands.
#pragma once

#include <cmath>

#include "common/host_device.h"

namespace brorl {

enum class KlEstimator : int { k1 = 1, k2 = 2, k3 = 3 };  // Schulman 2020, "Approximating KL divergence"

// What does not change from token to token. Same meaning as algo.loss.PolicyLossSettings.
template <typename S>
struct PpoSettings {
  S clip_below;  // 1 - eps_low
  S clip_above;  // 1 + eps_high
  S dual_clip;   // bound on the ratio where the advantage is negative; 0: none
  S is_cap;      // largest importance weight against the rollout policy; 0: every weight is 1
  S kl_coef;     // 0: no reference policy is read
  S entropy_coef;
  KlEstimator kl_estimator;
};

// Per token: its inputs besides the log-probability, and what comes out.
template <typename S>
struct PpoInputs {
  S old, rollout, reference;  // log-probabilities, nats
  S advantage;
  S weight;  // of this token in the loss: mask and divisor in one; 0 masks it
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
  S clipped_low, clipped_high, clipped_dual;  // 1 where that bound took the gradient away, else 0
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

// -w (u min(r A, clip(r) A) - kl_coef KL - ...) with the clipping of BroRL (section 3.1; DAPO, eq. 8: clip-higher), the
// dual clip of Ye et al. 2020 (eq. 5), the truncated importance weight u of Yao et al. 2025 and an entropy bonus.
//
// old = log_prob where the actor is its own old policy. Derivatives treat old, rollout, reference and u as constants;
// they are zero where a clip is active and where a log ratio has left +-20: exp(20) is far outside any clip range and far
// inside float32. A masked token reads nothing, so its inputs may be anything.
template <typename S>
BRORL_HOST_DEVICE PpoToken<S> ppo_token(S log_prob, S entropy, PpoInputs<S> in, PpoSettings<S> settings) {
  PpoToken<S> token{};
  if (in.weight == 0) return token;
  const S bound = 20;
  const S raw = log_prob - in.old, advantage = in.advantage;
  const S log_ratio = clamp(raw, -bound, bound);
  const S ratio = std::exp(log_ratio);
  const bool low = ratio < settings.clip_below && advantage < 0;
  const bool high = ratio > settings.clip_above && advantage > 0;
  const bool dual = settings.dual_clip != 0 && advantage < 0 && ratio > settings.dual_clip;
  S objective = (low ? settings.clip_below : high ? settings.clip_above : dual ? settings.dual_clip : ratio) * advantage;
  S slope = low || high || dual || raw < -bound || raw > bound ? S(0) : objective;  // d r / d log pi = r
  if (settings.is_cap != 0) {
    // Equal first: both may be -inf, where their difference is not a number.
    S weight = in.old == in.rollout ? S(1) : std::exp(clamp(in.old - in.rollout, -bound, bound));
    weight = weight > settings.is_cap ? settings.is_cap : weight;
    objective *= weight;
    slope *= weight;
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
  token.clipped_low = low;
  token.clipped_high = high;
  token.clipped_dual = dual;
  return token;
}

}  // namespace brorl
