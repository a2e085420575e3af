// CPU: per chunk of rows one product to logits, one pass per row that ends with the gradient of the logits in their
// place, and two products to the gradients of hidden and weight. A token's gradient depends on its own log-probability
// alone, so the backward is done in the forward and three products suffice (as in Liger-Kernel's fused losses).
#include "linear_ppo_loss.h"

#include <algorithm>
#include <iterator>
#include <type_traits>
#include <vector>

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>

#include "gemm.h"
#include "ppo_loss_math.h"
#include "softmax_row.h"

namespace brorl {
namespace {

using at::Tensor;

// Rows of logits held at a time. Below 512 the products lose speed (the weight's gradient is read and written once per
// chunk); above, only memory grows. A very large vocabulary gives way to the limit in bytes.
constexpr int64_t kChunkRows = 512, kFewestRows = 64, kChunkBytes = 512 << 20;

// The per-token inputs of the loss; without them the ops below stop at log-probabilities.
template <typename S>
struct LossInputs {
  const S* old;  // null: the actor is its own old policy
  const S* rollout;
  const S* advantages;
  PpoSettings<S> settings;
  double divisor;
};

struct Gradients {
  Tensor hidden, weight;  // in the compute dtype; undefined where not asked for
};

// Fill log_probs, entropy and tokens (all [R]) and the gradients. S: compute type. The matrices are S or bfloat16.
template <typename S>
void run(
    const Tensor& hidden, const Tensor& weight, const int64_t* ids, double temperature, S* log_probs, S* entropy,
    const LossInputs<S>* loss, PpoToken<S>* tokens, Gradients& gradients) {
  const int64_t rows = hidden.size(0), vocab = weight.size(0);
  const int64_t fitting = kChunkBytes / (vocab * int64_t(sizeof(S)));
  const int64_t chunk = std::min(rows, std::clamp(fitting, kFewestRows, kChunkRows));
  const bool wanted = gradients.hidden.defined() || gradients.weight.defined();
  const bool narrow = hidden.scalar_type() == at::kBFloat16;
  const double inverse_temperature = 1 / temperature;
  const Tensor buffer = at::empty({chunk, vocab}, hidden.options().dtype(c10::CppTypeToScalarType<S>::value));
  S* const logits = buffer.mutable_data_ptr<S>();
  for (int64_t begin = 0; begin < rows; begin += chunk) {
    const int64_t count = std::min(chunk, rows - begin);
    const Tensor h = hidden.narrow(0, begin, count);
    Tensor z = buffer.narrow(0, 0, count);
    gemm(z, h, weight.t(), false);
#pragma omp parallel for schedule(static) num_threads(at::get_num_threads())
    for (int64_t i = 0; i < count; ++i) {
      const int64_t t = begin + i;
      S* const row = logits + i * vocab;
      const RowStatistics found = exponentiate(row, vocab, ids[t], S(inverse_temperature));
      // Rounded first, so that a policy that has not moved has a ratio of exactly 1 to its own stored log-probs.
      const S log_prob = S(found.log_prob);
      log_probs[t] = log_prob;
      entropy[t] = S(found.entropy);
      if (!loss) continue;
      tokens[t] = ppo_token(
          log_prob, loss->old ? loss->old[t] : log_prob, loss->rollout[t], loss->advantages[t], loss->settings);
      if (!wanted) continue;
      const double upstream = -double(tokens[t].derivative) / loss->divisor;
      if constexpr (std::is_same_v<S, float>) {
        if (narrow) {
          gradient_row_bfloat16(row, vocab, ids[t], found.sum, upstream, inverse_temperature);
          continue;
        }
      }
      gradient_row(row, vocab, ids[t], found.sum, upstream, inverse_temperature);
    }
    if (!wanted) continue;
    // bfloat16 gradients lie in the first half of each row of the buffer.
    const Tensor d = narrow ? at::from_blob(logits, {count, vocab}, {2 * vocab, 1}, hidden.options()) : z;
    if (gradients.hidden.defined()) {
      Tensor out = gradients.hidden.narrow(0, begin, count);
      gemm(out, d, weight, false);
    }
    if (gradients.weight.defined()) gemm(gradients.weight, d.t(), h, begin > 0);
  }
}

// Sums and maxima in the order of megatron_brorl/algo/loss.py, added in row order: the same for any thread count.
template <typename S>
Tensor count(const std::vector<PpoToken<S>>& tokens, const S* entropy, double divisor) {
  double objective = 0, low = 0, high = 0, kl = 0, entropies = 0, gap = 0, ratio_max = 0, gap_max = 0;
  const auto larger = [](double most, double x) { return x > most || x != x ? x : most; };  // NaN stays
  for (size_t t = 0; t < tokens.size(); ++t) {
    const PpoToken<S>& token = tokens[t];
    objective += token.objective;
    low += token.clipped_low;
    high += token.clipped_high;
    kl += token.approx_kl;
    entropies += entropy[t];
    gap += token.rollout_gap;
    ratio_max = larger(ratio_max, token.ratio);
    gap_max = larger(gap_max, token.rollout_gap);
  }
  const double values[] = {
      -objective / divisor, low, high, kl, entropies, gap, double(tokens.size()), ratio_max, gap_max};
  Tensor result = at::empty({int64_t(std::size(values))}, at::kDouble);
  std::copy(std::begin(values), std::end(values), result.mutable_data_ptr<double>());
  return result;
}

void check_matrices(const Tensor& hidden, const Tensor& weight, const Tensor& ids, double temperature) {
  TORCH_CHECK_VALUE(
      hidden.dim() == 2 && weight.dim() == 2 && hidden.size(1) == weight.size(1) && hidden.size(1) > 0,
      "hidden must be [R, H] and weight [V, H], got ", hidden.sizes(), " and ", weight.sizes());
  TORCH_CHECK_VALUE(weight.size(0) > 0, "weight has no rows: the vocabulary is empty");
  const auto dtype = hidden.scalar_type();
  TORCH_CHECK_TYPE(
      weight.scalar_type() == dtype && (dtype == at::kFloat || dtype == at::kDouble || dtype == at::kBFloat16),
      "hidden and weight must both be float32, float64 or bfloat16, got ", dtype, " and ", weight.scalar_type());
  TORCH_CHECK_VALUE(
      ids.dim() == 1 && ids.size(0) == hidden.size(0), "ids must be [", hidden.size(0), "], got ", ids.sizes());
  TORCH_CHECK_TYPE(ids.scalar_type() == at::kLong, "ids must be int64, got ", ids.scalar_type());
  TORCH_CHECK_VALUE(temperature > 0, "temperature must be above 0, got ", temperature);
  const Tensor flat = ids.contiguous();
  const auto* id = flat.const_data_ptr<int64_t>();
  for (int64_t t = 0; t < flat.size(0); ++t) {
    TORCH_CHECK_INDEX(
        id[t] >= 0 && id[t] < weight.size(0), "ids[", t, "] is ", id[t], ", outside a vocabulary of ", weight.size(0));
  }
}

at::ScalarType compute_dtype(const Tensor& x) { return x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat; }

Tensor vector(const Tensor& x, const char* name, const Tensor& hidden) {
  TORCH_CHECK_VALUE(
      x.dim() == 1 && x.size(0) == hidden.size(0), name, " must be [", hidden.size(0), "], got ", x.sizes());
  TORCH_CHECK_TYPE(
      x.scalar_type() == compute_dtype(hidden), name, " must be ", compute_dtype(hidden), " for ",
      hidden.scalar_type(), " hidden states, got ", x.scalar_type());
  return x.contiguous();
}

// Without a bfloat16 product that keeps float32 results, the matrices are widened: slower, never coarser.
Tensor matrix(const Tensor& x) {
  return (x.scalar_type() == at::kBFloat16 && !bfloat16_gemm() ? x.to(at::kFloat) : x).contiguous();
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> linear_ppo_loss_cpu(
    const Tensor& hidden, const Tensor& weight, const Tensor& ids, const std::optional<Tensor>& old_log_probs,
    const Tensor& rollout_log_probs, const Tensor& advantages, double divisor, double eps_low, double eps_high,
    double is_cap, double temperature, bool hidden_gradient, bool weight_gradient) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  check_matrices(hidden, weight, ids, temperature);
  TORCH_CHECK_VALUE(divisor > 0, "divisor must be above 0, got ", divisor);
  const Tensor old = old_log_probs ? vector(*old_log_probs, "old_log_probs", hidden) : Tensor();
  const Tensor rollout = vector(rollout_log_probs, "rollout_log_probs", hidden);
  const Tensor advantage = vector(advantages, "advantages", hidden);
  const Tensor h = matrix(hidden), w = matrix(weight), targets = ids.contiguous();
  const int64_t rows = hidden.size(0);
  const auto options = hidden.options().dtype(compute_dtype(hidden));
  const Tensor log_probs = at::empty({rows}, options), entropy = at::empty({rows}, options);
  // With no rows nothing is written, and the gradient of the weight is zero.
  const auto make = rows ? [](at::IntArrayRef s, at::TensorOptions o) { return at::empty(s, o); }
                         : [](at::IntArrayRef s, at::TensorOptions o) { return at::zeros(s, o); };
  Gradients gradients;
  if (hidden_gradient) gradients.hidden = make(hidden.sizes(), options);
  if (weight_gradient) gradients.weight = make(weight.sizes(), options);
  Tensor counters;
  const auto compute = [&](auto zero) {
    using S = decltype(zero);
    const LossInputs<S> loss{
        old.defined() ? old.const_data_ptr<S>() : nullptr, rollout.const_data_ptr<S>(), advantage.const_data_ptr<S>(),
        {S(1 - eps_low), S(1 + eps_high), S(is_cap)}, divisor};
    std::vector<PpoToken<S>> tokens(rows);
    run<S>(h, w, targets.const_data_ptr<int64_t>(), temperature, log_probs.mutable_data_ptr<S>(),
           entropy.mutable_data_ptr<S>(), &loss, tokens.data(), gradients);
    counters = count(tokens, entropy.const_data_ptr<S>(), divisor);
  };
  compute_dtype(hidden) == at::kDouble ? compute(0.0) : compute(0.0f);
  const auto finished = [&](const Tensor& x) {
    return x.defined() ? x.to(hidden.scalar_type()) : at::empty({0}, hidden.options());
  };
  // Copied, because outputs of an op may not share memory.
  return {counters[0].to(options, false, true), log_probs, entropy, counters, finished(gradients.hidden),
          finished(gradients.weight)};
}

std::tuple<Tensor, Tensor> linear_log_probs_cpu(
    const Tensor& hidden, const Tensor& weight, const Tensor& ids, double temperature) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  check_matrices(hidden, weight, ids, temperature);
  const Tensor h = matrix(hidden), w = matrix(weight), targets = ids.contiguous();
  const auto options = hidden.options().dtype(compute_dtype(hidden));
  const Tensor log_probs = at::empty({hidden.size(0)}, options), entropy = at::empty({hidden.size(0)}, options);
  Gradients none;
  const auto compute = [&](auto zero) {
    using S = decltype(zero);
    run<S>(h, w, targets.const_data_ptr<int64_t>(), temperature, log_probs.mutable_data_ptr<S>(),
           entropy.mutable_data_ptr<S>(), nullptr, nullptr, none);
  };
  compute_dtype(hidden) == at::kDouble ? compute(0.0) : compute(0.0f);
  return {log_probs, entropy};
}

}  // namespace brorl
