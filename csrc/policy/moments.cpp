// Two passes over each block, the second from cache: sums of squares of raw values would lose the spread of values far
// from zero.
#include "policy/moments.h"


#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>

#include "common/block_sums.h"
#include "policy/moments_math.h"
#include "common/tensor_checks.h"

#ifdef BRORL_CUDA
#include "common/cuda_launch.h"
#include "policy/moments_cuda.h"
#endif

namespace brorl {
namespace {

using at::Tensor;

template <typename S>
Moments reduce(const S* values, int64_t n) {
  const double mean = lane_sum(n, [=](int64_t i) { return double(values[i]); }) / double(n);
  const double m2 = lane_sum(n, [=](int64_t i) { return (double(values[i]) - mean) * (double(values[i]) - mean); });
  return {double(n), mean, m2};
}

// A weight of zero leaves an element out, whatever it holds.
template <typename S, typename W>
Moments reduce(const S* values, const W* weights, int64_t n) {
  S weight[kSumBlock], value[kSumBlock];
  for (int64_t i = 0; i < n; ++i) weight[i] = S(weights[i]);
  for (int64_t i = 0; i < n; ++i) value[i] = weight[i] != 0 ? values[i] : S(0);
  const double count = lane_sum(n, [&](int64_t i) { return double(weight[i]); });
  const double sum = lane_sum(n, [&](int64_t i) { return double(weight[i]) * double(value[i]); });
  const double mean = mean_of(sum, count);
  const double m2 = lane_sum(n, [&](int64_t i) {
    const double deviation = double(value[i]) - mean;
    return double(weight[i]) * deviation * deviation;
  });
  return {count, mean, m2};
}

template <typename S, typename W>
void compute(const Tensor& values, const Tensor& weights, const Tensor& result) {
  const S* const v = values.const_data_ptr<S>();
  const W* const w = pointer<W>(weights);
  double* const found = result.mutable_data_ptr<double>();
#ifdef BRORL_CUDA
  if (on_device(values)) {
    const c10::DeviceGuard guard(values.device());
    const int64_t blocks = (values.numel() + kMomentsPerBlock - 1) / kMomentsPerBlock;
    const Tensor parts = at::empty({blocks, 3}, result.options());
    double* const memory = parts.mutable_data_ptr<double>();
    check_launch("moments", moments_launch(v, w, values.numel(), memory, found, current_stream(values)));
    return;
  }
#endif
  *reinterpret_cast<Moments*>(found) = block_sums<Moments>(values.numel(), [&](int64_t begin, int64_t n) {
    return w ? reduce<S, W>(v + begin, w + begin, n) : reduce<S>(v + begin, n);
  });
}

template <typename S>
void whiten_memory(const Tensor& values, double mean, double inverse_std, const Tensor& mask) {
  S* const v = values.mutable_data_ptr<S>();
  const int64_t n = values.numel();
#ifdef BRORL_CUDA
  if (on_device(values)) {
    const c10::DeviceGuard guard(values.device());
    check_launch("whiten_", whiten_launch(v, mean, inverse_std, pointer<bool>(mask), n, current_stream(values)));
    return;
  }
#endif
  const bool* const kept = pointer<bool>(mask);
  if (!kept) {
#pragma omp parallel for simd schedule(static) num_threads(at::get_num_threads()) if (n > kSumBlock)
    for (int64_t i = 0; i < n; ++i) v[i] = whitened(v[i], mean, inverse_std);
    return;
  }
#pragma omp parallel for schedule(static) num_threads(at::get_num_threads()) if (n > kSumBlock)
  for (int64_t begin = 0; begin < n; begin += kSumBlock) {
    const int64_t size = std::min(kSumBlock, n - begin);
    S weight[kSumBlock];  // of one size with the values, so that the choice vectorises
    for (int64_t i = 0; i < size; ++i) weight[i] = S(kept[begin + i]);
    for (int64_t i = 0; i < size; ++i) {
      const S result = whitened(v[begin + i], mean, inverse_std);
      v[begin + i] = weight[i] != 0 ? result : S(0);
    }
  }
}

}  // namespace

Tensor moments(const Tensor& values, const std::optional<Tensor>& weights) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const Tensor v = floating(values, "values");
  const auto dtype = v.scalar_type();
  const bool of_bool = weights && weights->scalar_type() == at::kBool;
  const Tensor w = matching(weights, "weights", v.sizes(), of_bool ? at::kBool : dtype, v);
  const Tensor result = at::empty({3}, v.options().dtype(at::kDouble));
  const auto run = [&](auto zero) {
    using S = decltype(zero);
    of_bool ? compute<S, bool>(v, w, result) : compute<S, S>(v, w, result);
  };
  dtype == at::kDouble ? run(0.0) : run(0.0f);
  return result;
}

void whiten(const Tensor& values, double mean, double std, const std::optional<Tensor>& mask) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  floating(values, "values");
  TORCH_CHECK_VALUE(values.is_contiguous(), "values must be contiguous: whiten_ works in place");
  const Tensor kept = matching(mask, "mask", values.sizes(), at::kBool, values);
  TORCH_CHECK_VALUE(!(std < 0), "std must be at least 0, got ", std);
  const double inverse_std = std == 0 ? 0 : 1 / std;
  const auto run = [&](auto zero) { whiten_memory<decltype(zero)>(values, mean, inverse_std, kept); };
  values.scalar_type() == at::kDouble ? run(0.0) : run(0.0f);
}

}  // namespace brorl
