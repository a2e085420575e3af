// Segments and groups are independent, so threads share them out; inside one, the order is that of the formula.
#include "advantages.h"

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty_like.h>

#include "advantages_math.h"
#include "tensor_checks.h"

#ifdef BRORL_CUDA
#include "advantages_cuda.h"
#include "cuda_launch.h"
#endif

namespace brorl {
namespace {

using at::Tensor;

// Backwards over one segment. Masked: whether there is a mask; a masked token's step is taken and dropped, because a
// branch that is mispredicted costs more. The time is that of memory and of a serial multiply-add per token in about
// equal parts; loops that take several steps at once vectorise, but were measured to be no faster.
template <bool Masked, typename S>
void gae_segment(
    const S* rewards, const S* values, const bool* mask, int64_t begin, int64_t end, double next_value, double gamma,
    double lambda, S* advantages, S* returns) {
  double next_advantage = 0;
  for (int64_t t = end - 1; t >= begin; --t) {
    const bool counts = !Masked || mask[t];
    const double value = values[t], delta = td_error(rewards[t], value, next_value, gamma);
    const double advantage = gae_step(delta, gamma, lambda)(next_advantage);
    advantages[t] = counts ? S(advantage) : S(0);
    returns[t] = counts ? S(advantage + value) : S(0);
    next_value = counts ? value : next_value;
    next_advantage = counts ? advantage : next_advantage;
  }
}

// One group of n rewards. Rewards that are all equal give exactly zero: what their mean leaves is rounding, not signal.
template <typename S>
void group(const S* rewards, const bool* mask, int64_t n, bool by_std, S* advantages) {
  double count = 0, sum = 0, m2 = 0;
  S first = 0;
  bool equal = true;
  for (int64_t i = 0; i < n; ++i) {
    if (mask && !mask[i]) continue;
    if (count == 0) first = rewards[i];
    equal = equal && rewards[i] == first;
    sum += double(rewards[i]);
    count += 1;
  }
  const double mean = sum / count;  // not used where count is 0: then all are "equal"
  for (int64_t i = 0; i < n && by_std; ++i) {
    if (!mask || mask[i]) m2 += (double(rewards[i]) - mean) * (double(rewards[i]) - mean);
  }
  const double divisor = group_divisor(m2, count, by_std);
  for (int64_t i = 0; i < n; ++i) {
    const bool zero = count <= 1 || equal || (mask && !mask[i]);
    advantages[i] = zero ? S(0) : S((double(rewards[i]) - mean) / divisor);
  }
}

// Offsets into memory, so a wrong one must not pass. On CUDA this waits for the device.
Tensor check_starts(const Tensor& starts, const Tensor& first, const char* counted) {
  TORCH_CHECK_VALUE(starts.dim() == 1 && starts.size(0) > 0, "starts must be [S + 1], got ", starts.sizes());
  const Tensor result = matching(starts, "starts", starts.sizes(), at::kLong, first);
  const Tensor host = result.cpu();
  const int64_t* const start = host.const_data_ptr<int64_t>();
  const int64_t last = host.size(0) - 1;
  TORCH_CHECK_VALUE(
      start[0] == 0 && start[last] == first.size(0), "starts must go from 0 to the ", first.size(0), " ", counted,
      ", goes from ", start[0], " to ", start[last]);
  for (int64_t s = 0; s < last; ++s) {
    TORCH_CHECK_VALUE(
        start[s] <= start[s + 1], "starts must not fall: starts[", s, "] is ", start[s], ", starts[", s + 1, "] is ",
        start[s + 1]);
  }
  return result;
}

template <typename S>
void compute_gae(
    const Tensor& rewards, const Tensor& values, const Tensor& starts, const Tensor& mask, const Tensor& bootstrap,
    double gamma, double lambda, const Tensor& advantages, const Tensor& returns) {
  const auto *r = rewards.const_data_ptr<S>(), *v = values.const_data_ptr<S>(), *last = pointer<S>(bootstrap);
  const auto* start = starts.const_data_ptr<int64_t>();
  const auto* kept = pointer<bool>(mask);
  auto *a = advantages.mutable_data_ptr<S>(), *out = returns.mutable_data_ptr<S>();
  const int64_t segments = starts.size(0) - 1;
#ifdef BRORL_CUDA
  if (rewards.is_cuda()) {
    const c10::DeviceGuard guard(rewards.device());
    check_launch("gae", gae_launch(
        r, v, start, kept, last, gamma, lambda, segments, a, out, current_stream(rewards)));
    return;
  }
#endif
#pragma omp parallel for schedule(dynamic, 16) num_threads(at::get_num_threads())
  for (int64_t s = 0; s < segments; ++s) {
    const auto segment = kept ? gae_segment<true, S> : gae_segment<false, S>;
    segment(r, v, kept, start[s], start[s + 1], last ? double(last[s]) : 0, gamma, lambda, a, out);
  }
}

template <typename S>
void compute_groups(
    const Tensor& rewards, const Tensor& starts, const Tensor& mask, bool by_std, const Tensor& advantages) {
  const S* const r = rewards.const_data_ptr<S>();
  const int64_t* const start = starts.const_data_ptr<int64_t>();
  const bool* const kept = pointer<bool>(mask);
  S* const a = advantages.mutable_data_ptr<S>();
  const int64_t groups = starts.size(0) - 1;
#ifdef BRORL_CUDA
  if (rewards.is_cuda()) {
    const c10::DeviceGuard guard(rewards.device());
    check_launch("group_advantages", group_advantages_launch(
        r, start, kept, by_std, groups, a, current_stream(rewards)));
    return;
  }
#endif
#pragma omp parallel for schedule(dynamic, 16) num_threads(at::get_num_threads())
  for (int64_t g = 0; g < groups; ++g) {
    const int64_t begin = start[g];
    group(r + begin, kept ? kept + begin : nullptr, start[g + 1] - begin, by_std, a + begin);
  }
}

}  // namespace

std::tuple<Tensor, Tensor> gae(
    const Tensor& rewards, const Tensor& values, const Tensor& starts, const std::optional<Tensor>& mask,
    const std::optional<Tensor>& bootstrap, double gamma, double lam) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const Tensor r = floating_vector(rewards, "rewards", "[T]");
  const auto dtype = r.scalar_type();
  const Tensor v = matching(values, "values", r.sizes(), dtype, r);
  const Tensor start = check_starts(starts, r, "tokens");
  const Tensor kept = matching(mask, "mask", r.sizes(), at::kBool, r);
  const Tensor last = matching(bootstrap, "bootstrap", {start.size(0) - 1}, dtype, r);
  TORCH_CHECK_VALUE(gamma >= 0 && gamma <= 1, "gamma must be in [0, 1], got ", gamma);
  TORCH_CHECK_VALUE(lam >= 0 && lam <= 1, "lam must be in [0, 1], got ", lam);
  const Tensor advantages = at::empty_like(r), returns = at::empty_like(r);
  const auto run = [&](auto zero) {
    compute_gae<decltype(zero)>(r, v, start, kept, last, gamma, lam, advantages, returns);
  };
  dtype == at::kDouble ? run(0.0) : run(0.0f);
  return {advantages, returns};
}

Tensor group_advantages(
    const Tensor& rewards, const Tensor& starts, const std::optional<Tensor>& mask, bool by_std) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const Tensor r = floating_vector(rewards, "rewards", "[B]");
  const Tensor start = check_starts(starts, r, "rewards");
  const Tensor kept = matching(mask, "mask", r.sizes(), at::kBool, r);
  const Tensor advantages = at::empty_like(r);
  const auto run = [&](auto zero) { compute_groups<decltype(zero)>(r, start, kept, by_std, advantages); };
  r.scalar_type() == at::kDouble ? run(0.0) : run(0.0f);
  return advantages;
}

}  // namespace brorl
