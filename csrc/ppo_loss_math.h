// The clipped policy loss of one token and its derivative: the only place in csrc/ where the formula stands.
//
// Plain inline functions of numbers, so that the CPU op (linear_ppo_loss.cpp) and CUDA kernels compile the same text.
#pragma once

#include <cmath>

#include "host_device.h"

namespace brorl {

// What does not change from token to token. Same meaning as in megatron_brorl/algo/loss.py.
template <typename S>
struct PpoSettings {
  S clip_below;  // 1 - eps_low
  S clip_above;  // 1 + eps_high
  S is_cap;      // largest importance weight against the rollout policy; 0: every weight is 1
};

template <typename S>
struct PpoToken {
  S objective;    // w min(r A, clip(r) A), to be maximised
  S derivative;   // d objective / d log pi
  S ratio;        // r = pi / pi_old
  S approx_kl;    // r - 1 - log r: the k3 estimate of KL(pi_old || pi) (Schulman 2020)
  S rollout_gap;  // |log pi - log pi_rollout|, nats
  bool clipped_low, clipped_high;
};

// Loss of one token (BroRL, section 3.1; DAPO, eq. 8) with a truncated importance weight w (Yao et al. 2025).
//
// log_prob, old, rollout: log-probabilities of the token in nats; pass old = log_prob where the actor is its own old
// policy. The derivative treats old, rollout and w as constants. It is zero where the clip is active and where the log
// ratio has left +-20: exp(20) is far outside any clip range and far inside float32.
template <typename S>
BRORL_HOST_DEVICE PpoToken<S> ppo_token(S log_prob, S old, S rollout, S advantage, PpoSettings<S> settings) {
  const S bound = 20;
  const S raw = log_prob - old;
  const S log_ratio = clamp(raw, -bound, bound);
  const S ratio = std::exp(log_ratio);
  const S plain = ratio * advantage;
  const S clipped = clamp(ratio, settings.clip_below, settings.clip_above) * advantage;
  S weight = 1;
  if (settings.is_cap != 0) {
    weight = std::exp(clamp(old - rollout, -bound, bound));
    weight = weight > settings.is_cap ? settings.is_cap : weight;
  }
  PpoToken<S> token;
  token.clipped_low = ratio < settings.clip_below && advantage < 0;
  token.clipped_high = ratio > settings.clip_above && advantage > 0;
  const bool flat = token.clipped_low || token.clipped_high || raw < -bound || raw > bound;
  token.objective = weight * (clipped < plain ? clipped : plain);
  token.derivative = flat ? S(0) : weight * plain;  // d r / d log pi = r
  token.ratio = ratio;
  token.approx_kl = ratio - 1 - log_ratio;
  token.rollout_gap = std::fabs(log_prob - rollout);
  return token;
}

}  // namespace brorl
