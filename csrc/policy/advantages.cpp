// Segments are independent, so threads process them in parallel. Moments use one thread, because the result must not
// depend on the number of threads.
#include "policy/advantages.h"

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include "common/cuda_launch.h"
#include "common/tensor_checks.h"
#include "policy/advantages_cuda.h"
#include "policy/advantages_math.h"

namespace brorl {
namespace {

using at::Tensor;

// Starts are offsets into memory, so they are checked one by one. On CUDA this waits for the device.
Tensor check_starts(const Tensor& starts, const Tensor& rewards) {
  TORCH_CHECK_VALUE(starts.dim() == 1 && starts.size(0) > 0, "starts must be [S + 1], got ", starts.sizes());
  const Tensor result = matching(starts, "starts", starts.sizes(), at::kLong, rewards);
  const Tensor host = result.cpu();
  const int64_t* const start = host.const_data_ptr<int64_t>();
  const int64_t last = host.size(0) - 1;
  TORCH_CHECK_VALUE(
      start[0] == 0 && start[last] == rewards.size(0), "starts must go from 0 to the ", rewards.size(0),
      " tokens, goes from ", start[0], " to ", start[last]);
  for (int64_t s = 0; s < last; ++s) {
    TORCH_CHECK_VALUE(
        start[s] <= start[s + 1], "starts must not fall: starts[", s, "] is ", start[s], ", starts[", s + 1, "] is ",
        start[s + 1]);
  }
  return result;
}

template <bool Weighted, typename S>
void compute_moments(const S* values, const S* weights, int64_t n, double* result) {
  double count = 0, sum = 0, m2 = 0;
#pragma omp simd reduction(+ : count, sum)
  for (int64_t i = 0; i < n; ++i) {
    const bool counts = !Weighted || weights[i] != 0;
    count += counts ? 1 : 0;
    sum += counts ? double(values[i]) : 0;
  }
  const double mean = count ? sum / count : 0;
#pragma omp simd reduction(+ : m2)
  for (int64_t i = 0; i < n; ++i) {
    const double deviation = double(values[i]) - mean;
    m2 += !Weighted || weights[i] != 0 ? deviation * deviation : 0;
  }
  result[0] = count;
  result[1] = mean;
  result[2] = m2;
}

}  // namespace

std::tuple<Tensor, Tensor> gae(
    const Tensor& rewards, const Tensor& values, const Tensor& starts, double gamma, double lam) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const Tensor r = floating_vector(rewards, "rewards", "[T]");
  const Tensor v = matching(values, "values", r.sizes(), r.scalar_type(), r);
  const Tensor start = check_starts(starts, r);
  TORCH_CHECK_VALUE(gamma >= 0 && gamma <= 1, "gamma must be in [0, 1], got ", gamma);
  TORCH_CHECK_VALUE(lam >= 0 && lam <= 1, "lam must be in [0, 1], got ", lam);
  const Tensor advantages = at::empty_like(r), returns = at::empty_like(r);
  const int64_t segments = start.size(0) - 1;
  const auto* const begin = start.const_data_ptr<int64_t>();
  with_type(r, [&](auto zero) {
    using S = decltype(zero);
    const S *reward = r.const_data_ptr<S>(), *value = v.const_data_ptr<S>();
    S *a = advantages.mutable_data_ptr<S>(), *out = returns.mutable_data_ptr<S>();
#ifdef BRORL_CUDA
    if (on_device(r)) {
      const c10::DeviceGuard guard(r.device());
      check_launch("gae", gae_launch(reward, value, begin, segments, gamma, lam, a, out, current_stream(r)));
      return;
    }
#endif
#pragma omp parallel for schedule(dynamic, 16) num_threads(at::get_num_threads())
    for (int64_t s = 0; s < segments; ++s) {
      const int64_t t = begin[s];
      gae_segment(reward + t, value + t, begin[s + 1] - t, gamma, lam, a + t, out + t);
    }
  });
  return {advantages, returns};
}

Tensor moments(const Tensor& values, const std::optional<Tensor>& weights) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const Tensor v = floating(values, "values");
  const Tensor w = weights ? matching(*weights, "weights", v.sizes(), v.scalar_type(), v) : Tensor();
  const int64_t blocks = on_device(v) ? token_blocks(v.numel()) : 0;
  const Tensor table = at::empty({1 + blocks, 3}, v.options().dtype(at::kDouble));  // its first row is the result
  double* const out = table.mutable_data_ptr<double>();
  with_type(v, [&](auto zero) {
    using S = decltype(zero);
    const S* const data = v.const_data_ptr<S>();
    const S* const weight = w.defined() ? w.const_data_ptr<S>() : nullptr;
#ifdef BRORL_CUDA
    if (on_device(v)) {
      const c10::DeviceGuard guard(v.device());
      check_launch("moments", moments_launch(data, weight, v.numel(), out, current_stream(v)));
      return;
    }
#endif
    weight ? compute_moments<true>(data, weight, v.numel(), out) : compute_moments<false>(data, weight, v.numel(), out);
  });
  return table.select(0, 0);
}

void whiten(const Tensor& values, double mean, double std) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  floating(values, "values");
  TORCH_CHECK_VALUE(values.is_contiguous(), "values must be contiguous: whiten_ works in place");
  TORCH_CHECK_VALUE(!(std < 0), "std must be at least 0, got ", std);
  const double inverse_std = std == 0 ? 0 : 1 / std;
  const int64_t n = values.numel();
  with_type(values, [&](auto zero) {
    using S = decltype(zero);
    S* const data = values.mutable_data_ptr<S>();
#ifdef BRORL_CUDA
    if (on_device(values)) {
      const c10::DeviceGuard guard(values.device());
      check_launch("whiten_", whiten_launch(data, n, mean, inverse_std, current_stream(values)));
      return;
    }
#endif
    for (int64_t i = 0; i < n; ++i) data[i] = whitened(data[i], mean, inverse_std);
  });
}

}  // namespace brorl
