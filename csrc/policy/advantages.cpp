// Segments and groups are independent, so threads share them out; inside one, the order is that of the formula.
#include "policy/advantages.h"

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty_like.h>

#include "policy/advantages_math.h"
#include "common/huge_pages.h"
#include "common/lanes.h"
#include "common/tensor_checks.h"

#ifdef BRORL_CUDA
#include "policy/advantages_cuda.h"
#include "common/cuda_launch.h"
#endif

namespace brorl {
namespace {

using at::Tensor;

constexpr size_t kCacheBytes = 8 << 20;  // results beyond this would push more out of the caches than they bring

// Tokens between those at work and those to fetch: of segments to come, since processors do not foresee a stream that runs
// backwards in pieces. Past the end of the memory it does nothing.
constexpr int64_t kAhead = 1024;

// What the recursion carries from the tokens after to those before.
struct After {
  double value, advantage;
};

// Token t by itself; masked tokens are jumped over.
template <typename S>
void gae_token(
    const S* rewards, const S* values, const bool* mask, int64_t t, double gamma, double lambda, After& after,
    S* advantages, S* returns) {
  if (mask && !mask[t]) {
    advantages[t] = returns[t] = 0;
    return;
  }
  const double value = values[t], delta = td_error(double(rewards[t]), value, after.value, gamma);
  after = {value, gae_step(delta, gamma, lambda)(after.advantage)};
  advantages[t] = S(after.advantage);
  returns[t] = S(after.advantage + value);
}

// The maps of each token with all later ones of its eight, in three steps of composition.
inline AffineMap<Lanes> composed(AffineMap<Lanes> map) {
  const Lanes zero = all_lanes(0), one = all_lanes(1);
  map = compose(map, {later_lanes<1>(map.offset, zero), later_lanes<1>(map.slope, one)});
  map = compose(map, {later_lanes<2>(map.offset, zero), later_lanes<2>(map.slope, one)});
  return compose(map, {later_lanes<4>(map.offset, zero), later_lanes<4>(map.slope, one)});
}

// Lanes that are not kept take the nearest later one that is, or `after`.
inline Lanes filled(Lanes x, LaneMask kept, double after) {
  const Lanes zero = all_lanes(0);
  const LaneMask none = {};
  const auto step = [&](Lanes later, LaneMask later_kept) {
    x = kept ? x : later;
    kept |= later_kept;
  };
  step(later_lanes<1>(x, zero), later_lanes<1>(kept, none));
  step(later_lanes<2>(x, zero), later_lanes<2>(kept, none));
  step(later_lanes<4>(x, zero), later_lanes<4>(kept, none));
  return kept ? x : all_lanes(after);
}

// Backwards over one segment, eight tokens at a time: their maps are composed with one another first, so that a chain
// of one multiply-add per eight tokens is left. Counted from the segment's end, whatever its address: the bits of the
// result depend on nothing else.
template <bool Masked, bool Stream, typename S>
void gae_segment(
    const S* rewards, const S* values, const bool* mask, int64_t begin, int64_t end, double bootstrap, double gamma,
    double lambda, S* advantages, S* returns) {
  const Lanes zero = all_lanes(0);
  const Affine kept_map = gae_step(0, gamma, lambda), skipped_map = gae_skip();
  const Lanes slopes = composed({zero, all_lanes(kept_map.slope)}).slope;
  After after = {bootstrap, 0};
  int64_t t = end;
  for (; t - begin >= kLaneCount; t -= kLaneCount) {
    const int64_t at = t - kLaneCount;
    __builtin_prefetch(rewards + at + kAhead);
    __builtin_prefetch(values + at + kAhead);
    if (Masked) __builtin_prefetch(mask + at + kAhead);
    const LaneMask kept = Masked ? load_mask(mask + at) : ~LaneMask{};
    const Lanes value = load_lanes(values + at);
    const Lanes counting = Masked ? filled(value, kept, after.value) : value;
    const Lanes next_value = later_lanes<1>(counting, all_lanes(after.value));
    const Lanes delta = td_error(load_lanes(rewards + at), value, next_value, gamma);
    AffineMap<Lanes> map = {delta, all_lanes(kept_map.slope)};
    if (Masked) map = {kept ? delta : zero, kept ? map.slope : all_lanes(skipped_map.slope)};
    map = composed(map);
    if (!Masked) map.slope = slopes;  // always the same, which the compiler does not see
    const Lanes advantage = map(all_lanes(after.advantage));
    write_lanes<Stream>(advantages + at, kept ? advantage : zero);
    write_lanes<Stream>(returns + at, kept ? advantage + value : zero);
    after = {counting[0], Affine{map.offset[0], map.slope[0]}(after.advantage)};
  }
  while (t > begin) gae_token(rewards, values, mask, --t, gamma, lambda, after, advantages, returns);
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
  if (on_device(rewards)) {
    const c10::DeviceGuard guard(rewards.device());
    check_launch("gae", gae_launch(
        r, v, start, kept, last, gamma, lambda, segments, a, out, current_stream(rewards)));
    return;
  }
#endif
  const bool large = advantages.nbytes() > kCacheBytes;
#pragma omp parallel num_threads(at::get_num_threads())
  {
#pragma omp for schedule(dynamic, 16)
    for (int64_t s = 0; s < segments; ++s) {
      const bool stream = large && streamable(a + start[s + 1]) && streamable(out + start[s + 1]);
      const auto segment = kept ? (stream ? gae_segment<true, true, S> : gae_segment<true, false, S>)
                                : (stream ? gae_segment<false, true, S> : gae_segment<false, false, S>);
      segment(r, v, kept, start[s], start[s + 1], last ? double(last[s]) : 0, gamma, lambda, a, out);
    }
    finish_streaming();
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
  if (on_device(rewards)) {
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

void gae(
    const Tensor& rewards, const Tensor& values, const Tensor& starts, const std::optional<Tensor>& mask,
    const std::optional<Tensor>& bootstrap, double gamma, double lam, const Tensor& advantages,
    const Tensor& returns) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const Tensor r = floating_vector(rewards, "rewards", "[T]");
  const auto dtype = r.scalar_type();
  const Tensor v = matching(values, "values", r.sizes(), dtype, r);
  const Tensor start = check_starts(starts, r, "tokens");
  const Tensor kept = matching(mask, "mask", r.sizes(), at::kBool, r);
  const Tensor last = matching(bootstrap, "bootstrap", {start.size(0) - 1}, dtype, r);
  TORCH_CHECK_VALUE(gamma >= 0 && gamma <= 1, "gamma must be in [0, 1], got ", gamma);
  TORCH_CHECK_VALUE(lam >= 0 && lam <= 1, "lam must be in [0, 1], got ", lam);
  for (const Tensor& x : {advantages, returns}) {
    matching(x, "what gae_ writes", r.sizes(), dtype, r);
    TORCH_CHECK_VALUE(x.is_contiguous(), "what gae_ writes must be contiguous");
    prefer_huge_pages(x);
  }
  TORCH_CHECK_VALUE(
      r.numel() == 0 || advantages.data_ptr() != returns.data_ptr(), "advantages and returns must be two tensors");
  const auto run = [&](auto zero) {
    compute_gae<decltype(zero)>(r, v, start, kept, last, gamma, lam, advantages, returns);
  };
  dtype == at::kDouble ? run(0.0) : run(0.0f);
}

Tensor group_advantages(
    const Tensor& rewards, const Tensor& starts, const std::optional<Tensor>& mask, bool by_std) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const Tensor r = floating_vector(rewards, "rewards", "[B]");
  const Tensor start = check_starts(starts, r, "rewards");
  const Tensor kept = matching(mask, "mask", r.sizes(), at::kBool, r);
  const Tensor advantages = at::empty_like(r);
  prefer_huge_pages(advantages);
  const auto run = [&](auto zero) { compute_groups<decltype(zero)>(r, start, kept, by_std, advantages); };
  r.scalar_type() == at::kDouble ? run(0.0) : run(0.0f);
  return advantages;
}

}  // namespace brorl
