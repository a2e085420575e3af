// Shared by ppo_tokens.cpp and its kernel: the pointers of one call, and the loop body.
#pragma once

#include <cstdint>

#include "policy/ppo_loss_math.h"

struct CUstream_st;

namespace brorl {

constexpr int kTokenColumns = 8;

template <typename S>
struct PpoTokenPointers {
  const S *log_probs, *entropy;
  const S *old, *reference;  // may be null
  const S *rollout, *advantages, *weights;
  S *log_prob_gradient, *entropy_gradient, *columns;
};

template <typename S>
BRORL_HOST_DEVICE void ppo_token_at(int64_t i, const PpoTokenPointers<S>& p, const PpoSettings<S>& settings) {
  const PpoInputs<S> in{
      p.old ? p.old[i] : p.log_probs[i], p.rollout[i], p.reference ? p.reference[i] : S(0), p.advantages[i],
      p.weights[i]};
  const PpoToken<S> token = ppo_token(p.log_probs[i], p.entropy[i], in, settings);
  p.log_prob_gradient[i] = token.log_prob_gradient;
  p.entropy_gradient[i] = token.entropy_gradient;
  const S row[kTokenColumns] = {
      token.loss, token.clipped_low, token.clipped_high, token.clipped_dual,
      token.approx_kl, token.reference_kl, token.rollout_gap, token.ratio};
  for (int k = 0; k < kTokenColumns; ++k) p.columns[i * kTokenColumns + k] = row[k];
}

// Returns nullptr, or CUDA's error text.
template <typename S>
const char* ppo_tokens_launch(PpoTokenPointers<S> pointers, PpoSettings<S> settings, int64_t rows, CUstream_st* stream);

}  // namespace brorl
